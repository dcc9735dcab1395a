"""Proximal policy optimisation (PPO), arXiv:1707.06347, equations 7 and 9, as on language models (arXiv:1909.08593).

A critic predicts the return at every token; advantages are generalised advantage estimates (arXiv:1506.02438) of the
score, which lands on the last action token, less a KL penalty on every one. Assumes that the critic can keep up:
`train.critic_warmup` gives it a head start. A response without tokens has no place for its score and carries no signal.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from torch import Tensor

from rollstock import Batch, Head, Loss, MicroBatch, hookimpl, merge_metrics, option
from rollstock.algorithms import functional as F
from rollstock.algorithms.kl_control import KLPenalised, KLPenaltyOptions
from rollstock.algorithms.policy_loss import ClipOptions, clipped_loss


@dataclass(kw_only=True)
class PPOConfig(ClipOptions, KLPenaltyOptions):
    """Options of PPO."""

    group_size: int = option(1, "samples per prompt", minimum=1, maximum=100_000)
    shared_backbone: bool = option(
        False, "the policy's own transformer has the value head: less memory than a critic, and one learning rate"
    )
    value_clip: float | None = option(
        0.2, "how far a value may move from the old one in the value loss; null: freely", minimum=0, maximum=1e9
    )
    value_coef: float = option(
        1.0, "weight of the value loss, beside the policy's on a shared backbone", minimum=0, maximum=1_000
    )
    gamma: float = option(1.0, "discount of a token's successors", minimum=0, maximum=1)
    lam: float = option(0.95, "lambda of generalised advantage estimation", minimum=0, maximum=1)
    whiten: bool = option(True, "scale advantages to unit variance, around 0, over the batch")


class PPO(KLPenalised[PPOConfig]):
    """Advantages from a critic, clipped losses for policy and values, a KL penalty that may adapt."""

    needs = frozenset({"old_logprobs", "values"})

    def actor_head(self) -> Head:
        """On a shared backbone, both."""
        return "lm+value" if self.config.shared_backbone else "lm"

    def training_outputs(self) -> Set[str]:
        """The entropy only if the loss has a bonus for it, the values only on a shared backbone."""
        return super().training_outputs() | ({"values"} if self.config.shared_backbone else set())

    def advantages(self, batch: Batch) -> Mapping[str, Tensor]:
        """`advantages`, and `returns` for the critic, both `[B, T]`."""
        mask, rewards = batch.mask, self.penalised_rewards(batch)
        advantages, returns = F.gae(rewards, batch.values, mask, gamma=self.config.gamma, lam=self.config.lam)
        return {
            "advantages": F.masked_whiten(advantages, mask) if self.config.whiten else advantages,
            "returns": returns,
        }

    def loss(self, micro: MicroBatch) -> Loss:
        """The clipped surrogate, with the optional KL and entropy terms; on a shared backbone plus the value loss."""
        policy = clipped_loss(micro, self.config)
        if not self.config.shared_backbone:
            return policy
        values = self.critic_loss(micro)
        return Loss(policy.value + values.value, merge_metrics([policy.metrics, values.metrics]))

    def critic_loss(self, micro: MicroBatch) -> Loss:
        """The clipped value loss, with the values of before the update as the old ones."""
        old_values = micro.batch["values"]
        losses, clipped = F.clipped_value_loss(micro.values, old_values, micro.returns, clip=self.config.value_clip)
        metrics = {
            "critic/vf_clipfrac": micro.mean(clipped),
            "critic/vf_error": micro.mean((micro.values - micro.returns).abs()),
        }
        return micro.loss(self.config.value_coef * losses, metrics, name="critic/vf_loss")


@hookimpl
def rollstock_algorithm() -> type[PPO]:
    """Give `PPO`."""
    return PPO
