"""What Clip-Cov and KL-Cov share: the covariance of log-prob and advantage, token by token, over a whole batch.

For the two algorithms of arXiv:2505.22617, which find that entropy falls where this covariance is high, and hold those
few tokens back. Which tokens they are is decided once a step, in `advantages`, over every token of the step and with
the log-probs of the policy that sampled. Deciding in the loss, on a slice of the batch and with the log-probs of the
moment, would make the gradient depend on how the batch was cut.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from rollstock import Batch, option
from rollstock.algorithms import functional as F
from rollstock.algorithms.group_relative import GroupOptions, GroupRelative


@dataclass(kw_only=True)
class CovarianceOptions(GroupOptions):
    """Options of a method that holds back tokens of high covariance."""

    fraction: float = option(
        2e-4, "share of a step's tokens that may be held back; at least one may", minimum=0, maximum=1
    )


V = TypeVar("V", bound=CovarianceOptions)
"""The dataclass that holds the options of such a method."""


class CovarianceMethod(GroupRelative[V]):
    """GRPO's advantages, and the column `held_back`: the tokens of high covariance that the loss treats otherwise."""

    early = frozenset({"old_logprobs"})

    def advantages(self, batch: Batch) -> Mapping[str, Tensor]:
        """`advantages`, and `held_back` as bools, both `[B, T]`."""
        advantages = self.token_advantages(batch)
        mask = batch.mask
        covariance = token_covariance(batch.old_logprobs, advantages, mask)
        most = max(1, int(self.config.fraction * int(mask.sum())))
        return {"advantages": advantages, "held_back": self.hold_back(batch, covariance, most) & mask}

    @abstractmethod
    def hold_back(self, batch: Batch, covariance: Tensor, most: int) -> Tensor:
        """`[B, T]` bool: at most `most` tokens, by their `covariance` `[B, T]`, which is -inf on masked ones."""


def token_covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The share of each token in the covariance of log-prob and advantage, arXiv:2505.22617, section 4.2; `[B, T]`.

    (logprob - mean logprob) * (advantage - mean advantage), with means over all unmasked tokens; -inf in masked slots.
    Their mean over tokens is the covariance.
    """
    deviations = [x - F.masked_mean(x, mask) for x in (logprobs, advantages)]
    return torch.where(mask, deviations[0] * deviations[1], -torch.inf)


def largest(values: Tensor, most: int) -> Tensor:
    """Bools of the shape of `values`, True on the `most` largest of those that are not -inf."""
    flat = values.flatten()
    found = torch.zeros_like(flat, dtype=torch.bool)
    found[flat.topk(min(most, len(flat))).indices] = True
    return (found & (flat > -torch.inf)).view_as(values)
