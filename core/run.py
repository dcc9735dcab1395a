"""A run in progress: its config, its roles and the state that a checkpoint keeps.

This is the `run` that hooks are given. Building one is `rollstock.build`'s, the steps are `rollstock.loop`'s.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstock.elastic import adjust
from rollstock.episodes import Player
from rollstock.errors import RunError
from rollstock.evaluation import Evaluator
from rollstock.interfaces.algorithm import Algorithm
from rollstock.interfaces.environment import Task
from rollstock.interfaces.executor import Executor, WorkerGroup
from rollstock.interfaces.extension import Extension
from rollstock.interfaces.rollout import Sampling
from rollstock.interfaces.scheduler import Scheduler
from rollstock.interrupt import Interrupt, InterruptedRun
from rollstock.metrics import Metric, merge_metrics, metric_values
from rollstock.observation import batch_metrics, rollout_rows, score_metrics
from rollstock.pipeline import Pipeline, sampler_is_old
from rollstock.recovery import Recovery
from rollstock.restart import controller_state, plugin_states, trained
from rollstock.tasks import TaskSource
from rollstock.tracking import Trackers

if TYPE_CHECKING:
    from rollstock.batch import Batch
    from rollstock.checkpoint import CheckpointStore, CheckpointWriter
    from rollstock.manager import PluginManager
    from rollstock.schema import RunConfig
    from rollstock.weightsync.deliver import Delivered

logger = logging.getLogger(__name__)

MAX_EMPTY_STEPS = 10


@dataclass
class Progress:
    """What a checkpoint keeps of the controller; plain JSON data."""

    step: int = 0
    position: int = 0
    version: int = 0
    num_empty_steps: int = 0
    evaluated: int = -1
    best_score: float | None = None
    best_step: int | None = None
    last_score: float | None = None


@dataclass(kw_only=True)
class Run:
    """One run: what plugins may read and call from their hooks.

    `step` counts from 1 while a step is running; `position` is how many tasks were handed out, `version` how many times
    weights reached the generators, `saved_step` which step's checkpoint was written or read last.
    """

    config: RunConfig
    directory: Path
    manager: PluginManager
    algorithm: Algorithm[Any]
    executor: Executor[Any]
    scheduler: Scheduler[Any]
    extensions: list[Extension[Any]]
    roles: Mapping[str, WorkerGroup]
    player: Player
    pipeline: Pipeline
    tasks: TaskSource
    trackers: Trackers
    evaluator: Evaluator
    store: CheckpointStore
    writer: CheckpointWriter
    recovery: Recovery
    interrupt: Interrupt
    sampling: Sampling
    tokenizer: Any
    provided: Set[str] = frozenset()
    progress: Progress = field(default_factory=Progress)
    step: int = 0
    position: int = 0
    version: int = 0
    fingerprint: str = ""
    delivered: Delivered | None = None
    num_empty_steps: int = 0
    last_evaluation: dict[str, float] = field(default_factory=dict)
    saved_step: int = 0
    _metrics: list[Mapping[str, Metric]] = field(default_factory=list)
    _events: list[Mapping[str, Metric]] = field(default_factory=list)
    _started: bool = False
    _stopped: str = ""
    _num_tokens: int = 0
    _plugin_states: dict[str, Any] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)
    _saved_at: float = field(default_factory=time.monotonic)
    _step_began: float = 0.0

    @property
    def seed(self) -> int:
        """The run's seed, from which every random stream is derived (`rollstock.derive_seed`)."""
        return self.config.train.seed

    def stop(self, reason: str) -> None:
        """Ask for the end after this step; the run then counts as finished."""
        self._stopped = reason

    def record(self, metrics: Mapping[str, Metric]) -> None:
        """Add metrics to this step; those of one name are combined by their reducer."""
        self._metrics.append(metrics)

    def record_event(self, metrics: Mapping[str, Metric]) -> None:
        """Add metrics of what happens at any moment and in any thread, such as a lost worker: they belong to the step
        that is recorded next, even if the present one is broken off and played again."""
        self._events.append(metrics)

    def columns_before_update(self) -> Set[str]:
        """The columns that the prepare stage computes; old log-probs only if there is more than one update or an early
        reader, which every extension is."""
        needed = set(self.algorithm.needed_columns())
        one_update = self.config.train.epochs * self.config.train.mini_batches == 1
        if self.sampler_is_old or (one_update and "old_logprobs" not in self.algorithm.early_columns()):
            needed.discard("old_logprobs")
        return needed.union(*(extension.needed_columns() for extension in self.extensions))

    @property
    def sampler_is_old(self) -> bool:
        """Whether `old_logprobs` are those of the sampler; see `rollstock.pipeline`."""
        return sampler_is_old(self.config, self.algorithm, self.extensions)

    def start(self) -> None:
        """Tell everyone that the run begins or goes on."""
        self.step, self.position = self.progress.step, self.progress.position
        self.num_empty_steps = self.progress.num_empty_steps
        self.version = max(self.progress.version - 1, 0)  # the sync that follows counts up to where it was
        if not self._started:  # else it goes on after a worker was lost
            self._started = True
            self.saved_step = self.progress.step
            self.manager.hook.rollstock_run_start(run=self)
            self.recovery.begin(self)
        self.pipeline.begin(self)
        self._plugin_states = plugin_states(self)

    def steps(self) -> Iterator[int]:
        """The steps that are left, from 1 to `train.steps`; ends early when somebody called `stop`."""
        if self.evaluate_if_due():  # before the first step, or one that a signal had cut short
            self._save_again()  # without the score, that checkpoint could not be the best
        while self.progress.step < self.config.train.steps and not self._stopped:
            self.step = self.progress.step + 1
            self._metrics, self._num_tokens = [], 0
            self._step_began = time.monotonic()
            yield self.step
        if self._stopped:
            self.trackers.message(f"stopped after step {self.progress.step}: {self._stopped}")
        if self.evaluate_if_due() or self.saved_step != self.progress.step:  # `stop` was called after the step's end
            self._save_again()
        self.tell_saved(wait=True)

    def next_tasks(self) -> list[Task]:
        """The next `train.prompts_per_step` tasks of the training split, for the generate stage."""
        return self.pipeline.next_tasks(self)

    @contextmanager
    def stage(self, name: str, *, safe: bool = True) -> Iterator[None]:
        """Time a stage; a signal may end a safe one at once, and waits for the end of the step in any other."""
        began = time.monotonic()
        with self.interrupt.allowed() if safe else self.interrupt.deferred():
            yield
        self.record({f"timing_s/{name}": Metric(time.monotonic() - began, 1.0, "sum")})

    def observe_scores(self, batch: Batch) -> None:
        """Record what was generated and scored, before anything is dropped."""
        if not self.algorithm.offline:  # there the scores only say which response is which
            self.record(score_metrics(batch))
        self.count_tokens(sum(batch.total_lengths()))

    def observe_age(self, batch: Batch) -> None:
        """Record how old the policy was that made a batch, where it may be older than the one that is trained."""
        self.record(self.pipeline.age(batch, self.version))

    def count_tokens(self, number: int) -> None:
        """Add tokens, prompts included, to what this step has processed: its throughput counts them."""
        self._num_tokens += number

    def count_empty(self, empty: bool) -> None:
        """Count steps in a row that had nothing to train on. Raises RunError when there are ten."""
        self.num_empty_steps = self.num_empty_steps + 1 if empty else 0
        self.record({"train/num_empty_steps": Metric(float(empty), 1.0, "sum")})
        if self.num_empty_steps >= MAX_EMPTY_STEPS:
            raise RunError(
                f"{MAX_EMPTY_STEPS} steps in a row had nothing to train on: every sample was without a score or was "
                "dropped; see reward/num_unscored and train/num_dropped in the metrics, and logs/ for the reasons"
            )

    def finish(self, batch: Batch) -> None:
        """End a step: complete and record its metrics, evaluate and save if it is time."""
        with self.interrupt.deferred():
            values = self._record_step(batch)
            self.progress.step, self.progress.position = self.step, self.position
            self.progress.version, self.progress.num_empty_steps = self.version, self.num_empty_steps
            self.pipeline.finish_step()
            with contextlib.suppress(InterruptedRun):  # the step is done; what cut its evaluation short shows below
                self.evaluate_if_due()
            self.manager.hook.rollstock_step_end(run=self, step=self.step, metrics=values)
            with contextlib.suppress(InterruptedRun):
                self.evaluate_if_due()  # a listener may have called `stop`
            self._plugin_states = plugin_states(self)
            self.recovery.keep(self, self._plugin_states)
            self.tell_saved()
            if self._checkpoint_is_due():
                self.save()
            adjust(self)
        if not self.is_last or self._evaluation_is_due():
            self.interrupt.check()

    def _record_step(self, batch: Batch) -> dict[str, float]:
        """Hand the trajectories and the metrics of a step to whoever records them; returns the metrics."""
        seconds = time.monotonic() - self._step_began
        if len(batch):
            self.record(batch_metrics(batch))
        self.record(self.roles["actor"].call("memory"))
        self.record(self.pipeline.metrics())
        self.record(
            {
                "timing_s/step": Metric(seconds, 1.0, "sum"),
                "perf/throughput": Metric(self._num_tokens / max(seconds, 1e-9), 1.0, "last"),
                "perf/total_num_tokens": Metric(self._num_tokens, 1.0, "sum"),
                "train/position": Metric(self.position, 1.0, "last"),
            }
        )
        events, self._events = self._events, []
        metrics = merge_metrics([*self._metrics, *events])
        self.manager.hook.rollstock_metrics(run=self, step=self.step, metrics=metrics)
        values = metric_values(metrics)
        rows = rollout_rows(batch, self.step, self.tokenizer, self.config.run.max_rollouts_per_step)
        self.trackers.samples(self.step, rows)
        self.trackers.log(self.step, values)
        return values

    @property
    def is_last(self) -> bool:
        """Whether no step follows the one that was last finished."""
        return self.progress.step >= self.config.train.steps or bool(self._stopped)

    def evaluate_if_due(self) -> bool:
        """Evaluate on held-out tasks if it is time and was not done yet; remembers the best score. True if it did."""
        step = self.progress.step
        if not self._evaluation_is_due():
            return False
        with self.interrupt.allowed():
            values, score = self.evaluator.evaluate(self)
        self.last_evaluation = values
        self.trackers.evaluation(step, values)
        self.progress.evaluated, self.progress.last_score = step, score
        if score is not None and (self.progress.best_score is None or score > self.progress.best_score):
            self.progress.best_score, self.progress.best_step = score, step
        self.manager.hook.rollstock_evaluation_end(run=self, step=step, metrics=values)
        return True

    def _evaluation_is_due(self) -> bool:
        return self.evaluator.is_due(self.progress.step, last=self.is_last, done=self.progress.evaluated)

    def save(self) -> None:
        """Write a checkpoint of the last finished step, or begin to, where that is done in the background."""
        tensors, values = self.recovery.kept(self) or trained(self)
        score = self.progress.last_score if self.progress.evaluated == self.progress.step else None
        state = controller_state(self, self._plugin_states, values)
        ahead = self.pipeline.state(self)
        if ahead is not None:
            state["pipeline"] = ahead.values
            tensors |= {"pipeline/episodes": ahead.tensors} if ahead.tensors else {}
        live = self.executor.shares_memory
        self.writer.write(self.progress.step, tensors=tensors, state=state, score=score, live=live)
        self._saved_at, self.saved_step = time.monotonic(), self.progress.step
        self.tell_saved()

    def tell_saved(self, *, wait: bool = False) -> None:
        """Tell of the checkpoints that became complete; wait: until all are. Raises why one could not be written."""
        if wait:
            self.writer.wait()
        for step, path in self.writer.take_complete():
            self.manager.hook.rollstock_checkpoint_saved(run=self, step=step, path=path)

    def _save_again(self) -> None:
        """Save between two steps, with plugins as they are at the start of the next; nothing before the first."""
        self._plugin_states = plugin_states(self)
        if self.progress.step:
            self.save()

    def _checkpoint_is_due(self) -> bool:
        settings = self.config.checkpoint
        by_steps = bool(settings.every_steps) and self.step % settings.every_steps == 0
        by_time = bool(settings.every_minutes) and time.monotonic() - self._saved_at >= settings.every_minutes * 60
        best = settings.keep_best and self.progress.best_step == self.step
        return self.is_last or by_steps or by_time or best

    def close(self, status: str) -> None:
        """End the run, whatever its state: hooks, trackers, workers, locks, each whatever becomes of the others.

        What goes wrong is logged. It is raised only if the run had finished, so that it never hides why a run failed.
        """
        # A checkpoint may be under way, of tensors that end with the workers.
        ends: dict[str, Callable[[], Any]] = {"the pipeline": self.pipeline.close, "the checkpoint": self.writer.wait}
        if self._started:
            ends["the hook rollstock_run_end"] = lambda: self.manager.hook.rollstock_run_end(run=self, status=status)
        ends["the trackers"] = lambda: self.trackers.finish(status)
        for name, group in self.roles.items():
            ends[f"the role {name}"] = functools.partial(group.call, "close")
        ends |= {"the executor": self.executor.shutdown, "the checkpoint store": self.store.release}
        errors: list[Exception] = []
        for what, end in ends.items():
            try:
                end()
            except Exception as error:  # whatever a plugin raises
                logger.warning("%s failed at the end of the run: %s", what, error, exc_info=error)
                errors.append(error)
        if errors and status == "finished":
            raise errors[0]
