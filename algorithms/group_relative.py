"""What group-relative methods share: several samples a prompt, and advantages from the rewards of the group alone.

For the algorithms of this folder without a critic. A subclass gives its loss and its `sequence_advantages`; those of
GRPO (arXiv:2402.03300, section 4.1.2) are `GroupRelative`'s.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from rollstock import Batch, RunConfig, option
from rollstock.algorithms import functional as F
from rollstock.algorithms.policy_gradient import PolicyGradient, greedy_sampling
from rollstock.algorithms.policy_loss import TermOptions

Scale = Literal["unbiased", "biased", "none"]
Lone = Literal["zero", "raw"]


@dataclass(kw_only=True)
class BaselineOptions(TermOptions):
    """Options of a group: how many samples, and what becomes of an advantage that it gives."""

    group_size: int = option(8, "samples per prompt", minimum=2, maximum=100_000)
    lone: Lone = option(
        "zero", "advantage of a sample whose group has no other (the others have no score): zero, or its raw score"
    )
    whiten: bool = option(False, "scale advantages to unit variance, around 0, over the batch")


@dataclass(kw_only=True)
class GroupOptions(BaselineOptions):
    """Options of a group whose rewards are normalised."""

    scale: Scale = option("unbiased", "standard deviation that divides rewards within a group; none only centres them")


B = TypeVar("B", bound=BaselineOptions)
"""The dataclass that holds the options of a method with a baseline from the group."""

G = TypeVar("G", bound=GroupOptions)
"""The dataclass that holds the options of a method that normalises a group's rewards."""


class GroupBaseline(PolicyGradient[B]):
    """One advantage a trajectory, on all its action tokens, and no critic; which one, and the loss, is the
    subclass's."""

    def validate(self, config: RunConfig) -> Sequence[str]:
        """Greedy sampling makes a group's samples, and so all advantages, equal."""
        if setting := greedy_sampling(config):
            return [f"{setting} makes all samples of a prompt alike, so each advantage is 0: raise it"]
        return ()

    def advantages(self, batch: Batch) -> Tensor | Mapping[str, Tensor]:
        """`token_advantages`; a subclass may give columns beside them."""
        return self.token_advantages(batch)

    def token_advantages(self, batch: Batch) -> Tensor:
        """`[B, T]`: the advantage of each trajectory, on all its action tokens."""
        advantages = self.sequence_advantages(batch)  # [B]
        if self.config.lone == "raw":
            advantages = torch.where(_lone(batch.groups), batch.scores, advantages)
        spread = advantages[:, None] * batch.mask
        return F.masked_whiten(spread, batch.mask) if self.config.whiten else spread

    @abstractmethod
    def sequence_advantages(self, batch: Batch) -> Tensor:
        """`[B]`: the advantage of each trajectory; 0 for one that has its group for itself."""


class GroupRelative(GroupBaseline[G]):
    """GRPO's advantages; the loss is the subclass's."""

    def sequence_advantages(self, batch: Batch) -> Tensor:
        """`[B]`: each score, centred within its group and scaled as `scale` says; 0 for a lone one."""
        std = None if self.config.scale == "none" else self.config.scale
        return F.group_normalise(self.rewards(batch), batch.groups, std=std)

    def rewards(self, batch: Batch) -> Tensor:
        """`[B]`: what is normalised, the scores; a subclass may shape them."""
        return batch.scores


def has_spread(scores: Tensor, groups: Tensor) -> Tensor:
    """`[B]` bool: whose group has scores that are not all equal, so that it says which of its samples were better."""
    _, index, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    differs = (F.group_normalise(scores, groups, std=None) != 0).to(scores.dtype)
    return (torch.zeros_like(counts, dtype=scores.dtype).index_add_(0, index, differs) > 0)[index]


def _lone(groups: Tensor) -> Tensor:
    """`[B]` bool: whose group has no other member."""
    _, index, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    alone: Tensor = counts[index] == 1
    return alone
