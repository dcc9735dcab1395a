"""A run that lost a trainer, put back to the newest state that there is, to play from there what was broken off.

For `rollstock.launch`. Lost workers without a state never come this far: their executor replaces them and makes the
call again. Starting workers is the executor's part, and what a state is, the roles'.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstock.checkpoint import Checkpoint, CheckpointCorruptError, CheckpointNotFoundError
from rollstock.errors import RunError, WorkerLostError
from rollstock.metrics import Metric
from rollstock.restart import TRAINED_ROLES, Tensors, controller_state, plugin_states, restore, run_info, trained
from rollstock.weightsync.deliver import sync_weights

if TYPE_CHECKING:
    from rollstock.run import Run
    from rollstock.schema import RecoverySection

logger = logging.getLogger(__name__)
GIB = 2**30


class Recovery:
    """What a run can be put back to, and how often it was since a step was last finished."""

    def __init__(self, settings: RecoverySection) -> None:
        self._settings = settings
        self._first: Checkpoint | None = None
        self._kept: Checkpoint | None = None
        self._is_too_large = False
        self._num_restarts = 0

    def begin(self, run: Run) -> None:
        """Remember how the controller was before the first step: with workers built anew, that is all of a run."""
        if not run.executor.recovers:
            return
        state = controller_state(run, plugin_states(run), {})
        self._first = Checkpoint(run.progress.step, Path(), None, copy.deepcopy(state), {})

    def keep(self, run: Run, plugins: Mapping[str, Any]) -> None:
        """A step is finished: keep a copy of the trainers' state, if there is a use for it and it is not too large.

        plugins: the state of algorithm and extensions.
        """
        self._num_restarts = 0
        if not self._is_wanted(run):
            return
        tensors, values = trained(run)
        size = _num_bytes(tensors)
        if size > self._settings.state_gib * GIB:
            logger.info(
                "the trainers' state of %.1f GiB is above recovery.state_gib, so no copy of it is kept after each step",
                size / GIB,
            )
            self._is_too_large, self._kept = True, None
            return
        state = copy.deepcopy(controller_state(run, plugins, values))
        self._kept = Checkpoint(run.progress.step, Path(), None, state, tensors)

    def kept(self, run: Run) -> tuple[Tensors, dict[str, Any]] | None:
        """The copy of the trainers' state after the last finished step, as `trained` gives it; None if there is
        none."""
        kept = self._kept
        if kept is None or kept.step != run.progress.step:
            return None
        return dict(kept.tensors), dict(kept.state["backends"])

    def recover(self, run: Run, error: WorkerLostError) -> None:
        """Start lost workers again and put the run back: to the copy, to the newest checkpoint, or to its start.

        Raises `error` if the executor cannot start workers again, or if that was done too often without a step
        finished in between.
        """
        if not run.executor.recovers or self._first is None or not self._settings.max_restarts:
            raise error
        if self._num_restarts >= self._settings.max_restarts:
            error.add_note(
                f"workers were started again {self._num_restarts} times without a step finished in between "
                "(recovery.max_restarts)"
            )
            raise error
        self._num_restarts += 1
        began, broken = time.monotonic(), run.step
        logger.warning("%s; it is started again (%d of %d)", error, self._num_restarts, self._settings.max_restarts)
        point = self._newest(run)
        with run.pipeline.pausing():
            rebuilt = run.executor.recover(() if point.tensors else TRAINED_ROLES)
            restore(run, point)
            run.trackers.rewind(run_info(run, point.step or None), point.state["trackers"])
            if run.pipeline.runs_ahead:  # which asks for more before the loop brings weights
                run.version = max(run.progress.version - 1, 0)
                sync_weights(run)
            for role, ranks in rebuilt.items():
                for rank in ranks:
                    run.manager.hook.rollstock_worker_started(run=run, role=role, rank=rank)
        seconds = time.monotonic() - began
        run.record_event(
            {
                "recovery/num_restarts": Metric(1.0, 1.0, "sum"),
                "recovery/num_steps_again": Metric(float(max(0, broken - 1 - point.step)), 1.0, "sum"),
                "timing_s/restart": Metric(seconds, 1.0, "sum"),
            }
        )
        run.trackers.message(
            f"{error.role} worker {error.rank} was lost; started again in {seconds:.1f} s, going on after step "
            f"{point.step}"
        )

    def _is_wanted(self, run: Run) -> bool:
        settings = self._settings
        return bool(run.executor.recovers and settings.max_restarts and settings.state_gib) and not self._is_too_large

    def _newest(self, run: Run) -> Checkpoint:
        if self._kept is not None:
            return self._kept
        run.tell_saved(wait=True)
        try:
            return run.store.load()
        except CheckpointNotFoundError:
            pass
        except CheckpointCorruptError as error:
            logger.warning("no checkpoint is sound, so the run begins again: %s", error)
        if self._first is None or self._first.step:
            raise RunError(f"there is no checkpoint to go back to in {run.store.root}")
        return self._first


def train_on(run: Run, play: Callable[[Run], None]) -> None:
    """Play a run to its end; after a lost worker, put it back and play on from there. `play` goes on with the step
    after `run.progress.step`, however it ended before."""
    while True:
        try:
            return play(run)
        except WorkerLostError as error:
            _recover(run, error)


def _recover(run: Run, error: WorkerLostError) -> None:
    """Put a run back, again if another worker is lost meanwhile: a machine that is gone is not noticed at once."""
    while True:
        try:
            return run.recovery.recover(run, error)
        except WorkerLostError as another:
            if another is error:
                raise
            error = another


def _num_bytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for part in tensors.values() for tensor in part.values())
