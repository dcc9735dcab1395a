"""Group sequence policy optimisation (GSPO), arXiv:2507.18071, equations 5 and 7.

Advantages are GRPO's, but ratio and clip belong to the whole response: the ratio is the geometric mean of its tokens'
ratios, s = exp(mean of logprobs - old_logprobs), so that one odd token, or an expert routed otherwise, does not decide
alone. Assumes that a response shares one advantage; where tokens differ, `level: token` (GSPO-token, equations 13
and 14) gives each its own, under the same clip. As s moves little, clip ranges are far smaller than PPO's. A response
without action tokens has s = 1 and no loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rollstock import Loss, MicroBatch, hookimpl, option
from rollstock.algorithms import functional as F
from rollstock.algorithms.functional import AggregationMode
from rollstock.algorithms.group_relative import GroupOptions, GroupRelative
from rollstock.algorithms.policy_loss import ClipOptions, sequence_advantages, with_terms

Level = Literal["sequence", "token"]


@dataclass(kw_only=True)
class GSPOConfig(ClipOptions, GroupOptions):
    """Options of GSPO."""

    clip: float = option(3e-4, "clip range of a response's ratio", minimum=0, maximum=1e6)
    clip_high: float | None = option(
        4e-4, "upper clip range where it differs from the lower one", minimum=0, maximum=1e6
    )
    aggregation: AggregationMode = option("seq_mean_token_mean", "how losses of tokens become one number")
    level: Level = option(
        "sequence", "whose advantage counts: the response's mean, or each token's own; alike if a response shares one"
    )


class GSPO(GroupRelative[GSPOConfig]):
    """GRPO's advantages, with ratio and clip of whole responses."""

    def loss(self, micro: MicroBatch) -> Loss:
        """The clipped surrogate of the responses' ratios, with the optional KL and entropy terms."""
        log_ratio = F.gspo_ratio(micro.logprobs, micro.old_logprobs, micro.mask).log()  # [b]
        if self.config.level == "token":
            # The value of the response's ratio at every token, but each with the gradient of its own log-prob.
            own = torch.where(micro.mask, micro.logprobs, 0.0)
            log_ratio, advantages = log_ratio.detach()[:, None] + own - own.detach(), micro.advantages
        else:
            advantages = sequence_advantages(micro)
        losses, clipped = F.clipped_surrogate(
            log_ratio,
            torch.zeros_like(log_ratio),
            advantages,
            eps_low=self.config.clip,
            eps_high=self.config.upper,
            dual_clip=self.config.dual_clip,
        )
        if losses.dim() == 1:
            losses, clipped = (x[:, None].expand(micro.mask.shape) for x in (losses, clipped))
        return with_terms(micro, losses, self.config, {"actor/pg_clipfrac": micro.mean(clipped)})


@hookimpl
def rollstock_algorithm() -> type[GSPO]:
    """Give `GSPO`."""
    return GSPO
