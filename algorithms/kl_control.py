"""How strongly a policy is held near its reference: the coefficient of the KL penalty, and how it adapts.

For algorithms that penalise divergence. The coefficient is state, so it goes into checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from rollstock import Batch, Metric, Metrics, option
from rollstock.algorithms import functional as F
from rollstock.algorithms.functional import KLControl, KLKind
from rollstock.algorithms.policy_gradient import PolicyGradient
from rollstock.algorithms.policy_loss import TermOptions, token_rewards


@dataclass(kw_only=True)
class KLControlOptions:
    """Options of a KL coefficient. `kl_target` and `kl_horizon` matter where it adapts."""

    kl_reward_coef: float = option(
        0.0, "weight of the KL penalty in the reward (its start, if it adapts); 0 is off", minimum=0, maximum=1_000
    )
    kl_control: KLControl = option(
        "fixed", "fixed; horizon: proportional, arXiv:1909.08593; ratio: measured KL over target, at most 1"
    )
    kl_target: float = option(
        6.0, "KL divergence in nats a response that an adaptive coefficient aims at", minimum=1e-6, maximum=1e6
    )
    kl_horizon: float = option(
        10000.0, "samples over which the horizon controller corrects an error", minimum=1, maximum=1e9
    )


class KLController:
    """Holds the coefficient, which `update` adapts to a measured divergence: `functional.next_kl_coefficient`."""

    def __init__(self, options: KLControlOptions) -> None:
        self._options = options
        self.coefficient = options.kl_reward_coef

    def update(self, kl: float, num_samples: int) -> None:
        """Adapt to a mean divergence `kl` in nats, measured on `num_samples` responses. Off stays off."""
        options = self._options
        if options.kl_reward_coef == 0:
            return
        self.coefficient = F.next_kl_coefficient(
            self.coefficient,
            kl,
            control=options.kl_control,
            target=options.kl_target,
            horizon=options.kl_horizon,
            num_samples=num_samples,
        )

    def state(self) -> dict[str, Any]:
        """The coefficient, for a checkpoint."""
        return {"kl_coefficient": self.coefficient}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        self.coefficient = float(state["kl_coefficient"])


@dataclass(kw_only=True)
class KLPenaltyOptions(TermOptions, KLControlOptions):
    """Options of a KL penalty in the reward of every token."""

    kl_reward_kind: KLKind = option("k1", "estimator of the KL penalty in the reward")


K = TypeVar("K", bound=KLPenaltyOptions)
"""The dataclass that holds the options of a method with a KL penalty in its rewards."""


class KLPenalised(PolicyGradient[K]):
    """A method whose rewards are the score, on the last action token, less a KL penalty on every one."""

    reads_step_rewards = True

    def __init__(self, config: K | None = None) -> None:
        super().__init__(config)
        self.kl_controller = KLController(self.config)

    def needed_columns(self) -> Set[str]:
        """The reference model's log-probs only if a KL term is on."""
        return super().needed_columns() | ({"ref_logprobs"} if self.config.kl_reward_coef else set())

    def early_columns(self) -> Set[str]:
        """The penalty in the reward compares the old log-probs with the reference's before any update."""
        return frozenset({"old_logprobs"}) if self.config.kl_reward_coef else frozenset()

    def penalised_rewards(self, batch: Batch) -> Tensor:
        """`[B, T]`: what each action token earns, the penalty taken off."""
        rewards = token_rewards(batch)
        if not self.config.kl_reward_coef:
            return rewards
        kl = F.kl_estimate(batch.old_logprobs, batch.ref_logprobs, kind=self.config.kl_reward_kind)
        return rewards - self.kl_controller.coefficient * kl * batch.mask

    def after_update(self, batch: Batch, metrics: Mapping[str, Metric]) -> Metrics:
        """Adapt the coefficient of the KL penalty to the divergence of this step's responses."""
        if not self.config.kl_reward_coef or len(batch) == 0:
            return {}
        kl = F.kl_estimate(batch.old_logprobs, batch.ref_logprobs, kind="k1") * batch.mask
        measured = float(kl.sum(dim=1).mean())
        self.kl_controller.update(measured, len(batch))
        return {
            "actor/kl_reward": Metric(measured, len(batch)),
            "actor/kl_coef": Metric(self.kl_controller.coefficient, 1.0, "last"),
        }

    def state(self) -> dict[str, Any]:
        """The adaptive KL coefficient."""
        return self.kl_controller.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
        self.kl_controller.load_state(dict(state))
