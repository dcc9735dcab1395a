"""DAPO, arXiv:2503.14476, equations 8 to 13: GRPO with decoupled clips, dynamic sampling and a mean over tokens.

The upper clip is wider than the lower one, so that unlikely tokens can grow; the loss is a mean over all tokens, so
that long responses count by their length; groups whose rewards are all equal teach nothing and are replaced by new
prompts until the step has its `train.prompts_per_step`, or `refill_rounds` more rounds were played. With
`overlong_buffer`, a penalty that grows over the last tokens before the limit is taken off the rewards before they are
normalised; which groups are kept is decided by the rewards without it. Assumes that some prompts are neither always
nor never solved: if all groups are uniform, a step trains on nothing, and ten of those in a row end the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollstock import Batch, ConfigError, Loss, Metric, Metrics, MicroBatch, Run, RunConfig, hookimpl, option
from rollstock.algorithms import functional as F
from rollstock.algorithms.group_relative import GroupOptions, GroupRelative, has_spread
from rollstock.algorithms.policy_loss import ClipOptions, clipped_loss


@dataclass(kw_only=True)
class DAPOConfig(ClipOptions, GroupOptions):
    """Options of DAPO."""

    clip_high: float | None = option(0.28, "upper clip range; null: the same as the lower one", minimum=0, maximum=1e6)
    dynamic_sampling: bool = option(True, "drop groups whose rewards are all equal, and sample new prompts for them")
    refill_rounds: int = option(
        8,
        "how often a step may generate again to replace dropped groups; 0: it trains on those that are left",
        minimum=0,
        maximum=1_000,
    )
    overlong_buffer: int = option(
        0,
        "tokens before the limit over which a penalty grows; the paper's is a fifth of the limit; 0 is off",
        minimum=0,
        maximum=10_000_000,
    )
    overlong_limit: int | None = option(
        None, "response tokens with the full penalty; none: sampling.max_new_tokens", minimum=1, maximum=10_000_000
    )
    overlong_scale: float = option(1.0, "the full penalty, in units of reward", minimum=0, maximum=1e9)


class DAPO(GroupRelative[DAPOConfig]):
    """GRPO's advantages, with groups that teach something, a wider upper clip, and a soft length limit."""

    def __init__(self, config: DAPOConfig | None = None) -> None:
        super().__init__(config)
        self.refill_rounds = self.config.refill_rounds if self.config.dynamic_sampling else 0
        self._limit = self.config.overlong_limit

    def validate(self, config: RunConfig) -> Sequence[str]:
        """Besides greedy sampling: a buffer that punishes every length, and two penalties for one thing."""
        problems = list(super().validate(config))
        if not self.config.overlong_buffer:
            return problems
        limit = self.config.overlong_limit or config.sampling.max_new_tokens
        if self.config.overlong_buffer > limit:
            problems.append(
                f"algorithm.overlong_buffer: {self.config.overlong_buffer} is more than the limit of {limit} response "
                "tokens, so that even empty responses would be punished: lower it"
            )
        if any(section["name"] == "overlong_penalty" and section.get("scale", 1) for section in config.extensions):
            problems.append(
                "algorithm.overlong_buffer: the extension overlong_penalty punishes long responses as well: keep one"
            )
        return problems

    @hookimpl
    def rollstock_run_start(self, run: Run) -> None:
        """Learn the run's length limit."""
        self._limit = self.config.overlong_limit or run.sampling.max_new_tokens

    def select(self, batch: Batch) -> Sequence[int] | None:
        """Only groups whose rewards are not all equal, if dynamic sampling is on."""
        if not self.config.dynamic_sampling:
            return None
        return torch.nonzero(has_spread(batch.scores, batch.groups)).flatten().tolist()

    def rewards(self, batch: Batch) -> Tensor:
        """`[B]`: the scores, less the penalty for length."""
        return batch.scores - self.penalty(batch)

    def penalty(self, batch: Batch) -> Tensor:
        """`[B]`: what each response loses for the tokens that the policy chose; 0 without a buffer. Raises ConfigError
        before a run has told its limit, if no option does."""
        if not self.config.overlong_buffer:
            return torch.zeros_like(batch.scores)
        if self._limit is None:
            raise ConfigError("overlong_buffer needs a limit: set overlong_limit, or start a run, which has one")
        found = F.overlong_penalty(batch.mask.sum(dim=1), limit=self._limit, buffer=self.config.overlong_buffer)
        return self.config.overlong_scale * found

    def loss(self, micro: MicroBatch) -> Loss:
        """The clipped surrogate, with the optional KL and entropy terms."""
        return clipped_loss(micro, self.config)

    def after_update(self, batch: Batch, metrics: Mapping[str, Metric]) -> Metrics:
        """How much was punished, and how often."""
        if not self.config.overlong_buffer or not len(batch):
            return {}
        penalty = self.penalty(batch)
        return {
            "reward/overlong_penalty": Metric(float(penalty.mean()), len(batch)),
            "reward/overlong_ratio": Metric(int((penalty > 0).sum()) / len(batch), len(batch)),
        }


@hookimpl
def rollstock_algorithm() -> type[DAPO]:
    """Give `DAPO`."""
    return DAPO
