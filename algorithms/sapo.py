"""Soft adaptive policy optimisation (SAPO), arXiv:2511.20347, section 3.

Advantages are GRPO's. In place of a clip, a sigmoid of the ratio lets a token's gradient fade the further it is from
the old policy: as the plain ratio's at 1, and nothing far away. Assumes that pushing tokens down is the more dangerous
direction, because it raises many unsampled ones: negative advantages fade faster (`tau_neg` above `tau_pos`). With one
update a step the ratio is 1, and the gradient is that of plain policy gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollstock import Loss, MicroBatch, hookimpl, option
from rollstock.algorithms import functional as F
from rollstock.algorithms.functional import AggregationMode
from rollstock.algorithms.group_relative import GroupOptions, GroupRelative
from rollstock.algorithms.policy_loss import with_terms


@dataclass(kw_only=True)
class SAPOConfig(GroupOptions):
    """Options of SAPO."""

    tau_pos: float = option(
        1.0, "how fast tokens with a positive advantage fade; larger is faster", minimum=1e-3, maximum=1_000
    )
    tau_neg: float = option(1.05, "how fast the other tokens fade", minimum=1e-3, maximum=1_000)
    aggregation: AggregationMode = option("seq_mean_token_mean", "how losses of tokens become one number")


class SAPO(GroupRelative[SAPOConfig]):
    """GRPO's advantages, with a soft gate in place of a clip."""

    def loss(self, micro: MicroBatch) -> Loss:
        """The gated surrogate, with the optional KL and entropy terms."""
        losses, weights = F.sapo_loss(
            micro.logprobs,
            micro.old_logprobs,
            micro.advantages,
            tau_pos=self.config.tau_pos,
            tau_neg=self.config.tau_neg,
        )
        return with_terms(micro, losses, self.config, {"actor/gate_weight": micro.mean(weights)})


@hookimpl
def rollstock_algorithm() -> type[SAPO]:
    """Give `SAPO`."""
    return SAPO
