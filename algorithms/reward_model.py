"""Reward modelling by Bradley and Terry's model of preferences, arXiv:2203.02155, equation 1.

Learns one number for a response from pairs that the data holds, one chosen and one rejected: the probability of the
choice is the sigmoid of the difference between both numbers. The number is read after the last token of the response.
Assumes that one scale fits all prompts: only differences within a prompt are learnt, so numbers of different prompts
compare as far as the model generalises, and their zero is arbitrary (`centre_coef` puts it near the mean). Two equal
responses, or one without tokens, teach nothing. `rollstock export` writes a sequence classifier with one label.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollstock import Loss, MicroBatch, hookimpl, option
from rollstock.algorithms.policy_loss import last_actions
from rollstock.algorithms.preference import PairAlgorithm, preference_loss, preferred_pairs


@dataclass(kw_only=True)
class RewardModelConfig:
    """Options of reward modelling."""

    margin: float = option(
        0.0, "how far the chosen response must lead, arXiv:2307.09288, section 3.2.2", minimum=0, maximum=1e6
    )
    label_smoothing: float = option(
        0.0, "share of pairs taken to be labelled the wrong way round", minimum=0, maximum=0.49
    )
    centre_coef: float = option(
        0.0,
        "weight of the squared sum of a pair's scores, which keeps them around 0, arXiv:2312.09244",
        minimum=0,
        maximum=1_000,
    )


class RewardModel(PairAlgorithm[RewardModelConfig]):
    """A scalar on top of the transformer, trained to order pairs; nothing is sampled."""

    head = "score"
    trains_with = frozenset({"token_scores"})

    def loss(self, micro: MicroBatch) -> Loss:
        """The mean loss of the pairs, found by their scores in the data."""
        scores = last_scores(micro.token_scores, micro.mask)  # [b]
        pairs = preferred_pairs(micro.scores, micro.groups, micro.mask.any(dim=1))
        better, worse = scores[pairs.better], scores[pairs.worse]
        losses = preference_loss(
            better - worse,
            beta=1.0,
            kind="sigmoid",
            label_smoothing=self.config.label_smoothing,
            margin=self.config.margin,
        )
        if self.config.centre_coef:
            losses = losses + self.config.centre_coef * (better + worse).square()
        return micro.group_loss(pairs.weights * losses, pairs.metrics(scores.detach()), name="actor/loss")


def last_scores(token_scores: Tensor, mask: Tensor) -> Tensor:
    """[B]: what a reward model says after the last token that the policy chose, from [B, T]; 0 where it chose none."""
    return torch.where(last_actions(mask), token_scores, 0.0).sum(dim=1)


@hookimpl
def rollstock_algorithm() -> type[RewardModel]:
    """Give `RewardModel`."""
    return RewardModel
