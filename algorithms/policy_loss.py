"""What the losses of most methods share: the terms beside the clipped objective, and where a trajectory's score lands.

For the algorithms of this folder: each says what its losses per token are, and adds the optional terms by one call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rollstock import Batch, Loss, Metric, MicroBatch, option
from rollstock.algorithms import functional as F

KLKind = Literal["k1", "k2", "k3", "abs", "k1+", "k3+"]
Aggregation = Literal["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


@dataclass(kw_only=True)
class TermOptions:
    """Options of the terms that can be added to any policy loss."""

    kl_coef: float = option(0.0, "weight of the KL divergence from the reference model in the loss; 0 needs no reference", minimum=0)
    kl_kind: KLKind = option("k3", "estimator of that divergence; k2, k1+ and k3+ have its true gradient")
    entropy_coef: float = option(0.0, "weight of the entropy bonus in the loss", minimum=0)
    aggregation: Aggregation = option("token_mean", "how losses of tokens become one number")


def term_columns(options: TermOptions) -> frozenset[str]:
    """The columns that the terms need."""
    return frozenset({"ref_logprobs"}) if options.kl_coef else frozenset()


def term_outputs(options: TermOptions) -> frozenset[str]:
    """What the terms need of the model in training."""
    return frozenset({"logprobs", "entropy"}) if options.entropy_coef else frozenset({"logprobs"})


def with_terms(micro: MicroBatch, losses: Tensor, options: TermOptions, metrics: Mapping[str, Metric]) -> Loss:
    """The loss of a slice: `losses` `[b, T]` per token plus the KL and entropy terms, aggregated, with their metrics."""
    recorded = dict(metrics)
    if options.kl_coef:
        kl = F.kl_estimate(micro.logprobs, micro.ref_logprobs, kind=options.kl_kind)
        losses = losses + options.kl_coef * kl
        recorded["actor/kl_loss"] = micro.mean(kl)
    if options.entropy_coef:
        losses = losses - options.entropy_coef * micro.entropy
        recorded["actor/entropy"] = micro.mean(micro.entropy)
    return micro.loss(losses, recorded, mode=options.aggregation)


def ratio_metrics(micro: MicroBatch, clipped: Tensor) -> dict[str, Metric]:
    """How far the policy has moved from the one that sampled: share of clipped tokens, and the mean k1 divergence."""
    drift = micro.old_logprobs - micro.logprobs.detach()
    return {"actor/pg_clipfrac": micro.mean(clipped), "actor/ppo_kl": micro.mean(drift)}


def token_rewards(batch: Batch) -> Tensor:
    """`[B, T]`: each score on the trajectory's last action token, plus rewards of single steps where there are any.

    A trajectory without action tokens gets none, so its score lands nowhere.
    """
    mask = batch.mask
    later = mask.flip(1).cumsum(1).flip(1)  # how many action tokens stand at or after each place
    rewards = torch.where(mask & (later == 1), batch.scores[:, None], 0.0)
    return rewards + torch.where(mask, batch.step_rewards, 0.0) if "step_rewards" in batch else rewards
