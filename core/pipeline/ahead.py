"""Generation ahead of training: one thread plays, another scores, and the run takes what is done, in order.

For the modes `double_buffer` and `async`. Tasks are handed out in rounds, of the tasks of one call of the generate
stage each, and taken in that order: a step trains on the very tasks that it would have without any of this, long
responses are as likely to be trained on as short ones, and no round waits longer than the bound on staleness allows.
All hooks are called by the thread of the run: what the threads do here, its stages then find done.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from rollstock.errors import RunError
from rollstock.metrics import Metric, Metrics, merge_metrics
from rollstock.pipeline.rounds import Round, pack, unpack
from rollstock.pipeline.synchronous import Kept, Pipeline, hand_out, sample_seed
from rollstock.roles.reward import Scores

if TYPE_CHECKING:
    from rollstock.batch import Batch
    from rollstock.episodes import Episode, Player
    from rollstock.interfaces.environment import Sample, Task
    from rollstock.interrupt import Interrupt
    from rollstock.pipeline.turns import SharedGroup
    from rollstock.run import Run
    from rollstock.schema import PipelineSection

logger = logging.getLogger(__name__)

_LOOK_S = 0.05
"""How often the thread of the run looks up from a wait, for signals."""
_ABANDON_S = 2.0
"""How long a thread that nobody waits for may take to end."""


class _AbandonedError(BaseException):
    """Raised in a thread whose work nobody waits for any more."""


class Ahead(Pipeline):
    """Plays up to `max_staleness` rounds more than the step under way needs.

    `double_buffer`: one round ahead, and a round is played with one policy: new weights wait until it is generated, so
    that the run repeats itself to the bit. `async`: new weights come between two requests, whatever they are for.
    """

    runs_ahead = True

    def __init__(
        self,
        settings: PipelineSection,
        player: Player,
        *,
        rollout: SharedGroup,
        reward: SharedGroup,
        interrupt: Interrupt,
    ) -> None:
        """`player` is the threads' own; `rollout` and `reward` are shared with the run's thread."""
        self._is_async = settings.mode == "async"
        self._limit = settings.max_staleness if self._is_async else 1
        self._partial_tokens = settings.partial_tokens
        self._player, self._rollout, self._reward = player, rollout, reward
        self._interrupt = interrupt
        self._rounds: list[Round] = []  # in order; those that the step under way took are the first
        self._next: Round | None = None  # given to the generate stage
        self._scoring: Round | None = None  # given to the score stage
        self._changed = threading.Condition()
        self._threads: dict[str, threading.Thread] = {}
        self._running: set[str] = set()
        self._at_work: set[str] = set()  # those of them in which an exception may be raised
        self._gate = threading.Lock()  # of `_at_work`
        self._failure: BaseException | None = None
        self._is_playing = self._is_held = self._is_ending = False
        self._seconds: dict[str, float] = {}

    def begin(self, run: Run) -> None:
        """See `Pipeline.begin`."""
        with self._interrupt.deferred(), self._changed:
            for each in self._rounds:
                each.is_taken = False
            self._next = self._scoring = self._failure = None
        if self._rounds:
            run.position = self._rounds[-1].end
        if self._threads:  # the run was put back after its last finished step, and they may have failed
            self._start_threads()

    def next_tasks(self, run: Run) -> list[Task]:
        """See `Pipeline.next_tasks`. Begins rounds until there are as many as staleness allows: the k-th of those that
        wait is trained on k updates from now."""
        waiting = [each for each in self._rounds if not each.is_taken]
        steps_left = run.config.train.steps - run.progress.step
        while len(waiting) < max(1, min(self._limit + 1, steps_left)):
            waiting.append(self._begin_round(run))
        self._start_threads()
        self._next = waiting[0]
        return self._next.tasks

    def play(self, run: Run, tasks: Sequence[Task]) -> tuple[list[Episode], Metrics]:
        """See `Pipeline.play`."""
        chosen = self._next
        if chosen is None or chosen.tasks is not tasks:
            raise RunError("the generate stage was asked for other tasks than those that are generated ahead")
        self._wait(lambda: chosen.is_generated)
        chosen.is_taken = True
        self._next, self._scoring = None, chosen
        return chosen.play.episodes, chosen.play.metrics()

    def check_played(self) -> None:
        """See `Pipeline.check_played`."""
        if self._next is not None:
            raise RunError(
                "an extension answered the generate stage itself, while its tasks are generated ahead: set "
                "pipeline.mode: sync, or let the extension wrap the stage"
            )

    def score(self, run: Run, samples: Sequence[Sample]) -> Scores:
        """See `Pipeline.score`. Samples that an extension has changed since they were played are scored anew."""
        chosen = self._scoring
        if chosen is None:
            return super().score(run, samples)
        self._wait(lambda: chosen.scores is not None)
        assert chosen.scores is not None
        assert chosen.samples is not None
        places = _matched(samples, chosen.samples)
        changed = [i for i, place in enumerate(places) if place is None]
        anew = super().score(run, [samples[i] for i in changed]) if changed else Scores([], [])
        rest = zip(anew.totals, anew.parts, strict=True)
        known = list(zip(chosen.scores.totals, chosen.scores.parts, strict=True))
        pairs = [next(rest) if place is None else known[place] for place in places]
        metrics = merge_metrics([chosen.scores.metrics, anew.metrics])
        return Scores([total for total, _ in pairs], [dict(parts) for _, parts in pairs], metrics)

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """See `Pipeline.pausing`. A request that is under way is waited for, as the generator's thread does."""
        with self._rollout.turns:
            yield

    @contextmanager
    def updating(self) -> Iterator[None]:
        """See `Pipeline.updating`."""
        if not self._is_async:
            self.wait_until_generated()
        with self._rollout.turns:
            yield

    def wait_until_generated(self) -> None:
        """Wait until every round that was begun is generated."""
        self._wait(lambda: all(each.is_generated for each in self._rounds))

    def age(self, batch: Batch, version: int) -> Metrics:
        """See `Pipeline.age`. Raises RunError for a token that is older than the bound allows."""
        chosen = batch.flat("action_mask")
        versions, rows = batch.flat("versions")[chosen], batch.rows()[chosen]
        if len(versions) == 0:
            return {}
        ages = version - versions
        oldest, count = int(ages.max()), len(versions)
        if oldest > self._limit:
            raise RunError(
                f"a token of version {version - oldest} is to be trained on with version {version}, further back than "
                f"the {self._limit} that the pipeline allows: does the rollout engine report the versions that it is "
                "given?"
            )
        none = torch.zeros(len(batch), dtype=versions.dtype)
        first, last = (none.scatter_reduce(0, rows, versions, end, include_self=False) for end in ("amin", "amax"))
        mixed = float((first != last).double().mean())
        return {
            "pipeline/staleness_mean": Metric(float(ages.double().mean()), count),
            "pipeline/staleness_max": Metric(oldest, 1.0, "max"),
            "pipeline/mixed_versions": Metric(mixed, len(batch)),
        }

    def finish_step(self) -> None:
        """See `Pipeline.finish_step`."""
        with self._changed:
            self._rounds = [each for each in self._rounds if not each.is_taken]
        self._scoring = None

    def metrics(self) -> Metrics:
        """See `Pipeline.metrics`."""
        with self._changed:
            seconds, self._seconds = self._seconds, {}
            in_flight = sum(len(each.play.episodes) for each in self._rounds if not each.is_taken)
        names = ("trainer_wait_s", "generator_wait_s", "generation_s", "scoring_s")
        return {
            **{f"perf/{name}": Metric(seconds.get(name, 0.0), 1.0, "sum") for name in names},
            "pipeline/num_in_flight": Metric(in_flight, 1.0, "last"),
        }

    def state(self, run: Run) -> Kept:
        """See `Pipeline.state`. A double buffer keeps whole rounds, since it plays each with one policy; otherwise what
        is unfinished is kept as well, once the request under way is done."""
        with self._interrupt.deferred():
            self._is_held = self._is_async
            try:
                with self._changed:
                    self._changed.wait_for(lambda: not (self._is_held and self._is_playing))
                    whole = self._failure is not None or not self._is_async
                    kept = self._rounds[: _num_generated(self._rounds)] if whole else list(self._rounds)
                    plain, tensors = pack(kept)
                    rest = self._rounds[len(kept) :]
            finally:
                self._release()
        position = kept[-1].end if kept else rest[0].position if rest else run.progress.position
        return Kept({"position": position, "rounds": plain}, tensors)

    def _release(self) -> None:
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def load_state(self, run: Run, kept: Kept) -> None:
        """See `Pipeline.load_state`."""
        plain = kept.values.get("rounds", [])
        places = [each["position"] + place for each in plain for place in range(each["num_tasks"])]
        found = unpack(plain, kept.tensors, {place: run.tasks.train(place) for place in places}, run.sampling)
        with self._changed:
            self._rounds = found if self._is_async else found[: _num_generated(found)]
        left_out = found[len(self._rounds) :]
        if left_out or plain:
            run.progress.position = left_out[0].position if left_out else found[-1].end
        elif kept.values:
            run.progress.position = kept.values["position"]

    def abandon(self) -> None:
        """See `Pipeline.abandon`. A thread that is playing or scoring ends at its next instruction of Python; one that
        waits, or is between two calls, finds that there is nothing more to do."""
        self._rollout.is_abandoned = self._reward.is_abandoned = True
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        # Nowhere but at work. Elsewhere the exception could fall between a lock's acquisition and the block that lets
        # go of it; and who waits for a lock cannot take note, while CPython 3.11 holds up every traced thread (by
        # coverage, by a debugger) at its next call until somebody has, the lock's owner among them.
        raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc
        with self._gate:
            for name in self._at_work:
                raise_in_thread(ctypes.c_ulong(self._threads[name].ident or 0), ctypes.py_object(_AbandonedError))
            self._at_work.clear()

    def close(self) -> None:
        """See `Pipeline.close`. Waits for the requests under way; a second Ctrl-C does not."""
        try:
            if not self._rollout.is_abandoned:
                for group in (self._rollout, self._reward):
                    group.turns.end()
                with self._changed:
                    self._is_ending = True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: not self._running)
        except KeyboardInterrupt:
            self.abandon()
        with self._changed:
            self._changed.wait_for(lambda: not self._running, timeout=_ABANDON_S)
        for name, thread in self._threads.items():
            if name not in self._running:  # a signal within `join` would let a thread pass for one that has ended
                thread.join()
        left = sum(len(each.play.episodes) for each in self._rounds)
        if left:
            logger.info("%d trajectories that were begun ahead were not trained on", left)

    def _begin_round(self, run: Run) -> Round:
        tasks = hand_out(run)
        first = run.position - len(tasks)
        play = run.player.begin(
            tasks,
            samples=run.algorithm.samples_per_prompt,
            sampling=run.sampling,
            seed_of=lambda place, k: sample_seed(run, first + place, k),
            partial_tokens=self._partial_tokens,
        )
        begun = Round(first, 1 + first // len(tasks), tasks, play, is_generated=not play.active)
        with self._changed:
            self._rounds.append(begun)
            self._changed.notify_all()
        return begun

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Wait for the threads, where signals are allowed until one comes. Raises what ended a thread."""
        began = time.monotonic()
        while True:
            with self._interrupt.deferred(), self._changed:  # a signal must not leave the lock behind
                if self._changed.wait_for(lambda: is_done() or self._failure is not None, timeout=_LOOK_S):
                    break
            self._interrupt.check_if_allowed()
        self._count("trainer_wait_s", began)
        if not is_done() and self._failure is not None:
            raise self._failure

    def _start_threads(self) -> None:
        """Start the threads that are not running."""
        targets = {"generator": self._play_rounds, "scorer": self._score_rounds}
        for name in targets.keys() - self._running:
            self._running.add(name)
            self._threads[name] = threading.Thread(
                target=self._guarded, args=(name, targets[name]), name=f"rollstock-{name}", daemon=True
            )
            self._threads[name].start()

    def _guarded(self, name: str, target: Callable[[], None]) -> None:
        """Let the thread of the run raise what ends this one."""
        failure = None
        try:
            target()
        except BaseException as error:  # whatever a plugin raises
            error.add_note(f"in the {name}'s thread, ahead of the step that will need it")
            failure = error
        with self._changed:
            self._running.discard(name)
            if failure is not None:
                self._is_playing = self._is_playing and name != "generator"
                self._failure = self._failure or failure
            self._changed.notify_all()

    def _play_rounds(self) -> None:
        """Play the rounds, until the end."""
        while rounds := self._work(self._playable, "generator_wait_s"):
            began = time.monotonic()
            with self._working("generator"):
                self._player.advance([each.play for each in rounds])
            with self._changed:
                self._is_playing = False
                for each in rounds:
                    each.is_generated = not each.play.active
                self._changed.notify_all()
            self._count("generation_s", began)

    def _score_rounds(self) -> None:
        """Score the rounds, until the end."""
        while rounds := self._work(self._scorable, "scorer_wait_s"):
            began = time.monotonic()
            for each in rounds:
                samples = each.take_samples()
                with self._working("scorer"):
                    scores = self._reward.call("score", samples, each.number)
                with self._changed:
                    each.samples, each.scores = samples, scores
                    self._changed.notify_all()
            self._count("scoring_s", began)

    def _work(self, find: Callable[[], list[Round]], waited: str) -> list[Round]:
        """Wait for something to do; nothing at the end."""
        began = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._is_ending or find())
            found = [] if self._is_ending else find()
            self._is_playing = self._is_playing or (bool(found) and find == self._playable)
        self._count(waited, began)
        return found

    @contextmanager
    def _working(self, name: str) -> Iterator[None]:
        """A stretch of the thread of that name in which `abandon` may raise."""
        self._at_work.add(name)
        try:
            yield
        finally:
            with self._gate:  # not while `abandon` is raising; what it has raised comes within this block at the latest
                self._at_work.discard(name)

    def _playable(self) -> list[Round]:
        """What the generator plays together: one round after the other, or all that were begun."""
        if self._is_held:
            return []
        unfinished = [each for each in self._rounds if not each.is_generated]
        return unfinished if self._is_async else unfinished[:1]

    def _scorable(self) -> list[Round]:
        return [each for each in self._rounds if each.is_generated and each.scores is None][:1]

    def _count(self, name: str, began: float) -> None:
        with self._changed:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began


def _num_generated(rounds: Sequence[Round]) -> int:
    """How many of the first rounds are generated, up to one that is not."""
    return next((place for place, each in enumerate(rounds) if not each.is_generated), len(rounds))


def _matched(samples: Sequence[Sample], scored: Sequence[Sample]) -> list[int | None]:
    """For each sample the place of its equal among those that were scored, each of which stands for one."""
    unused: dict[tuple[str, str], list[int]] = {}
    for place, sample in enumerate(scored):
        unused.setdefault((sample.task.id, sample.response), []).append(place)
    found: list[int | None] = []
    for sample in samples:
        candidates = unused.get((sample.task.id, sample.response), [])
        equal = next((place for place in candidates if scored[place] == sample), None)
        if equal is not None:
            candidates.remove(equal)
        found.append(equal)
    return found
