"""The training loop. It knows no algorithm, no engine and no chip: each line is a stage, and each stage a hook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollstock.batch import Batch
from rollstock.metrics import Metric
from rollstock.stages import Stages

if TYPE_CHECKING:
    from rollstock.run import Run


def train(run: Run) -> None:
    """Run every step that is left. Raises what a stage raises; `Interrupted` when a signal asked for the end."""
    stages = Stages(run)
    run.start()
    stages.sync()
    for _step in run.steps():
        batch = collect(run, stages)  # rollout role, environment, reward role
        if len(batch):
            stages.prepare(batch)  # the columns that the algorithm declared
            stages.advantages(batch)
            stages.update(batch)  # actor, critic
            stages.sync()  # new weights reach the generators
        run.finish(batch)  # metrics, evaluation, checkpoint


def collect(run: Run, stages: Stages) -> Batch:
    """Generate, score and select; again with new tasks while there are too few groups, if the algorithm refills."""
    kept: list[Batch] = []
    for _round in range(1 + run.algorithm.refill_rounds):
        batch = stages.generate(run.next_tasks())
        stages.score(batch)
        run.observe_scores(batch)
        batch = stages.select(batch)
        batch["groups"] = batch.groups + len(kept) * run.config.train.prompts_per_step  # ids stay apart
        kept.append(batch)
        run.record({"train/num_rounds": Metric(1.0, 1.0, "sum")})
        if sum(len(set(part.groups.tolist())) for part in kept) >= run.config.train.prompts_per_step:
            break
    whole = Batch.concat([part for part in kept if len(part)] or kept[:1])
    if len(kept) > 1:
        whole = first_groups(run, whole)
    run.count_empty(len(whole) == 0)
    run.observe_age(whole)
    return whole


def first_groups(run: Run, batch: Batch) -> Batch:
    """The first `train.prompts_per_step` groups, so that refilling leaves the size of a step as it is; counts the
    trajectories that are left over."""
    members = batch.members()[: run.config.train.prompts_per_step]
    chosen = [index for group in members for index in group]
    run.record({"train/num_surplus": Metric(len(batch) - len(chosen), 1.0, "sum")})
    return batch.select(chosen)
