"""Batch sizes by what fits: micro-batches by a token budget, generation batches by lengths and memory.

For every run, as the default scheduler. Sequences are never split and never dropped: one that is longer than the
budget is a micro-batch of its own. How many workers there are, and where experts live, is left to other schedulers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from rollstock import Scheduler, balanced_partitions, hookimpl, option

if TYPE_CHECKING:
    from rollstock import Memory


@dataclass(kw_only=True)
class DynamicBatchConfig:
    """Options of the `dynamic_batch` scheduler."""

    tokens_per_micro_batch: int = option(
        16_384, "tokens, prompts included, that one micro-batch may hold", minimum=1, maximum=1_000_000_000
    )
    keep_groups: bool = option(True, "put the samples of one prompt into one micro-batch, where they fit")
    equal_size: bool = option(False, "give micro-batches equally many sequences, not only nearly as many tokens")
    min_generation_batch: int = option(16, "sequences generated at once, at least", minimum=1, maximum=1_000_000)
    max_generation_batch: int = option(256, "sequences generated at once, at most", minimum=1, maximum=1_000_000)
    memory_share: float = option(
        0.3, "share of the device's memory that caches of generation may take", minimum=0, maximum=1
    )

    def __post_init__(self) -> None:
        if self.min_generation_batch > self.max_generation_batch:
            raise ValueError(
                f"min_generation_batch ({self.min_generation_batch}) is above max_generation_batch "
                f"({self.max_generation_batch})"
            )


class DynamicBatch(Scheduler[DynamicBatchConfig]):
    """As few micro-batches as the budget allows, of nearly equal token counts (Karmarkar-Karp)."""

    def micro_batches(
        self, lengths: Sequence[int], *, groups: Sequence[int] | None = None, num_parts: int = 1
    ) -> list[list[int]]:
        """Lists of ascending indices, the heaviest lists first, each within the budget unless it is a single sequence.

        A rank may get an empty list where there are fewer sequences than ranks.
        """
        budget = self.config.tokens_per_micro_batch
        if self.config.equal_size:
            units = [[i] for i in range(len(lengths))]
        else:
            units = _units(lengths, groups if self.config.keep_groups else None, budget)
        costs = [sum(lengths[i] for i in unit) for unit in units]
        parts = _within(costs, budget, multiple=num_parts, equal_size=self.config.equal_size)
        return _deal([sorted(i for u in part for i in units[u]) for part in parts], num_parts)

    def generation_batch_size(
        self, prompt_lengths: Sequence[int], max_new_tokens: int, *, bytes_per_token: int, memory: Memory
    ) -> int:
        """A power of two times the smallest size, between the two bounds, so that the longest sequences fit together.

        The share is of the device's whole memory, and the free part counts only where it is less: two runs on one
        machine should cut their batches alike. The smallest size is used even if it does not seem to fit.
        """
        room = min(self.config.memory_share * memory.total, 0.9 * memory.free)
        longest = sorted((length + max_new_tokens for length in prompt_lengths), reverse=True)
        cache = accumulate(context * bytes_per_token for context in longest)
        num_fitting = sum(needed <= room for needed in cache)
        if num_fitting == len(longest):
            return self.config.max_generation_batch
        size = self.config.min_generation_batch
        while 2 * size <= min(num_fitting, self.config.max_generation_batch):
            size *= 2
        return size


def _units(lengths: Sequence[int], groups: Sequence[int] | None, budget: int) -> list[list[int]]:
    """What stays together: whole groups, or near-equal pieces of those that are over the budget."""
    if groups is None:
        return [[i] for i in range(len(lengths))]
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    units = []
    for indices in members.values():
        costs = [lengths[i] for i in indices]
        units += [[indices[j] for j in piece] for piece in _within(costs, budget) if piece]
    return units


def _within(costs: Sequence[int], budget: int, multiple: int = 1, equal_size: bool = False) -> list[list[int]]:
    """Few balanced parts (a multiple of `multiple`), each within the budget unless it is a single one."""
    counts = _counts(costs, budget, multiple)
    for count in counts:
        parts = balanced_partitions(costs, count, equal_size=equal_size)
        if all(len(part) <= 1 or sum(costs[i] for i in part) <= budget for part in parts):
            return parts
    raise AssertionError(f"{counts[-1]} parts for {len(costs)} are one for each")


def _counts(costs: Sequence[int], budget: int, multiple: int) -> list[int]:
    """How many parts to try, ascending multiples of `multiple`: from what the sum asks for to one for each."""
    num_alone = sum(cost >= budget for cost in costs)
    fewest = max(1, num_alone - (-sum(cost for cost in costs if cost < budget) // budget))
    most = max(fewest, _num_bins(costs, budget))
    # Best-fit packing needs `most`; balanced parts, which do not aim at the budget, may need more.
    tried = {fewest, fewest + 1, (fewest + most) // 2, most, most + most // 4 + 1, 2 * most, max(len(costs), 1)}
    return sorted({-(-count // multiple) * multiple for count in tried})


def _num_bins(costs: Sequence[int], budget: int) -> int:
    """How many bins of `budget` best-fit packing fills, the largest first; what is larger has a bin of its own."""
    room: list[int] = []
    num_full = 0
    for cost in sorted(costs, reverse=True):
        place = bisect_left(room, cost)
        left = room.pop(place) - cost if place < len(room) else budget - cost
        if left > 0:
            insort(room, left)
        else:
            num_full += 1
    return num_full + len(room)


def _deal(batches: list[list[int]], num_parts: int) -> list[list[int]]:
    """Order micro-batches, heaviest first, so that each round is even over the ranks and no rank always gets the
    heavier."""
    rounds = [batches[start : start + num_parts] for start in range(0, len(batches), num_parts)]
    return [batch for number, round_ in enumerate(rounds) for batch in (round_ if number % 2 == 0 else round_[::-1])]


@hookimpl
def rollstock_scheduler() -> type[Scheduler[Any]]:
    """The class of this plugin."""
    return DynamicBatch
