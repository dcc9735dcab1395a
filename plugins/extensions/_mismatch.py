"""How far the sampler's probabilities are from the trainer's, as metrics: for `rollout_correction`.

Names are those that verl gives these measures, under `rollout_corr/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rollstock import Metric, Metrics
from rollstock.algorithms import functional as F

if TYPE_CHECKING:
    from torch import Tensor


def divergence_metrics(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Metrics:
    """KL(sampler || trainer) a token by two estimators, and the gap of their perplexities a response; all [B, T].

    `log_ppl_diff` is the mean over responses of log perplexity of the trainer less that of the sampler, `ppl_ratio` the
    mean of its exponential.
    """
    tokens = int(mask.sum())
    if not tokens:
        return {}
    k1, k3 = (
        torch.where(mask, F.kl_estimate(rollout_logprobs, old_logprobs, kind=kind), 0.0).double().sum() / tokens
        for kind in ("k1", "k3")
    )
    trainer, sampler = (_log_perplexity(x, mask) for x in (old_logprobs, rollout_logprobs))
    responses = len(trainer)
    gap = trainer - sampler

    def mean(values: Tensor) -> Metric:
        return Metric(float(values.mean()), responses)

    return {
        "rollout_corr/kl": Metric(float(k1), tokens),
        "rollout_corr/k3_kl": Metric(float(k3), tokens),
        "rollout_corr/training_ppl": mean(trainer.exp()),
        "rollout_corr/rollout_ppl": mean(sampler.exp()),
        "rollout_corr/log_ppl_diff": mean(gap),
        "rollout_corr/log_ppl_abs_diff": mean(gap.abs()),
        "rollout_corr/ppl_ratio": mean(gap.exp()),
    }


def _log_perplexity(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Minus the mean log-prob of each response with tokens, [S]."""
    counts = mask.sum(dim=1)
    sums = torch.where(mask, logprobs, 0.0).double().sum(dim=1)
    return -(sums / counts.clamp(min=1))[counts > 0]


def effective_sample_size(weights: Tensor) -> float:
    """(sum w)^2 / (n sum w^2) of weights [n]: the share of samples that equally weighted ones would need; 0 if all are
    0."""
    weights = weights.double()
    squares = float(weights.square().sum()) * len(weights)
    return float(weights.sum()) ** 2 / squares if squares else 0.0
