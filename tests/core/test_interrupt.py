"""Signals, turned into an orderly end."""

import signal
import threading

import pytest

from rollstock.interrupt import Interrupt, InterruptedRun


def test_a_signal_ends_a_safe_stretch_at_once():
    reached = []
    with Interrupt() as interrupt, pytest.raises(InterruptedRun, match="SIGTERM") as caught, interrupt.allowed():
        signal.raise_signal(signal.SIGTERM)
        reached.append("the next line")
    assert reached == []
    assert caught.value.signal_name == "SIGTERM"


def test_a_signal_waits_for_the_next_safe_stretch():
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(InterruptedRun, match="SIGINT"):
            interrupt.check()
        with pytest.raises(InterruptedRun, match="SIGINT"), interrupt.allowed():
            pytest.fail("the stretch was begun all the same")


def test_without_a_signal_nothing_is_raised():
    with Interrupt() as interrupt:
        interrupt.check()
        with interrupt.allowed():
            interrupt.check()


def test_an_unsafe_stretch_within_a_safe_one_is_not_cut():
    reached = []
    with Interrupt() as interrupt, pytest.raises(InterruptedRun), interrupt.allowed():
        with interrupt.deferred():
            signal.raise_signal(signal.SIGTERM)
            reached.append("the next line")
        interrupt.check()
    assert reached == ["the next line"]


def test_a_safe_stretch_within_an_unsafe_one_may_be_cut_and_the_unsafe_one_goes_on():
    reached = []
    with Interrupt() as interrupt, interrupt.deferred():
        with pytest.raises(InterruptedRun), interrupt.allowed():
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        reached.append("the next line")
    assert reached == ["the next line"]


def test_a_second_ctrl_c_does_not_wait():
    with Interrupt() as interrupt, interrupt.deferred():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_second_sigterm_waits_like_the_first():
    with Interrupt() as interrupt, interrupt.deferred():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(InterruptedRun, match="SIGTERM"):
            interrupt.check()


def test_no_plugin_catches_it_by_accident():
    assert not issubclass(InterruptedRun, Exception)


def test_in_another_thread_signals_are_left_to_the_main_one():
    before = signal.getsignal(signal.SIGTERM)
    found = []

    def run():
        with Interrupt() as interrupt:
            found.append(signal.getsignal(signal.SIGTERM))
            interrupt.check()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [before]
    assert signal.getsignal(signal.SIGTERM) is before
