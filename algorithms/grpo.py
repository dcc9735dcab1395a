"""Group-relative policy optimisation (GRPO), arXiv:2402.03300, equation 3.

Each prompt is sampled `group_size` times; a response's advantage is its reward, centred and scaled within its group.
A group whose rewards are all equal carries no signal: its advantages are 0. `scale: none` with `aggregation:
seq_mean_token_sum_norm` is Dr. GRPO (arXiv:2503.20783).
"""

from __future__ import annotations

from dataclasses import dataclass

from rollstock import Loss, MicroBatch, hookimpl
from rollstock.algorithms.group_relative import GroupOptions, GroupRelative
from rollstock.algorithms.policy_loss import ClipOptions, clipped_loss


@dataclass(kw_only=True)
class GRPOConfig(ClipOptions, GroupOptions):
    """Options of GRPO."""


class GRPO(GroupRelative[GRPOConfig]):
    """Advantages from a group's own rewards, a clipped policy loss, and no critic."""

    def loss(self, micro: MicroBatch) -> Loss:
        """PPO's clipped surrogate, with the optional KL and entropy terms."""
        return clipped_loss(micro, self.config)


@hookimpl
def rollstock_algorithm() -> type[GRPO]:
    """Give `GRPO`."""
    return GRPO
