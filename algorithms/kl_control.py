"""How strongly a policy is held near its reference: the coefficient of the KL penalty, and how it adapts.

For algorithms that penalise divergence. The coefficient is state, so it goes into checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rollstock import option

Controller = Literal["fixed", "horizon", "ratio"]
MAX_RATIO_COEFFICIENT = 1.0


@dataclass(kw_only=True)
class KLControlOptions:
    """Options of a KL coefficient. `kl_target` and `kl_horizon` matter where it adapts."""

    kl_reward_coef: float = option(
        0.0, "weight of the KL penalty in the reward (its start, if it adapts); 0 is off", minimum=0
    )
    kl_control: Controller = option(
        "fixed", "fixed; horizon: proportional, arXiv:1909.08593; ratio: measured KL over target, at most 1"
    )
    kl_target: float = option(
        6.0, "KL divergence in nats a response that an adaptive coefficient aims at", minimum=1e-6
    )
    kl_horizon: float = option(10000.0, "samples over which the horizon controller corrects an error", minimum=1)


class KLController:
    """Holds the coefficient; `update` adapts it to a measured divergence.

    horizon (arXiv:1909.08593, section 2.2): the coefficient grows by the relative error, clipped to 20%, times samples
    over horizon. ratio: it is the measured divergence over the target, from 0 to 1.
    """

    def __init__(self, options: KLControlOptions) -> None:
        self._options = options
        self.coefficient = options.kl_reward_coef

    def update(self, kl: float, num_samples: int) -> None:
        """Adapt to a mean divergence `kl` in nats, measured on `num_samples` responses. A coefficient of 0 stays 0."""
        if self._options.kl_control == "fixed" or self._options.kl_reward_coef == 0:
            return
        if self._options.kl_control == "ratio":
            self.coefficient = min(max(kl / self._options.kl_target, 0.0), MAX_RATIO_COEFFICIENT)
            return
        error = min(max(kl / self._options.kl_target - 1, -0.2), 0.2)
        self.coefficient *= 1 + error * num_samples / self._options.kl_horizon

    def state(self) -> dict[str, Any]:
        """The coefficient, for a checkpoint."""
        return {"kl_coefficient": self.coefficient}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        self.coefficient = float(state["kl_coefficient"])
