"""Clip-Cov: PPO's clip, and no gradient from some tokens of high covariance, arXiv:2505.22617, section 4.2.

Advantages are GRPO's. Entropy falls fastest through tokens that are both likely and well rewarded, or unlikely and ill
rewarded: those whose covariance of log-prob and advantage lies between `cov_low` and `cov_high`, of which a small
`fraction`, drawn at random, is left out of the loss. Assumes that a few tokens bring most of the collapse. If none
lies between the bounds (all rewards equal, for one), the loss is GRPO's.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from rollstock import Batch, Loss, MicroBatch, derive_seed, hookimpl, option
from rollstock.algorithms import functional as F
from rollstock.algorithms.covariance import CovarianceMethod, CovarianceOptions, largest
from rollstock.algorithms.policy_loss import ClipOptions, with_terms


@dataclass(kw_only=True)
class ClipCovConfig(ClipOptions, CovarianceOptions):
    """Options of Clip-Cov."""

    cov_low: float = option(1.0, "covariance above which a token may be left out", minimum=-1e9, maximum=1e9)
    cov_high: float = option(5.0, "covariance below which a token may be left out", minimum=-1e9, maximum=1e9)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cov_low >= self.cov_high:
            raise ValueError(f"cov_low ({self.cov_low}) must be below cov_high ({self.cov_high})")


class ClipCov(CovarianceMethod[ClipCovConfig]):
    """GRPO, without the gradient of a random few of the tokens whose covariance is high."""

    def hold_back(self, batch: Batch, covariance: Tensor, most: int) -> Tensor:
        """`[B, T]` bool: `most` tokens, drawn from those between the bounds."""
        between = (covariance > self.config.cov_low) & (covariance < self.config.cov_high)
        return largest(torch.where(between, lottery(batch, between.any(dim=1)), -torch.inf), most)

    def loss(self, micro: MicroBatch) -> Loss:
        """The clipped surrogate of the other tokens, with the optional KL and entropy terms on all."""
        losses, clipped = F.clipped_surrogate(
            micro.logprobs,
            micro.old_logprobs,
            micro.advantages,
            eps_low=self.config.clip,
            eps_high=self.config.upper,
            dual_clip=self.config.dual_clip,
        )
        metrics = {"actor/pg_clipfrac": micro.mean(clipped), "actor/held_back": micro.mean(micro.held_back)}
        return with_terms(micro, torch.where(micro.held_back, 0.0, losses), self.config, metrics)


def lottery(batch: Batch, rows: Tensor) -> Tensor:
    """`[B, T]`: a random number from 0 to 1 for each action token of the trajectories `rows` `[B]` bool, else 0.

    It is a function of what was sampled, and by which policy. Neither the order of trajectories, nor padding, nor the
    rounding of log-probs changes it, and a resumed run draws what an uninterrupted one would have drawn.
    """
    mask = batch.mask
    made = torch.stack([batch["response"], batch.versions], dim=2)  # [B, T, 2]
    numbers = torch.zeros(mask.shape, device=mask.device)
    for row in torch.nonzero(rows).flatten().tolist():
        sampled = made[row, mask[row]].cpu()
        digest = hashlib.sha256(sampled.numpy().tobytes()).hexdigest()
        generator = torch.Generator().manual_seed(derive_seed(0, "clip_cov", batch.task_ids[row], digest))
        numbers[row, mask[row]] = torch.rand(len(sampled), generator=generator).to(numbers.device)
    return numbers


@hookimpl
def rollstock_algorithm() -> type[ClipCov]:
    """Give `ClipCov`."""
    return ClipCov
