"""Supervised fine-tuning (SFT): the cross-entropy of demonstrations, the first response that each task's data holds.

The maximum-likelihood step that precedes preference tuning, arXiv:2203.02155, section 3.5. Only tokens of the response
carry loss, its end token among them, so that the policy learns to stop. Assumes that every task has a demonstration; of
a preference pair it is the chosen response. A batch without response tokens has the loss 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp

from torch import Tensor

from rollstock import Algorithm, Batch, Loss, Metric, Metrics, MicroBatch, hookimpl, option
from rollstock.algorithms.functional import AggregationMode


@dataclass(kw_only=True)
class SFTConfig:
    """Options of SFT."""

    aggregation: AggregationMode = option("token_mean", "how losses of tokens become one number")


class SFT(Algorithm[SFTConfig]):
    """Maximum likelihood, written as a policy gradient: the advantage of a demonstration is its score, which is 1."""

    offline = True

    def advantages(self, batch: Batch) -> Tensor:
        """`[B, T]`: 1 on response tokens; an extension that scores demonstrations otherwise weights their losses."""
        return batch.scores[:, None] * batch.mask

    def loss(self, micro: MicroBatch) -> Loss:
        """Minus the log-prob of each token, times its advantage."""
        losses = -micro.advantages * micro.logprobs
        metrics = {"actor/nll": micro.mean(-micro.logprobs)}
        return micro.loss(losses, metrics, mode=self.config.aggregation, name="actor/loss")

    def after_update(self, batch: Batch, metrics: Mapping[str, Metric]) -> Metrics:
        """The perplexity of the step's demonstrations, before its last update: exp of the mean over tokens."""
        nll = metrics.get("actor/nll")
        return {"actor/perplexity": Metric(exp(min(nll.value, 100.0)), 1.0, "last")} if nll else {}


@hookimpl
def rollstock_algorithm() -> type[SFT]:
    """Give `SFT`."""
    return SFT
