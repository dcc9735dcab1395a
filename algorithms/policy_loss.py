"""What the losses of most methods share: the clipped objective, the terms beside it, and where a score lands.

For the algorithms of this folder, whose configs inherit the options here. What is particular to a method is in its
file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollstock import Batch, Loss, Metric, MicroBatch, option
from rollstock.algorithms import functional as F
from rollstock.algorithms.functional import AggregationMode, KLKind


@dataclass(kw_only=True)
class TermOptions:
    """Options of the terms that can be added to any policy loss."""

    kl_coef: float = option(
        0.0,
        "weight of the KL divergence from the reference model in the loss; 0 needs no reference",
        minimum=0,
        maximum=1_000,
    )
    kl_kind: KLKind = option("k3", "estimator of that divergence; k2, k1+ and k3+ have its true gradient")
    entropy_coef: float = option(0.0, "weight of the entropy bonus in the loss", minimum=0, maximum=1_000)
    aggregation: AggregationMode = option("token_mean", "how losses of tokens become one number")


@dataclass(kw_only=True)
class RangeOptions(TermOptions):
    """Options of a policy loss that holds the probability ratio within a range around 1."""

    clip: float = option(0.2, "clip range of the probability ratio", minimum=0, maximum=1e6)
    clip_high: float | None = option(
        None, "upper clip range where it differs from the lower one", minimum=0, maximum=1e6
    )

    @property
    def upper(self) -> float:
        """The upper clip range, whichever option gives it."""
        return self.clip if self.clip_high is None else self.clip_high


@dataclass(kw_only=True)
class ClipOptions(RangeOptions):
    """Options of PPO's clipped policy loss."""

    dual_clip: float | None = option(
        None, "bound on the loss of negative advantages, in multiples of them; above 1", minimum=1, maximum=1e6
    )

    def __post_init__(self) -> None:
        if self.dual_clip == 1:
            raise ValueError("dual_clip must be above 1, or null for none")


def term_columns(options: TermOptions) -> frozenset[str]:
    """The columns that the terms need."""
    return frozenset({"ref_logprobs"}) if options.kl_coef else frozenset()


def term_outputs(options: TermOptions) -> frozenset[str]:
    """What the terms need of the model in training."""
    return frozenset({"logprobs", "entropy"}) if options.entropy_coef else frozenset({"logprobs"})


def clipped_loss(micro: MicroBatch, options: ClipOptions) -> Loss:
    """PPO's clipped surrogate with the optional terms: the whole policy loss of a slice, with its metrics."""
    losses, clipped = F.clipped_surrogate(
        micro.logprobs,
        micro.old_logprobs,
        micro.advantages,
        eps_low=options.clip,
        eps_high=options.upper,
        dual_clip=options.dual_clip,
    )
    return with_terms(micro, losses, options, {"actor/pg_clipfrac": micro.mean(clipped)})


def sequence_advantages(micro: MicroBatch) -> Tensor:
    """`[b]`: the mean advantage over each trajectory's action tokens; 0 without any. For losses of whole sequences."""
    kept = torch.where(micro.mask, micro.advantages, 0.0)
    return kept.sum(dim=1) / micro.mask.sum(dim=1).clamp_min(1)


def with_terms(micro: MicroBatch, losses: Tensor, options: TermOptions, metrics: Mapping[str, Metric]) -> Loss:
    """The loss of a slice: `losses` `[b, T]` per token plus the KL and entropy terms, aggregated, with metrics."""
    drift = F.kl_estimate(micro.old_logprobs, micro.logprobs.detach(), kind="k1")
    recorded = {**metrics, "actor/ppo_kl": micro.mean(drift)}  # how far the policy moved from the one that sampled
    if options.kl_coef:
        kl = F.kl_estimate(micro.logprobs, micro.ref_logprobs, kind=options.kl_kind)
        losses = losses + options.kl_coef * kl
        recorded["actor/kl_loss"] = micro.mean(kl)
    if options.entropy_coef:
        losses = losses - options.entropy_coef * micro.entropy
        recorded["actor/entropy"] = micro.mean(micro.entropy)
    return micro.loss(losses, recorded, mode=options.aggregation)


def token_rewards(batch: Batch) -> Tensor:
    """`[B, T]`: each score on the trajectory's last action token, plus rewards of single steps where there are any.

    A trajectory without action tokens gets none, so its score lands nowhere.
    """
    mask = batch.mask
    rewards = torch.where(last_actions(mask), batch.scores[:, None], 0.0)
    return rewards + torch.where(mask, batch.step_rewards, 0.0) if "step_rewards" in batch else rewards


def last_actions(mask: Tensor) -> Tensor:
    """`[B, T]` bool: the last True of each row of `mask`; none where a row has none."""
    later = mask.flip(1).cumsum(1).flip(1)  # how many stand at or after each place
    return mask & (later == 1)
