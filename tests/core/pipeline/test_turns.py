"""Turns of two threads: first come, first served, and nobody is left waiting."""

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from rollstock import RunError, WorkerGroup
from rollstock.pipeline.turns import SharedGroup, Turns


def in_thread(function) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


def test_whoever_came_first_goes_first_although_another_asks_again_and_again():
    turns, order = Turns(), []

    def greedy() -> None:
        for _ in range(50):
            with turns:
                order.append("greedy")
                wait_until(lambda: "patient" in order or turns._waiting)  # somebody asks in the meantime

    def patient() -> None:
        with turns:
            order.append("patient")

    threads = [in_thread(greedy)]
    wait_until(lambda: order)
    threads.append(in_thread(patient))
    for thread in threads:
        thread.join(60)
    assert order[:3] == ["greedy", "patient", "greedy"]
    assert len(order) == 51


def test_a_thread_may_take_a_turn_within_its_own():
    turns = Turns()
    with turns, turns:
        assert not turns.is_anothers
    with turns:
        assert in_thread(lambda: None) is not None
    assert turns._owner is None


def test_an_error_within_a_turn_ends_it():
    turns = Turns()
    with pytest.raises(ValueError, match="mine"), turns:
        raise ValueError("mine")
    with turns:
        pass


def test_who_waits_when_it_is_over_is_told_and_does_not_wait_for_ever():
    turns, told = Turns(), []

    def late() -> None:
        try:
            with turns:
                pass
        except RunError as error:
            told.append(str(error))

    with turns:
        thread = in_thread(late)
        wait_until(lambda: turns._waiting)
        turns.end()
        thread.join(60)
    assert told == ["the workers are being ended"]


class Workers(WorkerGroup):
    role = "rollout"
    size = 3

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def call(self, method, *args, **kwargs):
        self.calls.append((method, *args))
        return len(self.calls)

    def submit(self, method, *args, **kwargs):
        future: Future[Any] = Future()
        future.set_result(self.call(method, *args))
        return future

    can_resize = True

    def member(self, rank):
        return f"worker {rank}"

    def resize(self, count):
        return count + 1

    def load(self):
        return None


def test_a_shared_group_is_the_group_with_its_calls_one_at_a_time():
    workers = Workers()
    shared = SharedGroup(workers)
    assert (shared.role, shared.size, shared.can_resize, shared.load()) == ("rollout", 3, True, None)
    assert (shared.member(2), shared.resize(4)) == ("worker 2", 5)
    assert shared.call("generate", 1) == 1
    assert shared.submit("generate", 2).result() == 2
    with shared.turns:
        thread = in_thread(lambda: shared.call("generate", 3))
        wait_until(lambda: shared.turns._waiting)
        assert workers.calls == [("generate", 1), ("generate", 2)]
    thread.join(60)
    assert workers.calls[-1] == ("generate", 3)


def test_workers_that_nobody_waits_for_are_not_asked_to_close_while_they_are_busy():
    workers = Workers()
    shared = SharedGroup(workers)
    shared.is_abandoned = True
    holding, let_go = threading.Event(), threading.Event()

    def busy() -> None:
        with shared.turns:
            holding.set()
            let_go.wait(60)

    thread = in_thread(busy)
    holding.wait(60)
    assert shared.call("close") is None
    assert workers.calls == []
    let_go.set()
    thread.join(60)
    shared.call("close")
    assert workers.calls == [("close",)]


def test_workers_that_nobody_waits_for_close_although_a_thread_ended_within_its_turn():
    workers = Workers()
    shared = SharedGroup(workers)
    holding, over = threading.Event(), threading.Event()

    def ended() -> None:
        shared.turns._changed.acquire()  # an exception came before the block that would let go of it
        holding.set()
        over.wait()  # lest another thread is given the number of this one, whose lock it then is

    in_thread(ended)
    holding.wait(60)
    shared.is_abandoned = True
    closing = in_thread(lambda: shared.call("close"))
    closing.join(10)
    over.set()
    assert not closing.is_alive()
    assert workers.calls == [("close",)]
