"""ReMax, arXiv:2310.10505: REINFORCE with the greedy response's score as the baseline.

Every task of a step is also played once without chance, and scored; a sample's advantage is its score less that one.
One sample a prompt is enough, and neither critic nor group is needed; the price is one more response a prompt, which
`greedy/num_tokens` and `timing_s/greedy` show. Assumes an outcome reward. A sample that scores as the greedy response
does, or whose greedy response has no score (`greedy/num_unscored`), has an advantage of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollstock import Batch, Loss, MicroBatch, RunConfig, hookimpl, option
from rollstock.algorithms import functional as F
from rollstock.algorithms.functional import AggregationMode
from rollstock.algorithms.policy_gradient import PolicyGradient, greedy_sampling
from rollstock.algorithms.policy_loss import ClipOptions, clipped_loss


@dataclass(kw_only=True)
class ReMaxConfig(ClipOptions):
    """Options of ReMax."""

    group_size: int = option(1, "samples per prompt, beside the greedy one", minimum=1, maximum=100_000)
    whiten: bool = option(False, "scale advantages to unit variance, around 0, over the batch")
    aggregation: AggregationMode = option(
        "seq_mean_token_sum", "how losses of tokens become one number; a sum over each response makes it one action"
    )


class ReMax(PolicyGradient[ReMaxConfig]):
    """Scores less that of the greedy response to the same task."""

    needs = frozenset({"old_logprobs", "greedy_scores"})

    def validate(self, config: RunConfig) -> Sequence[str]:
        """Greedy samples are their own baseline."""
        if setting := greedy_sampling(config):
            return [f"{setting} makes each sample the greedy response, its baseline, so each advantage is 0: raise it"]
        return ()

    def advantages(self, batch: Batch) -> Tensor:
        """`[B, T]`: each score less the greedy response's, on all action tokens."""
        lead = torch.where(batch.greedy_scored, batch.scores - batch.greedy_scores, 0.0)  # [B]
        advantages = lead[:, None] * batch.mask
        return F.masked_whiten(advantages, batch.mask) if self.config.whiten else advantages

    def loss(self, micro: MicroBatch) -> Loss:
        """PPO's clipped surrogate, with the optional KL and entropy terms."""
        return clipped_loss(micro, self.config)


@hookimpl
def rollstock_algorithm() -> type[ReMax]:
    """Give `ReMax`."""
    return ReMax
