"""What `rollstock train`, `resume` and `eval` do: a run begun, gone on with, or evaluated, and its end explained.

For the command line and for programs that start runs. What happens within a step is `rollstock.loop`'s.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstock.build import Parts, build, check_first_prompt, choose
from rollstock.config import complete_config, load_run_config, refuse_concealed, write_config
from rollstock.conversion import to_plain
from rollstock.errors import UserError
from rollstock.evaluation import Evaluator
from rollstock.interrupt import Interrupt, InterruptedRun
from rollstock.loop import train as train_loop
from rollstock.manifest import build_manifest, record_resume, write_manifest
from rollstock.recovery import train_on
from rollstock.restart import restore, run_info
from rollstock.rundir import RunDirectory, log_to_file, stop_logging
from rollstock.secrets import known_secrets
from rollstock.stages import Stages

if TYPE_CHECKING:
    from rollstock.checkpoint import Checkpoint
    from rollstock.profile import ProfileSettings
    from rollstock.profile.profiler import StepProfiler
    from rollstock.run import Run
    from rollstock.schema import RunConfig

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended. status: `finished`, `interrupted`, or `checked` for a dry run; profile: of a profiled run, as
    `profile/profile.json` has it."""

    status: str
    directory: Path
    step: int
    seconds: float = 0.0
    evaluation: dict[str, float] = dataclasses.field(default_factory=dict)
    message: str = ""
    profile: dict[str, Any] = dataclasses.field(default_factory=dict)


def train(
    config: RunConfig, *, dry_run: bool = False, overwrite: bool = False, profile: ProfileSettings | None = None
) -> Outcome:
    """Begin a run. A dry run makes every plugin, model and worker, and plays no step. profile: which steps are
    profiled.

    Raises UserError if the config cannot work, RunError if the run fails.
    """
    parts = choose(config)
    config = complete_config(config, parts.manager)
    check_first_prompt(config, parts)
    path = Path(config.run.directory)
    if dry_run:
        if not overwrite:
            RunDirectory(path).check_free()
        build(config, path, parts, Interrupt()).close("finished")
        message = "every part of this config could be made; no step was taken"
        return Outcome(status="checked", directory=path, step=0, message=message)
    with RunDirectory.reserve(path, overwrite=overwrite).locked() as directory:
        return _execute(config, directory, parts, checkpoint=None, is_new=True, profile=profile)


def resume(path: Path, *, step: int | None = None, profile: ProfileSettings | None = None) -> Outcome:
    """Go on with a run from its newest sound checkpoint, or from the one of `step`; from the start if it has none yet.

    Raises UserError if there is no run, or nothing is left to do.
    """
    with RunDirectory.open(path).locked() as directory, ExitStack() as stack:
        config = load_run_config(directory.config)
        config.run.directory = str(path)
        stack.enter_context(_logging(directory, config))
        refuse_concealed(config, directory.config)
        parts = choose(config)
        checkpoint = _newest(config, directory, step)
        if checkpoint is not None and not _is_unfinished(config, checkpoint):
            raise UserError(
                f"the run in {path} has finished its {config.train.steps} steps; to train longer, start a new run with "
                "more train.steps, or export it: rollstock export"
            )
        if checkpoint is None:
            logger.warning("%s has no checkpoint: beginning again with the first step", path)
        for difference in record_resume(
            directory.manifest, checkpoint.step if checkpoint else 0, known=known_secrets(to_plain(config))
        ):
            logger.warning("not as when the run was started: %s", difference)
        return _execute(config, directory, parts, checkpoint=checkpoint, is_new=False, profile=profile)


def _is_unfinished(config: RunConfig, checkpoint: Checkpoint) -> bool:
    """Whether steps are left, or the last evaluation is, which a signal may have cut short."""
    evaluated: int = checkpoint.state["progress"]["evaluated"]
    left = Evaluator(config.evaluation).is_due(checkpoint.step, last=True, done=evaluated)
    return checkpoint.step < config.train.steps or left


def evaluate(path: Path, *, step: int | None = None) -> Outcome:
    """Evaluate a run's newest (or given) checkpoint on held-out tasks; writes nothing."""
    began = time.monotonic()
    directory = RunDirectory.open(path)
    config = load_run_config(directory.config)
    config.trackers = []
    refuse_concealed(config, directory.config)
    parts = choose(config)
    checkpoint = _newest(config, directory, step)
    if checkpoint is None:
        raise UserError(f"the run in {path} has no checkpoint to evaluate yet")
    run = build(config, path, parts, Interrupt(), only_generate=True)
    status = "failed"
    try:
        restore(run, checkpoint)
        Stages(run).sync()
        values, _score = run.evaluator.evaluate(run)
        status = "finished"
    finally:
        run.close(status)
    return Outcome(
        status="finished", directory=path, step=checkpoint.step, seconds=time.monotonic() - began, evaluation=values
    )


def _newest(config: RunConfig, directory: RunDirectory, step: int | None) -> Checkpoint | None:
    from rollstock.checkpoint import CheckpointCorruptError, CheckpointNotFoundError, CheckpointStore

    store = CheckpointStore(
        directory.checkpoints, keep=config.checkpoint.keep, compression=config.checkpoint.compression
    )
    try:
        return store.load(step)
    except CheckpointNotFoundError:
        if step is not None:
            raise
        return None
    except CheckpointCorruptError as error:
        if step is None:  # to begin again in silence would throw away what the other files of the run tell
            error.add_note(
                f"no checkpoint of {directory.path} is sound: put one back from a copy, or begin anew: "
                "rollstock train CONFIG --overwrite"
            )
        raise


def _execute(
    config: RunConfig,
    directory: RunDirectory,
    parts: Parts,
    *,
    checkpoint: Checkpoint | None,
    is_new: bool,
    profile: ProfileSettings | None,
) -> Outcome:
    """Build, restore, train and close. Until everything is built, a new run leaves its directory as it was."""
    began = time.monotonic()
    profiler = _profiler(config, parts, profile, done=checkpoint.step if checkpoint else 0)
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        try:
            with interrupt.allowed():
                run = build(config, directory.path, parts, interrupt)
        except InterruptedRun as signal:
            again = "nothing was written" if is_new else f"go on with: rollstock resume {directory.path}"
            message = f"{signal.signal_name}: ended before anything was trained; {again}"
            step = checkpoint.step if checkpoint else 0
            return Outcome(status="interrupted", directory=directory.path, step=step, message=message)
        if is_new:
            try:
                _begin(config, directory, parts)
            except BaseException:
                run.close("failed")
                raise
            stack.enter_context(_logging(directory, config))
        status, message = _play(run, directory, checkpoint)
    return Outcome(
        status=status,
        directory=directory.path,
        step=run.progress.step,
        seconds=time.monotonic() - began,
        evaluation=run.last_evaluation if status == "finished" else {},
        message=message,
        profile=profiler.summary.as_dict() if profiler is not None and profiler.summary is not None else {},
    )


def _profiler(config: RunConfig, parts: Parts, settings: ProfileSettings | None, *, done: int) -> StepProfiler | None:
    """Have some of the steps after the first `done` profiled. Raises UserError if the run takes none of them."""
    if settings is None:
        return None
    from rollstock.profile.profiler import StepProfiler

    first, last = settings.chosen(done, config.train.steps)
    profiler = StepProfiler(first, last, max_events=settings.max_events)
    parts.manager.register("core:profile", profiler)
    return profiler


def _begin(config: RunConfig, directory: RunDirectory, parts: Parts) -> None:
    """Write the first files of a new run."""
    manifest = _manifest(config, parts)
    directory.prepare()
    write_config(config, directory.config)
    write_manifest(directory.manifest, manifest)


def _play(run: Run, directory: RunDirectory, checkpoint: Checkpoint | None) -> tuple[str, str]:
    """Train to the end, or to a signal, and close the run; returns how it ended, and a sentence about it."""
    status, message = "failed", ""
    try:
        message = _train(run, directory, checkpoint)
        status = "interrupted" if message else "finished"
    except KeyboardInterrupt:
        run.pipeline.abandon()
        status, message = "interrupted", f"SIGINT, again: ended at once; {_way_back(run)}"
    except (Exception, SystemExit) as error:  # a plugin may call sys.exit
        failed = f"the run failed in step {run.step}" if run.step else "the run failed before its first step"
        logger.exception(failed)
        error.add_note(f"{failed}; {_way_back(run, after=error)}")
        raise
    finally:
        with run.interrupt.deferred():
            run.close(status)
    return status, message


def _train(run: Run, directory: RunDirectory, checkpoint: Checkpoint | None) -> str:
    """Train to the end, or to a signal: then save the last finished step, if that is not done, and say how to go on."""
    try:
        run.roles["actor"].call("save_config", directory.model)
        run.tokenizer.save_pretrained(directory.model)
        _start_trackers(run, checkpoint)
        if checkpoint is not None:
            restore(run, checkpoint)
        train_on(run, train_loop)
        return ""
    except InterruptedRun as signal:
        with run.interrupt.deferred():
            if run.saved_step != run.progress.step:
                run.save()
            run.tell_saved(wait=True)
        return f"{signal.signal_name}: {_way_back(run)}"


def _start_trackers(run: Run, checkpoint: Checkpoint | None) -> None:
    info = run_info(run, checkpoint.step if checkpoint else None)
    run.trackers.start(info, checkpoint.state["trackers"] if checkpoint else {})


def _way_back(run: Run, *, after: BaseException | None = None) -> str:
    """What there is to go on from, and how; a mistake of the user's would be made again, so a new run is advised."""
    steps = run.store.steps()
    if not steps and isinstance(after, UserError):
        return "nothing was trained yet; once that is mended, begin anew: rollstock train CONFIG --overwrite"
    mended = "once that is mended, " if isinstance(after, UserError) else ""
    kept = (
        f"the newest checkpoint is of step {steps[-1]}; {mended}go on with"
        if steps
        else "there is no checkpoint yet; begin again with"
    )
    return f"{kept}: rollstock resume {run.directory}"


@contextmanager
def _logging(directory: RunDirectory, config: RunConfig) -> Iterator[None]:
    handler = log_to_file(directory.logs / "controller.log", config=to_plain(config))
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
    known = known_secrets(to_plain(config))
    return build_manifest(plugins=plugins, seed=config.train.seed, data=data, known=known)
