"""Micro-batches that turn out to be too large for the memory, done in halves.

For the torch backend. What a scheduler plans with is an estimate. An allocation that fails all the same costs the time
of one micro-batch and changes nothing of the result: losses are sums over the counts of the whole mini-batch, however
it is cut.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from rollstock import Batch, Device, RunError

logger = logging.getLogger(__name__)

Work = Callable[[Sequence[int], Batch], None]
"""What is to be done for the trajectories at these indices, which are also given as a batch of their own."""


class Room:
    """What the memory has been seen to hold. A size that failed once is not tried again."""

    def __init__(self, device: Device[Any]) -> None:
        self._device = device
        self._most: int | None = None  # tokens of a micro-batch
        self._failures = 0

    def take_failures(self) -> int:
        """How many allocations have failed since this was last asked."""
        failures, self._failures = self._failures, 0
        return failures

    def each(
        self,
        batch: Batch,
        micro_batches: Sequence[Sequence[int]],
        work: Work,
        *,
        begin: Callable[[], None],
        is_intact: Callable[[], bool],
    ) -> None:
        """Do the work of every micro-batch, in their order; one that does not fit is cut into two.

        begin: makes everything as it was before the first of them; called at the start. is_intact: whether a work that
        failed has left behind what those before it had done; otherwise they are done again. Raises RunError for a
        sequence (or a group that must stay whole) that does not fit alone, and whatever else the work raises.
        """
        lengths = batch.total_lengths()
        begin()
        done: list[Sequence[int]] = []
        left = self._cut(batch, lengths, micro_batches)
        while left:
            reason = self._try(work, left[0], batch)
            if reason is None:
                done.append(left.pop(0))
                continue
            self._device.release_memory()
            self._failures += 1
            tokens = sum(lengths[i] for i in left[0])
            logger.warning("a micro-batch of %d tokens does not fit into memory: halving it (%s)", tokens, reason)
            self._most = tokens - 1
            halves = _halves(batch, lengths, left[0])
            if halves is None:
                raise RunError(_too_large(batch, left[0], tokens, reason))
            if is_intact():
                left = [*halves, *self._cut(batch, lengths, left[1:])]
            else:
                begin()
                left, done = [*done, *halves, *self._cut(batch, lengths, left[1:])], []

    def _try(self, work: Work, indices: Sequence[int], batch: Batch) -> str | None:
        """Why there is not memory enough, or None. Only the text of the error is kept: its traceback holds tensors."""
        try:
            work(indices, batch.select(indices))
        except Exception as error:
            if not self._device.is_out_of_memory(error):
                raise
            return " ".join(str(error).split()) or type(error).__name__
        return None

    def _cut(self, batch: Batch, lengths: Sequence[int], micro_batches: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """The micro-batches, those halved of which it is known that they do not fit."""
        cut: list[Sequence[int]] = []
        waiting = list(micro_batches)
        while waiting:
            indices = waiting.pop(0)
            too_large = self._most is not None and sum(lengths[i] for i in indices) > self._most
            halves = _halves(batch, lengths, indices) if too_large else None
            if halves is None:
                cut.append(indices)
            else:
                waiting[:0] = halves
        return cut


def _halves(batch: Batch, lengths: Sequence[int], indices: Sequence[int]) -> tuple[Sequence[int], Sequence[int]] | None:
    """Two parts with about half of the tokens each, in order; None for what cannot be cut."""
    units = [[i] for i in indices]
    if batch.whole_groups:
        groups = batch.groups.tolist()
        members: dict[int, list[int]] = {}
        for i in indices:
            members.setdefault(groups[i], []).append(i)
        units = list(members.values())
    if len(units) < 2:
        return None
    costs = [sum(lengths[i] for i in unit) for unit in units]
    first, place = costs[0], 1
    while place < len(units) - 1 and 2 * (first + costs[place]) <= sum(costs):
        first, place = first + costs[place], place + 1
    return [i for unit in units[:place] for i in unit], [i for unit in units[place:] for i in unit]


def _too_large(batch: Batch, indices: Sequence[int], tokens: int, reason: str) -> str:
    what = (
        f"a sequence of {tokens} tokens"
        if len(indices) == 1
        else f"a group of {len(indices)} sequences, {tokens} tokens"
    )
    task = f" (task {batch.task_ids[indices[0]]!r})" if batch.task_ids[indices[0]] else ""
    return (
        f"{what}{task} does not fit into memory by itself: {reason}. Ways out: backend.activation_checkpointing=true, "
        "a smaller backend.logits_memory_mib, shorter sequences (sampling.max_new_tokens, sampling.max_prompt_tokens)"
    )
