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
