"""Cutting numbers into parts of nearly equal sums: how sequences are shared out over ranks and micro-batches.

For whatever balances work by token counts. The method is the largest differencing method of Karmarkar and Karp
(1982), which needs no torch and O(n log n) steps for n numbers in few parts; what the parts are used for is left to
the caller.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence
from typing import TypeAlias

# Indices below a part, as a binary tree: joining two parts costs one step, whatever their sizes.
Tree: TypeAlias = "tuple[int] | tuple[Tree, Tree] | tuple[()]"
# The sum of a part, the index that it began with (among equal sums the later one counts as larger), and its indices.
Part: TypeAlias = tuple[int, int, Tree]


def balanced_partitions(lengths: Sequence[int], k: int, equal_size: bool = False) -> list[list[int]]:
    """Split indices of `lengths` into `k` parts whose sums are as equal as the differencing method makes them.

    Returns exactly `k` lists of ascending indices, each index once, largest sum first; with fewer numbers than parts,
    some are empty. equal_size: parts also have the same number of indices, or differ by one if `k` does not divide
    it. The result depends on `lengths` and `k` alone. Raises ValueError for `k` below 1 or a negative length.
    """
    if k < 1 or any(length < 0 for length in lengths):
        raise ValueError(f"numbers of 0 and more are split into 1 part and more, not {k}")
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    if equal_size:
        # Stand-ins of length 0 fill the first tuple up; each part gets one of every tuple.
        padded = [None] * (-len(order) % k) + order
        tuples = [padded[start : start + k] for start in range(0, len(padded), k)]
    else:
        tuples = [[i] for i in order]
    # A state is the parts of a partial solution that are not empty, ascending. The widest spread is joined
    # first, and among equal ones that with the largest part.
    heap: list[tuple[int, int, int, list[Part]]] = []
    for number, indices in enumerate(tuples):
        parts: list[Part] = sorted((0, -1, ()) if i is None else (lengths[i], i, (i,)) for i in indices)
        heap.append((-_spread(parts, k), -parts[-1][0], number, parts))
    heapq.heapify(heap)
    for number in range(len(heap), 2 * len(heap) - 1):
        parts = _join(heapq.heappop(heap)[3], heapq.heappop(heap)[3], k)
        heapq.heappush(heap, (-_spread(parts, k), -parts[-1][0], number, parts))
    found = [sorted(_flatten(tree)) for _, _, tree in reversed(heap[0][3])] if heap else []
    return found + [[] for _ in range(k - len(found))]


def _spread(parts: Sequence[Part], k: int) -> int:
    return parts[-1][0] - (parts[0][0] if len(parts) == k else 0)


def _join(one: list[Part], other: list[Part], k: int) -> list[Part]:
    """Add two partial solutions, largest part to smallest; only the parts that the shorter one touches are moved."""
    wide, narrow = (one, other) if len(one) >= len(other) else (other, one)
    num_empty = min(k - len(wide), len(narrow))
    grown = wide[: len(narrow) - num_empty]
    rest = wide[len(grown) :]
    # Ascending `narrow`, its largest last: that one goes to the emptiest place.
    additions = narrow[::-1]
    for part in additions[:num_empty]:
        insort(rest, part)
    for part, addition in zip(grown, additions[num_empty:], strict=True):
        lead = part[1] if wide is one else addition[1]
        insort(rest, (part[0] + addition[0], lead, (part[2], addition[2])))
    return rest


def _flatten(tree: Tree) -> list[int]:
    indices: list[int] = []
    pending: list[Tree | int] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, int):
            indices.append(node)
        else:
            pending.extend(node)
    return indices
