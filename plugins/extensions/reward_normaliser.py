"""Reward normaliser: scores centred and scaled by their running mean and standard deviation.

For rewards of unknown or drifting size, such as a reward model's, and for methods that take scores as they are; those
that centre and scale within a group undo it, but for the clip. The statistics are those of every score of the run up
to and including the present batch (T. Chan et al., Updating formulae and a pairwise algorithm for computing sample
variances, 1979), so that a step sees its own scores. Equal scores become 0, or stay as they are where only scaled.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rollstock import Algorithm, Extension, Metric, RunConfig, RunError, hookimpl, option

if TYPE_CHECKING:
    from rollstock import Batch, Run

_LEAST_STD = 1e-8


@dataclass(kw_only=True)
class RewardNormaliserConfig:
    """Options of the `reward_normaliser` extension."""

    centre: bool = option(True, "subtract the running mean")
    scale: bool = option(True, "divide by the running standard deviation")
    clip: float | None = option(
        None, "largest size of a normalised score, either way; null: no limit", minimum=0, maximum=1e9
    )
    per: str | None = option(
        None, "key of the tasks' metadata whose values get statistics of their own; null: one for all"
    )
    decay: float = option(
        1.0, "what earlier batches still count with each new one; 1: all scores alike", minimum=0, maximum=1
    )

    def __post_init__(self) -> None:
        if not (self.centre or self.scale):
            raise ValueError("with `centre` and `scale` both off there is nothing to normalise: switch one of them on")
        if self.clip == 0:
            raise ValueError("`clip` 0 makes every score 0: it must be above 0, or null")


@dataclass
class RunningMoments:
    """Count, mean and summed squared deviations of all the numbers seen, each batch counting `decay` times less."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: Sequence[float], *, decay: float) -> None:
        """Take in a batch of at least one number."""
        size = len(values)
        mean = math.fsum(values) / size
        squares = math.fsum((value - mean) ** 2 for value in values)
        earlier = decay * self.count
        total = earlier + size
        shift = mean - self.mean
        self.squares = decay * self.squares + squares + shift * shift * earlier * size / total
        self.mean += shift * size / total
        self.count = total

    @property
    def std(self) -> float:
        """The standard deviation (biased)."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


class RewardNormaliser(Extension[RewardNormaliserConfig]):
    """Wraps the score stage; the column `raw_scores` [B] keeps what it was given. Scores that nobody gave stay 0."""

    provides = frozenset({"raw_scores"})

    def __init__(self, config: RewardNormaliserConfig | None = None) -> None:
        super().__init__(config)
        self.moments: dict[str, RunningMoments] = {}

    def validate(self, config: RunConfig, algorithm: Algorithm[Any]) -> Sequence[str]:
        """An offline algorithm asks nobody for a score."""
        return ["nobody scores under an offline algorithm: leave it out"] if algorithm.offline else ()

    @hookimpl(wrapper=True)
    def rollstock_score(self, run: Run, batch: Batch) -> Generator[None, bool | None, bool | None]:
        """Normalise `scores`; records the raw ones."""
        done = yield
        raw = batch.scores.tolist()
        batch["raw_scores"] = batch.scores
        members = self._members(batch)
        for key, rows in members.items():
            self.moments.setdefault(key, RunningMoments()).add([raw[i] for i in rows], decay=self.config.decay)
        scores = [0.0] * len(raw)
        for key, rows in members.items():
            for i in rows:
                scores[i] = self.normalised(raw[i], self.moments[key])
        batch["scores"] = torch.tensor(scores, dtype=batch.scores.dtype)
        self._record(run, [raw[i] for rows in members.values() for i in rows])
        return done

    def normalised(self, score: float, moments: RunningMoments) -> float:
        """One score by the statistics that it belongs to."""
        std = moments.std
        value = score - moments.mean if self.config.centre else score
        if self.config.scale and std > _LEAST_STD:
            value /= std
        clip = self.config.clip
        return value if clip is None else min(max(value, -clip), clip)

    def _members(self, batch: Batch) -> dict[str, list[int]]:
        """The scored trajectories by the statistics that they belong to."""
        found: dict[str, list[int]] = {}
        for i in torch.nonzero(batch.scored).flatten().tolist():
            found.setdefault(self._key(batch, i), []).append(i)
        return found

    def _key(self, batch: Batch, index: int) -> str:
        if self.config.per is None:
            return ""
        metadata = batch.metadata[index]["sample"].task.metadata
        if self.config.per not in metadata:
            known = ", ".join(sorted(metadata)) or "nothing"
            raise RunError(
                f"extension {self.plugin_name!r}: per: the metadata of task {batch.task_ids[index]!r} has no "
                f"{self.config.per!r}; it has: {known}"
            )
        return str(metadata[self.config.per])

    def _record(self, run: Run, raw: Sequence[float]) -> None:
        if not raw:
            return
        size = len(raw)
        mean = math.fsum(raw) / size
        run.record(
            {
                "reward/raw_mean": Metric(mean, size),
                "reward/raw_std": Metric(math.sqrt(math.fsum((r - mean) ** 2 for r in raw) / size), size),
                "reward/raw_max": Metric(max(raw), 1.0, "max"),
                "reward/raw_min": Metric(min(raw), 1.0, "min"),
            }
        )
        for key, moments in self.moments.items():
            suffix = f"/{key}" if key else ""
            run.record(
                {
                    f"reward/running_mean{suffix}": Metric(moments.mean, 1.0, "last"),
                    f"reward/running_std{suffix}": Metric(moments.std, 1.0, "last"),
                }
            )

    def state(self) -> dict[str, Any]:
        """The statistics, by task key."""
        return {"moments": {key: [m.count, m.mean, m.squares] for key, m in self.moments.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
        self.moments = {key: RunningMoments(*numbers) for key, numbers in state.get("moments", {}).items()}


@hookimpl
def rollstock_extension() -> type[Extension[Any]]:
    """The class of this plugin."""
    return RewardNormaliser
