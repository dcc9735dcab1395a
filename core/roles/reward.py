"""The role that scores: rewards in processes of their own, each call under a time limit."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollstock.defaults import DEFAULT_PLUGINS
from rollstock.dispatch import register
from rollstock.interfaces.environment import Sample
from rollstock.interfaces.reward import BatchReward, Reward
from rollstock.manager import make_manager
from rollstock.metrics import Metric, Metrics, merge_metrics
from rollstock.plugin import distinct_names
from rollstock.roles.batch_rewards import BatchScorer
from rollstock.sandbox import Outcome, Sandbox
from rollstock.scoring import make_scorer
from rollstock.seeding import derive_seed


@dataclass
class Scores:
    """For each sample the sum of its weighted rewards (None: nobody could say), the single ones by name, and counts."""

    totals: list[float | None]
    parts: list[dict[str, float | None]]
    metrics: Metrics = field(default_factory=dict)

    @classmethod
    def gathered(cls, parts: Sequence[Scores], indices: Sequence[Sequence[int]]) -> Scores:
        """The scores of a whole from those of its parts; `indices`: of each part's samples in the whole."""
        of = sorted((place, part, i) for part, places in enumerate(indices) for i, place in enumerate(places))
        return cls(
            [parts[part].totals[i] for _, part, i in of],
            [parts[part].parts[i] for _, part, i in of],
            merge_metrics(part.metrics for part in parts),
        )


class RewardWorker:
    """Scores samples with every reward of the config, and adds the results up."""

    def __init__(
        self,
        *,
        environment: Mapping[str, Any],
        rewards: Sequence[Mapping[str, Any]],
        blocked: Sequence[str],
        seed: int,
        timeout_s: float,
        num_processes: int,
        device: Mapping[str, Any] | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """`device`: the run's, for rewards that score batches; by default the default one."""
        self.rank = rank
        self._seed = seed
        self._weights = [float(reward.get("weight", 1.0)) for reward in rewards]
        self._names = distinct_names(str(reward["name"]) for reward in rewards)
        manager = make_manager(blocked)
        made = [manager.create_as(Reward, reward) for reward in rewards]
        self._batched = [k for k, reward in enumerate(made) if isinstance(reward, BatchReward)]
        self._alone = [k for k in range(len(made)) if k not in self._batched]
        self._sandbox: Sandbox[tuple[int, Sample], float | None] | None = None
        self._batches: BatchScorer | None = None
        if self._alone:
            chosen = [rewards[k] for k in self._alone]
            factory = functools.partial(make_scorer, dict(environment), chosen, list(blocked), seed)
            self._sandbox = Sandbox(factory, name="rewards", limit=timeout_s, num_workers=num_processes)
            self._sandbox.start()
        if self._batched:
            self._batches = BatchScorer(
                environment=environment,
                rewards=[rewards[k] for k in self._batched],
                names=[self._names[k] for k in self._batched],
                batch_sizes=[reward.batch_size for reward in made if isinstance(reward, BatchReward)],
                blocked=blocked,
                seed=seed,
                timeout_s=timeout_s,
                device=device or {"name": DEFAULT_PLUGINS["device"]},
            )

    @register(dispatch="scatter", places=True)
    def score(self, samples: Sequence[Sample], step: int, places: Sequence[int] | None = None) -> Scores:
        """Score every sample; one that raised, timed out or gave no finite number has no score, and is counted.

        places: of the samples among those that all workers score, for seeds that do not depend on their number.
        """
        numbers = range(len(samples)) if places is None else places
        by_reward = {**self._score_alone(samples, step, numbers), **self._score_batches(samples, step, numbers)}
        outcomes = [by_reward[k][i] for i in range(len(samples)) for k in range(len(self._names))]
        totals: list[float | None] = []
        parts: list[dict[str, float | None]] = []
        width = len(self._names)
        for i in range(len(samples)):
            mine = outcomes[i * width : (i + 1) * width]
            values = [outcome.value if outcome.status == "ok" else None for outcome in mine]
            parts.append(dict(zip(self._names, values, strict=True)))
            totals.append(self._total(mine, values))
        return Scores(totals, parts, self._measure(outcomes, parts, totals))

    def _score_alone(
        self, samples: Sequence[Sample], step: int, numbers: Sequence[int]
    ) -> dict[int, list[Outcome[float | None]]]:
        """By reward the outcome of each sample, of those rewards that score one sample at a time."""
        if self._sandbox is None:
            return {}
        width = len(self._alone)
        calls = [(place, i) for i in range(len(samples)) for place in range(width)]
        outcomes = self._sandbox.map(
            [(place, samples[i]) for place, i in calls],
            names=[f"task {samples[i].task.id!r}" for _place, i in calls],
            of=[f"reward {self._names[self._alone[place]]!r}" for place, _i in calls],
            when=f"step {step}",
            seeds=[derive_seed(self._seed, "reward", step, numbers[i] * width + place) % 2**32 for place, i in calls],
        )
        return {k: outcomes[place::width] for place, k in enumerate(self._alone)}

    def _score_batches(
        self, samples: Sequence[Sample], step: int, numbers: Sequence[int]
    ) -> dict[int, list[Outcome[float | None]]]:
        """The same, of those that score batches."""
        if self._batches is None:
            return {}
        return {k: self._batches.score(place, samples, step, numbers) for place, k in enumerate(self._batched)}

    def _total(self, outcomes: Sequence[Outcome[float | None]], values: Sequence[float | None]) -> float | None:
        """The weighted sum. A failed part would shift the sum against the sample's group, so it voids the whole."""
        said = [w * v for w, v in zip(self._weights, values, strict=True) if v is not None]
        if not said or any(outcome.status != "ok" for outcome in outcomes):
            return None
        return sum(said)

    def _measure(
        self,
        outcomes: Sequence[Outcome[float | None]],
        parts: Sequence[Mapping[str, float | None]],
        totals: Sequence[float | None],
    ) -> Metrics:
        abstained = sum(o.status == "ok" and o.value is None for o in outcomes)
        metrics = {
            "reward/num_abstained": Metric(abstained, 1.0, "sum"),
            "reward/num_raised": Metric(sum(o.status == "raised" for o in outcomes), 1.0, "sum"),
            "reward/num_timed_out": Metric(sum(o.status == "timed_out" for o in outcomes), 1.0, "sum"),
            "reward/num_unscored": Metric(sum(total is None for total in totals), 1.0, "sum"),
        }
        if len(self._names) > 1:
            for name in self._names:
                said = [v for part in parts if (v := part[name]) is not None]
                metrics[f"reward/{name}_mean"] = Metric(sum(said) / len(said) if said else 0.0, len(said))
        return metrics

    @register()
    def close(self) -> None:
        """End the processes."""
        for part in (self._sandbox, self._batches):
            if part is not None:
                part.close()
