"""Rollout correction: importance weights for a sampler whose probabilities are not the trainer's.

For runs whose engine computes in another precision or with other kernels than the trainer, or samples with older
weights: what an algorithm takes for its own policy's samples then is another's. Each loss of a token is multiplied by

    w = exp(old_logprobs - rollout_logprobs)

of the token, of its whole response (the product: unbiased, of high variance), or the geometric mean over its response.
Weights are truncated at a cap (TIS, arXiv:1802.01561, section 4.1) or set to 0 outside of bounds (MIS; a token's own
interval is IcePop, arXiv:2510.18855), and responses that are far off as a whole, or in one token, are rejected. Without
a mismatch all weights are 1. Advantages are those of the whole batch: a rejected response still counts as a sample of
its group. The docs page on off-policy correction compares all of this with other frameworks.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from rollstock import Algorithm, Extension, Metric, Metrics, RunConfig, hookimpl, option
from rollstock.algorithms import functional as F
from rollstock.plugins.extensions._mask import training_on
from rollstock.plugins.extensions._mismatch import divergence_metrics, effective_sample_size

if TYPE_CHECKING:
    from torch import Tensor

    from rollstock import Batch, Run

Level = Literal["token", "sequence", "geometric", "none"]


@dataclass(kw_only=True)
class RolloutCorrectionConfig:
    """Options of the `rollout_correction` extension."""

    level: Level = option(
        "token", "whose ratio weighs a token's loss: its own, its response's product or geometric mean; none: all are 1"
    )
    outside: Literal["truncate", "mask"] = option(
        "truncate", "what becomes of a weight outside of floor and cap: the nearer bound, or 0"
    )
    cap: float | None = option(2.0, "upper bound of a weight; null: none", minimum=1, maximum=1e9)
    floor: float | None = option(None, "lower bound of a weight; null: none", minimum=0, maximum=1)
    normalise: bool = option(False, "divide the weights of a batch by their mean")
    reject_above: float | None = option(
        None, "reject responses whose tokens' ratios have a larger geometric mean", minimum=1, maximum=1e9
    )
    reject_below: float | None = option(
        None, "reject responses whose tokens' ratios have a smaller geometric mean", minimum=0, maximum=1
    )
    reject_token_above: float | None = option(
        None, "reject responses with a token of a larger ratio", minimum=1, maximum=1e9
    )
    reject_token_below: float | None = option(
        None, "reject responses with a token of a smaller ratio", minimum=0, maximum=1
    )
    reject_k3_above: float | None = option(
        None,
        "reject responses whose tokens' mean divergence, by the estimator k3 in nats, is larger",
        minimum=0,
        maximum=1e9,
    )
    denominator: Literal["all", "kept"] = option(
        "all", "what losses are averaged over: all tokens and responses, or those whose weight is not 0"
    )

    def __post_init__(self) -> None:
        bounded = self.cap is not None or self.floor is not None
        if self.level == "none" and (self.outside == "mask" or self.floor is not None or self.normalise):
            raise ValueError("`level` none leaves no weights to bound, mask or normalise: choose token or sequence")
        if self.outside == "mask" and (not bounded or self.cap == 1 or self.floor == 1):
            raise ValueError(
                "`outside` mask needs a `cap` above 1 or a `floor` below 1, else it would mask nothing or all"
            )
        for name in ("reject_above", "reject_below", "reject_token_above", "reject_token_below"):
            if getattr(self, name) == 1:
                raise ValueError(f"`{name}` 1 would reject responses for rounding alone: leave a margin")
        if self.reject_k3_above == 0:
            raise ValueError("`reject_k3_above` 0 would reject responses for rounding alone: leave a margin")
        if self.denominator == "kept" and self.outside != "mask" and not self.rejects:
            raise ValueError("`denominator` kept is the same as all where nothing is masked or rejected")

    @property
    def rejects(self) -> bool:
        """Whether whole responses may be rejected."""
        whole = (self.reject_above, self.reject_below, self.reject_k3_above)
        return any(bound is not None for bound in (*whole, self.reject_token_above, self.reject_token_below))


class RolloutCorrection(Extension[RolloutCorrectionConfig]):
    """Puts the column `token_weights` [B, T] into the batch, which multiplies the losses of every algorithm.

    Where there is one already, from an extension further in, the two are multiplied. With `level: none` and no
    rejection it only measures.
    """

    needs = frozenset({"old_logprobs"})
    provides = frozenset({"token_weights"})

    def validate(self, config: RunConfig, algorithm: Algorithm[Any]) -> Sequence[str]:
        """An offline algorithm has no sampler; and ratios to the sampler itself are all 1."""
        if algorithm.offline:
            return ["an offline algorithm has no sampler to correct for: leave it out"]
        if config.pipeline.old_logprobs == "sampler":
            return [
                "pipeline.old_logprobs: sampler puts the sampler's log-probs in the place of the trainer's, so that "
                "every weight would be 1: keep one of both"
            ]
        return ()

    @hookimpl(wrapper=True)
    def rollstock_prepare(self, run: Run, batch: Batch) -> Generator[None, bool | None, bool | None]:
        """Weigh the tokens of the batch; records how far off they are."""
        done = yield
        old, sampled, mask = batch.old_logprobs, batch.rollout_logprobs, batch.mask
        ratios = self.ratios(old, sampled, mask)
        rejected = self.rejected(old, sampled, mask)
        weights = self.weights(ratios, rejected, mask)
        batch["token_weights"] = weights * batch["token_weights"] if "token_weights" in batch else weights
        run.record(divergence_metrics(old, sampled, mask))
        run.record(self._weight_metrics(ratios, weights, rejected, mask))
        return done

    @hookimpl(wrapper=True)
    def rollstock_update(self, run: Run, batch: Batch) -> Generator[None, Metrics, Metrics]:
        """With `denominator: kept`, tokens of weight 0 are no action tokens for as long as the update lasts."""
        if self.config.denominator == "all":
            return (yield)
        with training_on(batch, batch.flat("token_weights") > 0):
            return (yield)

    def ratios(self, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
        """[B, T]: the trainer's probability over the sampler's, of what `level` says; 0 in masked slots."""
        if self.config.level == "geometric":
            means = F.gspo_ratio(old_logprobs, rollout_logprobs, mask)
            return torch.where(mask, means[:, None], 0.0)
        level: F.WeightLevel = "sequence" if self.config.level == "sequence" else "token"
        return F.importance_weights(old_logprobs, rollout_logprobs, mask, level=level, cap=math.inf)

    def rejected(self, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
        """[B] bool: the responses that are far off as a whole, or in one token. One without tokens never is."""
        config = self.config
        means = F.gspo_ratio(old_logprobs, rollout_logprobs, mask)
        tokens = F.importance_weights(old_logprobs, rollout_logprobs, mask, level="token", cap=math.inf)
        worst = mask & _outside(tokens, config.reject_token_below, config.reject_token_above)
        rejected = _outside(means, config.reject_below, config.reject_above) | worst.any(dim=1)
        if config.reject_k3_above is None:
            return rejected
        k3 = torch.where(mask, F.kl_estimate(rollout_logprobs, old_logprobs, kind="k3"), 0.0)
        return rejected | (k3.sum(dim=1) / mask.sum(dim=1).clamp(min=1) > config.reject_k3_above)

    def weights(self, ratios: Tensor, rejected: Tensor, mask: Tensor) -> Tensor:
        """[B, T]: what the losses are multiplied by; 0 in masked slots and in rejected responses."""
        config = self.config
        if config.level == "none":
            weights = torch.ones_like(ratios)
        elif config.outside == "mask":
            weights = torch.where(_outside(ratios, config.floor, config.cap), 0.0, ratios)
        else:
            weights = ratios if config.cap is None and config.floor is None else ratios.clamp(config.floor, config.cap)
        weights = torch.where(mask & ~rejected[:, None], weights, 0.0)
        if not config.normalise:
            return weights
        counted = mask & (weights > 0) if config.denominator == "kept" else mask
        values = self._units(weights, counted)
        mean = float(values.double().mean()) if len(values) else 0.0
        return weights / mean if mean else weights

    def _units(self, values: Tensor, mask: Tensor) -> Tensor:
        """What has a weight of its own, [n]: the tokens in the mask, or, above that level, responses with any."""
        if self.config.level in ("token", "none"):
            return values[mask]
        first = mask & (mask.cumsum(dim=1) == 1)
        return values[first]

    def _weight_metrics(self, ratios: Tensor, weights: Tensor, rejected: Tensor, mask: Tensor) -> Metrics:
        tokens, responses = int(mask.sum()), int(mask.any(dim=1).sum())
        if not tokens:
            return {}
        raw, used = self._units(ratios, mask), self._units(weights, mask)
        out_of_bounds = _outside(raw, self.config.floor, self.config.cap)
        zeros = int((mask & (weights == 0)).sum())
        metrics = {
            "rollout_corr/ratio_max": Metric(float(raw.max()), 1.0, "max"),
            "rollout_corr/ratio_min": Metric(float(raw.min()), 1.0, "min"),
            "rollout_corr/weight_mean": Metric(float(used.double().mean()), len(used)),
            "rollout_corr/effective_sample_size": Metric(effective_sample_size(used), len(used)),
            "rollout_corr/zero_share": Metric(zeros / tokens, tokens),
            "rollout_corr/rejected_share": Metric(int(rejected.sum()) / responses, responses),
        }
        if self.config.level != "none":
            name = "truncated_share" if self.config.outside == "truncate" else "masked_share"
            metrics[f"rollout_corr/{name}"] = Metric(float(out_of_bounds.double().mean()), len(raw))
        return metrics


def _outside(values: Tensor, low: float | None, high: float | None) -> Tensor:
    """Bool, of the shape of `values`: below `low` or above `high`; None is no bound."""
    below = torch.zeros_like(values, dtype=torch.bool) if low is None else values < low
    return below if high is None else below | (values > high)


@hookimpl
def rollstock_extension() -> type[Extension[Any]]:
    """The class of this plugin."""
    return RolloutCorrection
