"""KL in the reward: a penalty on divergence from the reference model, for any algorithm.

For methods without a KL option of their own: learning from human feedback as in arXiv:1909.08593, equation 2. Every
token is charged the coefficient times its divergence, estimated from the log-probs of before the update. An algorithm
that reads rewards of single tokens is charged token by token; for one that knows only scores, the sum is taken off the
score while advantages are computed. The score in the run's files stays what the rewards said.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rollstock import Algorithm, Extension, Metric, RunConfig, hookimpl, option
from rollstock.algorithms import functional as F
from rollstock.algorithms.functional import KLControl, KLKind

if TYPE_CHECKING:
    from rollstock import Batch, Run


@dataclass(kw_only=True)
class KLInRewardConfig:
    """Options of the `kl_in_reward` extension. `target` and `horizon` matter where the coefficient adapts."""

    coef: float = option(0.001, "weight of the penalty (its start, if it adapts)", minimum=0, maximum=1_000)
    kind: KLKind = option("k1", "estimator of the divergence; in a reward, k1 is right")
    control: KLControl = option(
        "fixed", "fixed; horizon: proportional, arXiv:1909.08593; ratio: measured KL over target, at most 1"
    )
    target: float = option(
        6.0, "KL divergence in nats a response that an adaptive coefficient aims at", minimum=1e-6, maximum=1e6
    )
    horizon: float = option(
        10000.0, "samples over which the horizon controller corrects an error", minimum=1, maximum=1e9
    )

    def __post_init__(self) -> None:
        if self.coef == 0:
            raise ValueError("`coef` 0 takes nothing off any reward: give it a weight, or leave the extension out")


class KLInReward(Extension[KLInRewardConfig]):
    """Wraps the advantages stage. Responses without tokens are charged nothing."""

    needs = frozenset({"old_logprobs", "ref_logprobs"})

    def __init__(self, config: KLInRewardConfig | None = None) -> None:
        super().__init__(config)
        self.coefficient = self.config.coef

    def validate(self, config: RunConfig, algorithm: Algorithm[Any]) -> Sequence[str]:
        """A penalty that would be taken twice, or from scores that nobody gives."""
        if algorithm.offline:
            return ["an offline algorithm has no rewards to take a penalty off: leave it out"]
        coef = getattr(algorithm.config, "kl_reward_coef", 0)
        if coef:
            return [
                f"algorithm.kl_reward_coef: {coef} makes {algorithm.plugin_name!r} take a KL penalty off the reward "
                "itself, so it would be taken twice: set that to 0, or leave this extension out"
            ]
        return ()

    @hookimpl(wrapper=True)
    def rollstock_advantages(self, run: Run, batch: Batch) -> Generator[None, bool | None, bool | None]:
        """Charge the penalty for as long as the stage lasts, then adapt its coefficient to what was measured."""
        estimate = F.kl_estimate(batch.old_logprobs, batch.ref_logprobs, kind=self.config.kind)
        penalty = torch.where(batch.mask, self.coefficient * estimate, 0.0)
        by_token = run.algorithm.reads_step_rewards
        column = "step_rewards" if by_token else "scores"
        before = batch[column] if column in batch else torch.zeros_like(penalty)
        batch[column] = before - (penalty if by_token else penalty.sum(dim=1))
        done = yield
        batch[column] = before
        self._adapt(run, batch)
        return done

    def _adapt(self, run: Run, batch: Batch) -> None:
        divergence = F.kl_estimate(batch.old_logprobs, batch.ref_logprobs, kind="k1")
        measured = float(torch.where(batch.mask, divergence, 0.0).sum(dim=1).mean())
        self.coefficient = F.next_kl_coefficient(
            self.coefficient,
            measured,
            control=self.config.control,
            target=self.config.target,
            horizon=self.config.horizon,
            num_samples=len(batch),
        )
        run.record(
            {
                "actor/kl_reward": Metric(measured, len(batch)),
                "actor/kl_coef": Metric(self.coefficient, 1.0, "last"),
            }
        )

    def state(self) -> dict[str, Any]:
        """The coefficient."""
        return {"coefficient": self.coefficient}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
        self.coefficient = float(state.get("coefficient", self.config.coef))


@hookimpl
def rollstock_extension() -> type[Extension[Any]]:
    """The class of this plugin."""
    return KLInReward
