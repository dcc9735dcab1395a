"""What `rollstock train`, `resume` and `eval` do: a run begun, gone on with, or evaluated, and its end explained.

For the command line and for programs that start runs. What happens within a step is `rollstock.loop`'s.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstock.build import Parts, build, choose
from rollstock.config import complete_config, load_run_config, write_config
from rollstock.conversion import to_plain
from rollstock.errors import UserError
from rollstock.interfaces.tracker import RunInfo
from rollstock.interrupt import Interrupt, InterruptedRun
from rollstock.loop import train as train_loop
from rollstock.manifest import build_manifest, record_resume, write_manifest
from rollstock.restart import restore
from rollstock.rundir import RunDirectory, log_to_file, stop_logging
from rollstock.stages import Stages

if TYPE_CHECKING:
    from rollstock.checkpoint import Checkpoint
    from rollstock.run import Run
    from rollstock.schema import RunConfig

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended. status: `finished`, `interrupted`, or `checked` for a dry run."""

    status: str
    directory: Path
    step: int
    seconds: float = 0.0
    evaluation: dict[str, float] = dataclasses.field(default_factory=dict)
    message: str = ""


def train(config: RunConfig, *, dry_run: bool = False, overwrite: bool = False) -> Outcome:
    """Begin a run. A dry run makes every plugin, model and worker, and plays no step.

    Raises UserError if the config cannot work, RunError if the run fails.
    """
    parts = choose(config)
    config = complete_config(config, parts.manager)
    path = Path(config.run.directory)
    if dry_run:
        with Interrupt() as interrupt:
            run = build(config, path, parts, interrupt)
            run.close("finished")
        return Outcome(status="checked", directory=path, step=0, message="every part of this config could be made; no step was taken")
    directory = RunDirectory.create(path, overwrite=overwrite)
    write_config(config, directory.config)
    write_manifest(directory.manifest, _manifest(config, parts))
    return _execute(config, directory, parts, checkpoint=None)


def resume(path: Path, *, step: int | None = None) -> Outcome:
    """Go on with a run from its newest sound checkpoint, or from the one of `step`; from the start if it has none yet.

    Raises UserError if there is no run, or nothing is left to do.
    """
    directory = RunDirectory.open(path)
    directory.lock()
    config = load_run_config(directory.config)
    config.run.directory = str(path)
    parts = choose(config)
    checkpoint = _newest(config, directory, step)
    if checkpoint is not None and checkpoint.step >= config.train.steps:
        raise UserError(
            f"the run in {path} has finished its {config.train.steps} steps; to train longer, start a new run with more "
            "train.steps, or export it: rollstock export"
        )
    for difference in record_resume(directory.manifest, checkpoint.step if checkpoint else 0):
        logger.warning("not as when the run was started: %s", difference)
    return _execute(config, directory, parts, checkpoint=checkpoint)


def evaluate(path: Path, *, step: int | None = None) -> Outcome:
    """Evaluate a run's newest (or given) checkpoint on held-out tasks; writes nothing."""
    began = time.monotonic()
    directory = RunDirectory.open(path)
    config = load_run_config(directory.config)
    config.trackers = []
    parts = choose(config)
    checkpoint = _newest(config, directory, step)
    if checkpoint is None:
        raise UserError(f"the run in {path} has no checkpoint to evaluate yet")
    with Interrupt() as interrupt:
        run = build(config, path, parts, interrupt, only_generate=True)
        try:
            restore(run, checkpoint)
            Stages(run).sync()
            values, _score = run.evaluator.evaluate(run)
        finally:
            run.close("finished")
    return Outcome(
        status="finished", directory=path, step=checkpoint.step, seconds=time.monotonic() - began, evaluation=values
    )


def _newest(config: RunConfig, directory: RunDirectory, step: int | None) -> Checkpoint | None:
    from rollstock.checkpoint import CheckpointStore

    store = CheckpointStore(directory.checkpoints, keep=config.checkpoint.keep, compression=config.checkpoint.compression)
    return store.load(step) if step is not None or store.steps() else None


def _execute(config: RunConfig, directory: RunDirectory, parts: Parts, *, checkpoint: Checkpoint | None) -> Outcome:
    """Build, restore, train, and close; turn the way it ended into an outcome."""
    began = time.monotonic()
    with _logging(directory), Interrupt() as interrupt:
        run = build(config, directory.path, parts, interrupt)
        status, message, evaluation = "failed", "", {}
        try:
            run.roles["actor"].call("save_config", directory.model)
            parts.tokenizer.save_pretrained(directory.model)
            _start_trackers(run, checkpoint)
            if checkpoint is not None:
                restore(run, checkpoint)
            train_loop(run)
            status, evaluation = "finished", run.last_evaluation
        except InterruptedRun as signal:
            with interrupt.deferred():
                message = _leave_checkpoint(run, signal)
            status = "interrupted"
        except Exception:
            logger.exception("the run failed in step %d", run.step)
            raise
        finally:
            with interrupt.deferred():
                run.close(status)
            directory.unlock()
    return Outcome(
        status=status,
        directory=directory.path,
        step=run.progress.step,
        seconds=time.monotonic() - began,
        evaluation=evaluation,
        message=message,
    )


def _start_trackers(run: Run, checkpoint: Checkpoint | None) -> None:
    info = RunInfo(
        name=run.config.run.name or run.directory.name,
        directory=run.directory,
        config=to_plain(run.config),
        num_steps=run.config.train.steps,
        resumed_at=checkpoint.step if checkpoint else None,
    )
    run.trackers.start(info, checkpoint.state["trackers"] if checkpoint else {})


def _leave_checkpoint(run: Run, signal: InterruptedRun) -> str:
    """Save the last finished step; say how to go on."""
    step = run.progress.step
    if step and step not in run.store.steps():
        run.save()
    kept = f"a checkpoint of step {step} is written" if step else "no step was finished yet, so there is no checkpoint"
    return f"{signal.signal_name}: {kept}; go on with: rollstock resume {run.directory}"


@contextmanager
def _logging(directory: RunDirectory) -> Iterator[None]:
    handler = log_to_file(directory.logs / "controller.log")
    try:
        yield
    finally:
        stop_logging(handler)


def _manifest(config: RunConfig, parts: Parts) -> dict[str, Any]:
    plugins = [
        {"kind": entry.kind, "name": entry.name, "distribution": entry.distribution, "version": entry.version}
        for entry in parts.manager.loaded()
    ]
    data = {parts.environment.plugin_name: parts.environment.fingerprint()}
    return build_manifest(plugins=plugins, seed=config.train.seed, data=data)
