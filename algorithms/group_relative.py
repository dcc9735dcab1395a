"""What group-relative methods share: several samples a prompt, and advantages from the rewards of the group alone.

For the algorithms of this folder without a critic. A subclass gives its loss and, where its advantage is not GRPO's
(arXiv:2402.03300, section 4.1.2), overrides `sequence_advantages`.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from rollstock import Algorithm, Batch, RunConfig, option
from rollstock.algorithms import functional as F
from rollstock.algorithms.policy_loss import TermOptions, term_columns, term_outputs

Scale = Literal["unbiased", "biased", "none"]
Lone = Literal["zero", "raw"]


@dataclass(kw_only=True)
class GroupOptions(TermOptions):
    """Options of a group: how many samples, and what their rewards become."""

    group_size: int = option(8, "samples per prompt", minimum=2)
    scale: Scale = option("unbiased", "standard deviation that divides rewards within a group; none only centres them")
    lone: Lone = option(
        "zero", "advantage of a sample whose group has no other (the others have no score): zero, or its raw score"
    )


G = TypeVar("G", bound=GroupOptions)
"""The dataclass that holds the options of a group-relative method."""


class GroupRelative(Algorithm[G]):
    """One advantage a trajectory, on all its action tokens, and no critic; the loss is the subclass's."""

    needs = frozenset({"old_logprobs"})

    def needed_columns(self) -> Set[str]:
        """The reference model's log-probs only if the loss has a KL term."""
        return self.needs | term_columns(self.config)

    def training_outputs(self) -> Set[str]:
        """The entropy only if the loss has a bonus for it."""
        return term_outputs(self.config)

    def validate(self, config: RunConfig) -> Sequence[str]:
        """Greedy sampling makes a group's samples, and so all advantages, equal."""
        if config.sampling.temperature == 0:
            return ["sampling.temperature: 0 makes all samples of a prompt alike, so each advantage is 0: raise it"]
        return ()

    def advantages(self, batch: Batch) -> Tensor:
        """`[B, T]`: the advantage of each trajectory, on all its action tokens."""
        advantages = self.sequence_advantages(batch)  # [B]
        if self.config.lone == "raw":
            advantages = torch.where(_lone(batch.groups), batch.scores, advantages)
        return advantages[:, None] * batch.mask

    def sequence_advantages(self, batch: Batch) -> Tensor:
        """`[B]`: each score, centred within its group and scaled as `scale` says; 0 for a lone one."""
        std = None if self.config.scale == "none" else self.config.scale
        return F.group_normalise(batch.scores, batch.groups, std=std)


def _lone(groups: Tensor) -> Tensor:
    """`[B]` bool: whose group has no other member."""
    _, index, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    return counts[index] == 1
