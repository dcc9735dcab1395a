"""Length balance: metrics of how evenly a batch's tokens would be shared out over workers.

For runs on several workers, where the slowest one sets the pace. The numbers and their names are those of verl: tokens
of prompt and response, summed over each part, first with the trajectories cut in the order in which they came, then
as the largest differencing method balances them. Nothing is moved: sharing out is left to the core.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollstock import Extension, Metric, Metrics, balanced_partitions, hookimpl, option

if TYPE_CHECKING:
    from rollstock import Batch, Run


@dataclass(kw_only=True)
class LengthBalanceConfig:
    """Options of the `length_balance` extension."""

    partitions: int | None = option(
        None,
        "parts to share a batch out to; none: as many as the actor has workers, and at least 2",
        minimum=2,
        maximum=1_000_000,
    )
    equal_counts: bool = option(False, "balance with equally many trajectories in each part, or one more or less")


class LengthBalance(Extension[LengthBalanceConfig]):
    """Measures each step's batch before it is trained on. Fewer trajectories than parts leave parts with 0 tokens."""

    @hookimpl(wrapper=True)
    def rollstock_prepare(self, run: Run, batch: Batch) -> Generator[None, bool | None, bool | None]:
        """Record the balance of what is about to be shared out."""
        parts = self.config.partitions or max(2, run.config.role("actor").count)
        run.record(balance_metrics(batch.total_lengths(), parts, equal_counts=self.config.equal_counts))
        return (yield)


def balance_metrics(lengths: Sequence[int], parts: int, *, equal_counts: bool = False) -> Metrics:
    """The metrics `global_seqlen/...` of sequences of these lengths, in tokens a part.

    `min`, `max`, `minmax_diff`: parts of consecutive sequences, equally many in each as far as can be; `balanced_min`,
    `balanced_max`: balanced parts; `mean`: what each would have if tokens could be shared out freely.
    """
    size = len(lengths)
    in_order = [sum(lengths[k * size // parts : (k + 1) * size // parts]) for k in range(parts)]
    balanced = [sum(lengths[i] for i in part) for part in balanced_partitions(lengths, parts, equal_counts)]
    return {
        "global_seqlen/min": Metric(min(in_order), 1.0, "min"),
        "global_seqlen/max": Metric(max(in_order), 1.0, "max"),
        "global_seqlen/minmax_diff": Metric(max(in_order) - min(in_order), 1.0, "max"),
        "global_seqlen/mean": Metric(sum(lengths) / parts),
        "global_seqlen/balanced_min": Metric(min(balanced), 1.0, "min"),
        "global_seqlen/balanced_max": Metric(max(balanced), 1.0, "max"),
    }


@hookimpl
def rollstock_extension() -> type[Extension[Any]]:
    """The class of this plugin."""
    return LengthBalance
