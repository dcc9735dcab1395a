"""All trackers as one."""

from pathlib import Path

import pytest

from rollstock import RunInfo, Tracker
from rollstock.tracking import Trackers


class Recorder(Tracker):
    def __init__(self, name, fails_in=()):
        super().__init__()
        self.plugin_name, self.fails_in, self.calls = name, fails_in, []

    def _call(self, name):
        self.calls.append(name)
        if name in self.fails_in:
            raise OSError(f"no {name} today")

    def start(self, run, state):
        self._call("start")

    def log(self, step, metrics):
        self._call("log")
        self.metrics = metrics

    def finish(self, status):
        self._call("finish")


RUN = RunInfo(name="run", directory=Path("run"), config={}, num_steps=2)


def test_a_tracker_that_fails_is_left_out_and_counted_and_the_others_go_on():
    broken, sound = Recorder("broken", {"log"}), Recorder("sound")
    trackers = Trackers([broken, sound])
    trackers.start(RUN, {})
    trackers.log(1, {"reward/mean": 0.5})
    trackers.log(2, {"reward/mean": 0.6})
    trackers.finish("finished")
    assert broken.calls == ["start", "log"]
    assert sound.calls == ["start", "log", "log", "finish"]
    assert sound.metrics == {"reward/mean": 0.6, "tracker/num_failed": 1.0}
    assert trackers.failed == {"broken": "no log today"}


def test_of_a_tracker_that_failed_the_last_state_is_kept():
    class Keeps(Recorder):
        def state(self):
            self._call("state")
            return {"calls": len(self.calls)}

    early, late = Keeps("early", {"log"}), Keeps("late")
    trackers = Trackers([early, late, Keeps("late")])
    trackers.start(RUN, {"early": {"calls": 7}, "gone from the config": {}})
    trackers.log(1, {})
    assert trackers.state() == {"early": {"calls": 7}, "late": {"calls": 3}, "late_2": {"calls": 3}}
    late.fails_in = {"state"}
    assert trackers.state() == {"early": {"calls": 7}, "late": {"calls": 3}, "late_2": {"calls": 4}}
    assert set(trackers.failed) == {"early", "late"}


def test_messages_samples_and_evaluations_reach_every_tracker_that_is_well(caplog):
    class Hears(Recorder):
        def evaluation(self, step, metrics):
            self._call("evaluation")

        def samples(self, step, rows):
            self._call("samples")

        def message(self, text):
            self._call("message")

    first, second = Hears("first", {"samples"}), Hears("second")
    trackers = Trackers([first, second])
    trackers.start(RUN, {})
    trackers.samples(1, [])
    trackers.evaluation(1, {})
    with caplog.at_level("INFO", logger="rollstock"):
        trackers.message("half way")
    assert first.calls == ["start", "samples"]
    assert second.calls == ["start", "samples", "evaluation", "message"]
    assert "half way" in caplog.text


def test_what_was_never_opened_is_not_closed():
    first, second, third = Recorder("first"), Recorder("second", {"start"}), Recorder("third")
    trackers = Trackers([first, second, third])
    with pytest.raises(OSError, match="no start today"):
        trackers.start(RUN, {})
    trackers.finish("failed")
    assert first.calls == ["start", "finish"]
    assert second.calls == ["start"]
    assert third.calls == []
    dry = Recorder("dry")
    Trackers([dry]).finish("finished")
    assert dry.calls == []
