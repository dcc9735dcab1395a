"""The stages of a step: the typed front of the hooks, and what the core itself does when no plugin answers.

`Stages` is what the loop calls. `CoreStages` is registered last among the hooks' implementations and delegates to the
chosen plugins; an extension wraps or replaces any of its methods.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollstock.batch import Batch
from rollstock.columns import needs_greedy, to_compute
from rollstock.errors import RunError
from rollstock.greedy import play_greedily
from rollstock.hookspecs import hookimpl
from rollstock.interfaces.environment import Task
from rollstock.metrics import Metric, Metrics, merge_metrics
from rollstock.micro import Totals
from rollstock.offline import recorded_batch
from rollstock.seeding import derive_seed
from rollstock.weightsync.deliver import give_weights, sync_weights

if TYPE_CHECKING:
    from rollstock.run import Run


class Stages:
    """Calls each stage's hook, under its timer; what a stage returns is checked here and nowhere else."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._hook = run.manager.hook

    def generate(self, tasks: Sequence[Task]) -> Batch:
        """Stage 1: play the tasks."""
        with self._run.stage("gen"):
            batch = self._hook.rollstock_generate(run=self._run, tasks=tasks)
        if not isinstance(batch, Batch):
            raise RunError(_returned("generate", batch, "a Batch"))
        self._run.pipeline.check_played()
        return batch

    def score(self, batch: Batch) -> None:
        """Stage 2: fill `scores` and `scored`."""
        with self._run.stage("reward"):
            self._hook.rollstock_score(run=self._run, batch=batch)

    def select(self, batch: Batch) -> Batch:
        """Stage 3: keep what is worth training on; what is dropped is counted."""
        with self._run.stage("select"):
            kept = self._hook.rollstock_select(run=self._run, batch=batch)
        if not isinstance(kept, Batch):
            raise RunError(_returned("select", kept, "a Batch"))
        self._run.record({"train/num_dropped": Metric(len(batch) - len(kept), 1.0, "sum")})
        return kept

    def prepare(self, batch: Batch) -> None:
        """Stage 4: add the columns that the algorithm declared."""
        with self._run.stage("prepare"):
            self._hook.rollstock_prepare(run=self._run, batch=batch)

    def advantages(self, batch: Batch) -> None:
        """Stage 5: fill `advantages`."""
        with self._run.stage("adv"):
            self._hook.rollstock_advantages(run=self._run, batch=batch)
        if "advantages" not in batch:
            raise RunError("the advantages stage left no column `advantages`, whatever answered in place of the core's")

    def update(self, batch: Batch) -> None:
        """Stage 6: train; from here on a step is finished, whatever signal comes."""
        with self._run.stage("update", safe=False):
            metrics = self._hook.rollstock_update(run=self._run, batch=batch)
        if not isinstance(metrics, Mapping):
            raise RunError(_returned("update", metrics, "metrics"))
        self._run.record(metrics)

    def sync(self) -> None:
        """Stage 7: new weights reach the generators."""
        with self._run.stage("sync", safe=False), self._run.pipeline.updating():
            self._hook.rollstock_sync(run=self._run)


def _returned(stage: str, result: object, expected: str) -> str:
    return (
        f"the {stage} stage returned {type(result).__name__}, not {expected}; an extension that wraps it must return "
        "what its `yield` gave"
    )


class CoreStages:
    """What each stage does when no plugin answers before."""

    @hookimpl(trylast=True)
    def rollstock_generate(self, run: Run, tasks: Sequence[Task]) -> Batch:
        """Play every task with the rollout role, `samples_per_prompt` times; or take the responses that it holds."""
        if run.algorithm.offline:
            return recorded_batch(run, tasks, version=run.step)
        episodes, metrics = run.pipeline.play(run, tasks)
        run.record(metrics)
        batch = Batch.from_trajectories([episode.trajectory() for episode in episodes])
        batch.whole_groups = run.algorithm.whole_groups
        return batch

    @hookimpl(trylast=True)
    def rollstock_score(self, run: Run, batch: Batch) -> bool:
        """Ask the reward role; responses that the data holds have their scores already."""
        if run.algorithm.offline:
            return True
        scores = run.pipeline.score(run, [row["sample"] for row in batch.metadata])
        batch["scores"] = torch.tensor([0.0 if s is None else s for s in scores.totals], dtype=torch.float32)
        batch["scored"] = torch.tensor([s is not None for s in scores.totals], dtype=torch.bool)
        for row, parts in zip(batch.metadata, scores.parts, strict=True):
            row["rewards"] = parts
        run.record(scores.metrics)
        return True

    @hookimpl(trylast=True)
    def rollstock_select(self, run: Run, batch: Batch) -> Batch:
        """Drop what has no score, then what the algorithm does not want."""
        kept = batch if bool(batch.scored.all()) else batch.select(torch.nonzero(batch.scored).flatten())
        chosen = run.algorithm.select(kept)
        return kept if chosen is None else kept.select(chosen)

    @hookimpl(trylast=True)
    def rollstock_prepare(self, run: Run, batch: Batch) -> bool:
        """Ask each role for the columns that it provides, and play the tasks greedily where that is a column."""
        needed, head = run.columns_before_update(), run.algorithm.actor_head()
        if run.sampler_is_old and "old_logprobs" not in batch:
            batch.set_flat("old_logprobs", batch.flat("rollout_logprobs"))
        if needs_greedy(needed, run.provided, batch.columns):
            play_greedily(run, batch)
        for role, wanted in to_compute(needed, run.provided, batch.columns, head=head).items():
            found = run.roles[role].call("forward", batch, [output for output, _ in wanted])
            for output, column in wanted:
                batch.set_flat(column, found[output])
        return True

    @hookimpl(trylast=True)
    def rollstock_advantages(self, run: Run, batch: Batch) -> bool:
        """Ask the algorithm."""
        found = run.algorithm.advantages(batch)
        columns: Mapping[str, Tensor] = found if isinstance(found, Mapping) else {"advantages": found}
        if "advantages" not in columns:
            raise RunError(f"algorithm {run.algorithm.plugin_name!r} returned {sorted(columns)} without `advantages`")
        for name, value in columns.items():
            batch[name] = value
        _check_advantages(batch, run.algorithm.plugin_name)
        return True

    @hookimpl(trylast=True)
    def rollstock_update(self, run: Run, batch: Batch) -> Metrics:
        """Epochs of mini-batches, one optimizer update each, for the critic and the actor."""
        parts: list[Metrics] = []
        for mini in mini_batches(
            batch, run.seed, run.step, epochs=run.config.train.epochs, count=run.config.train.mini_batches
        ):
            parts.append({"train/num_updates": Metric(1.0, 1.0, "sum")})
            totals, state = Totals.of(mini, response_limit=run.sampling.max_new_tokens), run.algorithm.state()
            if "critic" in run.roles:
                parts.append(run.roles["critic"].call("update", mini, totals, state))
            if "critic" not in run.roles or run.step > run.config.train.critic_warmup:
                parts.append(run.roles["actor"].call("update", mini, totals, state))
        metrics = merge_metrics(parts)
        return merge_metrics([metrics, run.algorithm.after_update(batch, metrics)])

    @hookimpl(trylast=True)
    def rollstock_sync(self, run: Run) -> bool:
        """Hand the actor's weights to the rollout role, and compare both sides; nothing where nobody generates."""
        if "rollout" not in run.roles:
            return True
        sync_weights(run)
        return True

    @hookimpl
    def rollstock_worker_started(self, run: Run, role: str, rank: int) -> None:
        """Give the weights to a worker that generates; before the first sync there are none to give."""
        if role == "rollout" and run.version:
            give_weights(run, run.roles[role].member(rank))


def mini_batches(batch: Batch, seed: int, step: int, *, epochs: int, count: int) -> Iterator[Batch]:
    """Cut a batch into `count` mini-batches an epoch, of as many groups each as can be, shuffled anew each time.

    Groups are kept whole: where fewer are left than `count`, each is a mini-batch. A single one keeps its order.
    """
    if count == 1:
        yield from (batch for _ in range(epochs))
        return
    members: dict[int, list[int]] = {}
    for index, group in enumerate(batch.groups.tolist()):
        members.setdefault(group, []).append(index)
    for epoch in range(epochs):
        order = list(members)
        random.Random(derive_seed(seed, "mini_batches", step, epoch)).shuffle(order)
        parts = min(count, len(order))
        for part in range(parts):
            chosen = order[part * len(order) // parts : (part + 1) * len(order) // parts]
            yield batch.select([i for group in chosen for i in members[group]])


def _check_advantages(batch: Batch, algorithm: str) -> None:
    advantages = batch.flat("advantages")
    finite = torch.isfinite(advantages)
    if not bool(finite.all()):
        row = int(batch.rows()[torch.nonzero(~finite)[0, 0]])
        raise RunError(
            f"algorithm {algorithm!r} gave advantages that are not finite, first for task {batch.task_ids[row]!r} "
            f"(score {float(batch.scores[row])})"
        )
    if bool((advantages[~batch.flat("action_mask")] != 0).any()):
        raise RunError(f"algorithm {algorithm!r} gave advantages to masked tokens; multiply by `batch.mask`")
