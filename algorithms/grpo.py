"""Group-relative policy optimisation (GRPO), arXiv:2402.03300, equation 3.

Each prompt is sampled `group_size` times; a response's advantage is its reward, centred and scaled within its group.
A group whose rewards are all equal carries no signal: its advantages are 0. `scale: none` with `aggregation:
seq_mean_token_sum_norm` is Dr. GRPO (arXiv:2503.20783).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rollstock import Algorithm, Batch, Loss, MicroBatch, RunConfig, hookimpl, option
from rollstock.algorithms import functional as F
from rollstock.algorithms.policy_loss import ClipOptions, clipped_loss, term_columns, term_outputs

Scale = Literal["unbiased", "biased", "none"]


@dataclass(kw_only=True)
class GRPOConfig(ClipOptions):
    """Options of GRPO."""

    group_size: int = option(8, "samples per prompt", minimum=2)
    scale: Scale = option("unbiased", "standard deviation that divides rewards within a group; none only centres them")


class GRPO(Algorithm[GRPOConfig]):
    """Advantages from a group's own rewards, a clipped policy loss, and no critic."""

    needs = frozenset({"old_logprobs"})

    def needed_columns(self) -> Set[str]:
        """The reference model's log-probs only if the loss has a KL term."""
        return self.needs | term_columns(self.config)

    def training_outputs(self) -> Set[str]:
        """The entropy only if the loss has a bonus for it."""
        return term_outputs(self.config)

    def validate(self, config: RunConfig) -> Sequence[str]:
        """Greedy sampling makes a group's samples, and so all advantages, equal."""
        if config.sampling.temperature == 0:
            return ["sampling.temperature: 0 makes all samples of a prompt alike, so each advantage is 0: raise it"]
        return ()

    def advantages(self, batch: Batch) -> Tensor:
        """`[B, T]`: the normalised score of each trajectory, on all its action tokens."""
        std = None if self.config.scale == "none" else self.config.scale
        scores = F.group_normalise(batch.scores, batch.groups, std=std)  # [B]
        return scores[:, None] * batch.mask

    def loss(self, micro: MicroBatch) -> Loss:
        """PPO's clipped surrogate, with the optional KL and entropy terms."""
        return clipped_loss(micro, self.config)


@hookimpl
def rollstock_algorithm() -> type[GRPO]:
    """Give `GRPO`."""
    return GRPO
