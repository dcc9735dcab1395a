"""The greedy response to each task of a batch, and its score: the columns `greedy_scores` and `greedy_scored`.

For the prepare stage, when an algorithm compares samples with what the policy would have said without chance (a
baseline, ReMax). The responses are scored as any other, and are not trained on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from rollstock.episodes import greedy
from rollstock.metrics import Metric, Metrics
from rollstock.seeding import derive_seed

if TYPE_CHECKING:
    from rollstock.batch import Batch
    from rollstock.episodes import Episode
    from rollstock.roles.reward import Scores
    from rollstock.run import Run


def play_greedily(run: Run, batch: Batch) -> None:
    """Play the task of each group once, greedily, and give every trajectory of the group its score.

    Sets `greedy_scores` `[B]` (float, 0 where there is no score) and `greedy_scored` `[B]` (bool). What it cost and
    what came of it is recorded as metrics `greedy/...` and `timing_s/greedy`; its tokens count in the step's
    throughput.
    """
    began = time.monotonic()
    groups = batch.groups.tolist()
    tasks = {group: row["sample"].task for group, row in zip(groups, batch.metadata, strict=True)}
    episodes, played = run.player.play(
        list(tasks.values()),
        samples=1,
        sampling=greedy(run.sampling),
        seed_of=lambda place, k: derive_seed(run.seed, "greedy", run.step, place, k),
    )
    scores: Scores = run.roles["reward"].call("score", [episode.sample() for episode in episodes], run.step)
    by_place = {episode.group: score for episode, score in zip(episodes, scores.totals, strict=True)}
    by_group = {group: by_place.get(place) for place, group in enumerate(tasks)}
    found = [by_group[group] for group in groups]
    batch["greedy_scores"] = torch.tensor([0.0 if s is None else s for s in found], dtype=torch.float32)
    batch["greedy_scored"] = torch.tensor([s is not None for s in found], dtype=torch.bool)
    num_tokens = sum(len(episode.prompt) + len(episode.tokens) for episode in episodes)
    run.count_tokens(num_tokens)
    run.record(_measure(episodes, played, scores) | {"greedy/num_tokens": Metric(num_tokens, 1.0, "sum")})
    run.record({"timing_s/greedy": Metric(time.monotonic() - began, 1.0, "sum")})


def _measure(episodes: list[Episode], played: Metrics, scores: Scores) -> Metrics:
    """Metrics under names of their own, so that those of the samples stay what they are."""
    said = [score for score in scores.totals if score is not None]
    kept = {f"greedy/{name}": metric for name, metric in played.items() if name.startswith("response_length/")}
    counts = {
        f"greedy/{name.removeprefix('reward/')}": metric
        for name, metric in scores.metrics.items()
        if name.startswith("reward/num_")
    }
    mean = {"greedy/reward_mean": Metric(sum(said) / len(said), len(said))} if said else {}
    return {**kept, **counts, **mean, "greedy/num_responses": Metric(len(episodes), 1.0, "sum")}
