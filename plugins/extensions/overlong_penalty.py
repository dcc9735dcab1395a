"""Overlong penalty: a soft punishment of responses near the length limit, and no loss of truncated ones.

For runs whose policy fills its token limit: soft overlong punishment of DAPO, arXiv:2503.14476, equation 13, taken
off the score after all rewards have spoken. It replaces the cliff of a truncated, hence wrong, answer by a slope that
begins before it. `filter` is the same paper's overlong filtering: responses that the limit cut off stay in their
group's baseline and have no loss, since nobody knows what they would have come to.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollstock import Algorithm, Extension, Metric, Metrics, RunConfig, hookimpl, option
from rollstock.plugins.extensions._mask import training_on

if TYPE_CHECKING:
    from torch import Tensor

    from rollstock import Batch, Run


@dataclass(kw_only=True)
class OverlongPenaltyConfig:
    """Options of the `overlong_penalty` extension."""

    limit: int | None = option(
        None, "response tokens with the full penalty; none: sampling.max_new_tokens", minimum=1, maximum=10_000_000
    )
    buffer: int = option(16, "tokens before the limit over which the penalty grows", minimum=1, maximum=10_000_000)
    scale: float = option(1.0, "the full penalty, in units of reward", minimum=0, maximum=1e9)
    filter: bool = option(False, "leave responses that the token limit cut off out of all losses")


class OverlongPenalty(Extension[OverlongPenaltyConfig]):
    """Wraps the score stage, and the update for `filter`. A response that nobody scored stays as it is.

    Length is that of the whole response, the other side's turns included, as the token limit counts it.
    """

    def validate(self, config: RunConfig, algorithm: Algorithm[Any]) -> Sequence[str]:
        """A buffer that would punish responses of every length, a penalty of nothing, or scores that nobody gives."""
        if algorithm.offline:
            return ["nobody scores under an offline algorithm: leave it out"]
        if self.config.scale == 0:
            nothing = "`scale` 0 takes nothing off any score: give it a size, or leave the extension out"
            return [] if self.config.filter else [nothing]
        limit = config.sampling.max_new_tokens if self.config.limit is None else self.config.limit
        if self.config.buffer > limit:
            return [
                f"buffer ({self.config.buffer}) is longer than the limit of {limit} response tokens, so that even "
                "empty responses would be punished; make it smaller"
            ]
        return ()

    @hookimpl(wrapper=True)
    def rollstock_score(self, run: Run, batch: Batch) -> Generator[None, bool | None, bool | None]:
        """Take the penalty off `scores`; records its mean, and how often there was one."""
        done = yield
        penalty = self.penalty(batch.lengths, self._limit(run)) * batch.scored
        batch["scores"] = batch.scores - penalty
        if num_scored := int(batch.scored.sum()):
            run.record(
                {
                    "reward/overlong_penalty": Metric(float(penalty.sum()) / num_scored, num_scored),
                    "reward/overlong_ratio": Metric(int((penalty > 0).sum()) / num_scored, num_scored),
                }
            )
        return done

    @hookimpl(wrapper=True)
    def rollstock_update(self, run: Run, batch: Batch) -> Generator[None, Metrics, Metrics]:
        """With `filter`, train on the responses that came to their end."""
        if not self.config.filter:
            return (yield)
        import torch  # here, so that listing plugins needs no torch

        ended = torch.tensor([reason != "length" for reason in batch.finish_reasons], dtype=torch.bool)
        run.record({"train/num_filtered": Metric(int((~ended).sum()), 1.0, "sum")})
        with training_on(batch, ended[batch.rows()]):
            return (yield)

    def penalty(self, lengths: Tensor, limit: int) -> Tensor:
        """[B] float32, at least 0: what responses of `lengths` tokens ([B]) lose."""
        from rollstock.algorithms.functional import overlong_penalty  # here, so that listing plugins needs no torch

        return self.config.scale * overlong_penalty(lengths, limit=limit, buffer=self.config.buffer)

    def _limit(self, run: Run) -> int:
        return run.sampling.max_new_tokens if self.config.limit is None else self.config.limit


@hookimpl
def rollstock_extension() -> type[Extension[Any]]:
    """The class of this plugin."""
    return OverlongPenalty
