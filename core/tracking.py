"""All trackers of a run as one; a tracker that fails is reported and left out, and never ends the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollstock.errors import noted
from rollstock.interfaces.tracker import RunInfo, Tracker
from rollstock.plugin import distinct_names

logger = logging.getLogger(__name__)


class Trackers:
    """Passes everything on to each tracker in turn. One that raises gets nothing more in this run."""

    def __init__(self, trackers: Sequence[Tracker[Any]]) -> None:
        names = distinct_names(tracker.plugin_name for tracker in trackers)
        self._trackers = dict(zip(names, trackers, strict=True))
        self._failed: dict[str, str] = {}
        self._started: set[str] = set()
        self._states: dict[str, dict[str, Any]] = {}  # the last that each gave, for those that fail
        self._newest = 0  # the step of which something was recorded

    @property
    def failed(self) -> Mapping[str, str]:
        """The trackers that failed, with the reason."""
        return self._failed

    def start(self, run: RunInfo, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Open all. A tracker that cannot even start ends the run: nothing is lost yet, and the user can mend it."""
        self._states = {name: dict(state) for name, state in states.items() if name in self._trackers}
        for name, tracker in self._trackers.items():
            with noted(f"tracker {name!r} could not start"):
                tracker.start(run, states.get(name, {}))
            self._started.add(name)

    def rewind(self, run: RunInfo, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Go back to what was recorded when `state` gave `states`, as after a resume; nothing to do where nothing was
        recorded since."""
        now = self.state()
        if self._newest <= (run.resumed_at or 0) and all(now.get(name) == states[name] for name in states):
            return
        self._newest = run.resumed_at or 0
        for name, tracker in self._alive():
            try:
                tracker.finish("interrupted")
                tracker.start(run, states.get(name, {}))
            except Exception as error:  # whatever a tracker's library raises
                self._fail(name, error)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a finished step, with how many trackers have failed so far."""
        self._newest = step
        values = {**metrics, "tracker/num_failed": float(len(self._failed))}
        self._each(lambda tracker: tracker.log(step, dict(sorted(values.items()))))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of an evaluation."""
        self._each(lambda tracker: tracker.evaluation(step, metrics))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """The trajectories of a step."""
        self._each(lambda tracker: tracker.samples(step, rows))

    def message(self, text: str) -> None:
        """A sentence for the person who watches."""
        logger.info(text)
        self._each(lambda tracker: tracker.message(text))

    def state(self) -> dict[str, dict[str, Any]]:
        """What each tracker keeps in a checkpoint; of one that failed, what it kept before, to go on from there."""
        for name, tracker in self._alive():
            try:
                self._states[name] = tracker.state()
            except Exception as error:  # whatever a tracker's library raises
                self._fail(name, error)
        return dict(self._states)

    def finish(self, status: str) -> None:
        """Close those that were opened: a dry run opens none, and a failed start not all."""
        self._trackers = {name: tracker for name, tracker in self._trackers.items() if name in self._started}
        self._each(lambda tracker: tracker.finish(status))

    def _alive(self) -> list[tuple[str, Tracker[Any]]]:
        return [(name, tracker) for name, tracker in self._trackers.items() if name not in self._failed]

    def _each(self, call: Callable[[Tracker[Any]], None]) -> None:
        for name, tracker in self._alive():
            try:
                call(tracker)
            except Exception as error:  # whatever a tracker's library raises
                self._fail(name, error)

    def _fail(self, name: str, error: Exception) -> None:
        self._failed[name] = str(error)
        logger.warning("tracker %r failed and gets nothing more in this run: %s", name, error, exc_info=error)
