"""Pass@k training, arXiv:2508.10751 and arXiv:2503.19595: reward the best of k, not each alone.

Of the n samples of a prompt, any k together are worth the best of their rewards. `analytic`: the advantage of a sample
is the mean worth of all sets of k with it, less the mean of all sets, divided by their standard deviation; for rewards
of 0 and 1 that is the closed form of 2508.10751. `leave_one_out`: it is the mean, over the sets with it, of what a set
would lose without it; with k = n that is the estimator of 2503.19595, which verl calls `grpo_passk`: only the single
best sample has one, its lead over the second. Both are computed exactly from the sorted rewards, of any kind. Assumes
that trying several times is what counts: a prompt that is solved often teaches little. A group whose rewards are all
equal has advantages of 0; one that lost samples is taken at the largest k that it allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from rollstock import Batch, Loss, MicroBatch, hookimpl, option
from rollstock.algorithms.group_relative import GroupOptions, GroupRelative, Scale
from rollstock.algorithms.policy_loss import ClipOptions, clipped_loss

Estimator = Literal["analytic", "leave_one_out"]
_EPS = 1e-6  # added to the standard deviation


@dataclass(kw_only=True)
class PassAtKConfig(ClipOptions, GroupOptions):
    """Options of pass@k training."""

    k: int | None = option(
        None, "how many tries a prompt has; none: half of the samples that it has", minimum=2, maximum=100_000
    )
    estimator: Estimator = option(
        "analytic", "what a sample is compared with: all sets of k samples, or its own sets without it"
    )
    scale: Scale = option(
        "none", "for leave_one_out: standard deviation of the group's rewards that divides advantages"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k is not None and self.k > self.group_size:
            raise ValueError(f"k ({self.k}) is more than the samples per prompt (group_size: {self.group_size})")
        if self.estimator == "analytic" and self.k == self.group_size:
            raise ValueError(
                f"k is group_size ({self.k}), so that a prompt has one set of k and nothing to compare it with: lower "
                "k, raise group_size, or choose estimator: leave_one_out"
            )
        if self.estimator == "analytic" and self.scale != "none":
            raise ValueError("scale is for estimator: leave_one_out; analytic divides by the deviation of sets of k")

    def tries(self, size: int) -> int:
        """k for a group of `size` samples: at most `size`, and where sets are compared, less."""
        if self.estimator == "analytic":
            return max(1, size // 2) if self.k is None else min(self.k, size - 1)
        return max(2, size // 2) if self.k is None else min(self.k, size)


class PassAtK(GroupRelative[PassAtKConfig]):
    """Advantages by what a sample adds to the best of k."""

    def sequence_advantages(self, batch: Batch) -> Tensor:
        """`[B]`, group by group."""
        advantages = torch.zeros_like(batch.scores)
        for members in batch.members():
            scores = batch.scores[members]
            if bool((scores == scores[0]).all()):
                continue
            k = self.config.tries(len(members))
            if self.config.estimator == "analytic":
                advantages[members] = lead_of_sets(scores, k)
            else:
                advantages[members] = loss_without(scores, k) / self._divisor(scores)
        return advantages

    def _divisor(self, scores: Tensor) -> Tensor | float:
        if self.config.scale == "none":
            return 1.0
        return scores.std(correction=1 if self.config.scale == "unbiased" else 0) + _EPS

    def loss(self, micro: MicroBatch) -> Loss:
        """PPO's clipped surrogate, with the optional KL and entropy terms."""
        return clipped_loss(micro, self.config)


def lead_of_sets(scores: Tensor, k: int) -> Tensor:
    """`[n]`: for each of n scores the mean best of all sets of k with it, less that of all sets, over their deviation.

    The deviation is that of the best over all sets, divided by their number. 0 if all sets have the same best.
    """
    order, values = _descended(scores)
    every, with_member, _ = _weights(len(scores), k)
    mean = every @ values
    deviation = (every @ (values - mean).square()).sqrt()
    return _ranked_back((with_member @ values - mean) / (deviation + _EPS), order, scores)


def loss_without(scores: Tensor, k: int) -> Tensor:
    """`[n]`: for each of n scores what the best of a set of k with it would lose without it, on average."""
    order, values = _descended(scores)
    _, _, without = _weights(len(scores), k)
    return _ranked_back(without.sum(dim=1) * values - without @ values, order, scores)


def _descended(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The ranking from low to high, and the scores in it, measured from the highest: equal ones are exactly equal."""
    order = scores.argsort(stable=True)
    ranked = scores.double()[order]
    return order, ranked - ranked[-1]


def _ranked_back(values: Tensor, order: Tensor, like: Tensor) -> Tensor:
    return torch.empty_like(like).index_copy_(0, order, values.to(like.dtype))


@lru_cache(maxsize=64)
def _weights(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """How often each of n ranked samples is the best, as shares: of all sets of k `[n]`; of the sets with sample j
    `[n, n]`; and of what is left of those in which j is the best, when j is taken out `[n, n]`.

    A sample is the best of a set whose others rank below it: with m of them there, there are C(m, k - 1) such sets.
    """
    every = torch.tensor([_comb(m, k - 1) / math.comb(n, k) for m in range(n)], dtype=torch.float64)
    with_member, without = torch.zeros(n, n, dtype=torch.float64), torch.zeros(n, n, dtype=torch.float64)
    sets = math.comb(n - 1, k - 1)
    for j in range(n):
        with_member[j, j] = _comb(j, k - 1) / sets
        for m in range(j + 1, n):
            with_member[j, m] = _comb(m - 1, k - 2) / sets
        for m in range(j):
            without[j, m] = _comb(m, k - 2) / sets
    return every, with_member, without


def _comb(n: int, k: int) -> int:
    """How many sets of k there are of n; none of less than none."""
    return math.comb(n, k) if k >= 0 else 0


@hookimpl
def rollstock_algorithm() -> type[PassAtK]:
    """Give `PassAtK`."""
    return PassAtK
