"""Sequences that begin alike, as a tree: which of their tokens are one and the same computation.

For whoever lays sequences out for a causal model, in training and in generation. What such a model computes at a token
depends on the tokens up to it alone, so that those which several sequences begin with are computed once for all: the
prompt of a group, the system message of a run, the first words of responses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def tree_nodes(sequences: Sequence[Tensor]) -> list[Tensor]:
    """For each sequence `[n]` of non-negative integers the nodes of its tokens, `[n]` int64.

    Two tokens have one node if they are equal and everything before them is. Nodes are counted from 0. Takes as long as
    sorting the sequences: in their order, each has its longest common beginning with the one before it.
    """
    arrays = [sequence.numpy() for sequence in sequences]
    found = [np.zeros(0, dtype=np.int64)] * len(arrays)
    count, before = 0, -1
    # Bytes with the highest one first are ordered as the numbers are, and compared without a loop over them.
    for i in sorted(range(len(arrays)), key=lambda i: arrays[i].astype(">i8").tobytes()):
        common = 0 if before < 0 else _common(arrays[before], arrays[i])
        new = np.arange(count, count + len(arrays[i]) - common)
        found[i] = np.concatenate([found[before][:common], new])
        count, before = count + len(new), i
    return [torch.from_numpy(nodes) for nodes in found]


def first_places(nodes: Tensor) -> tuple[Tensor, Tensor]:
    """`(first [m], index [n])` for the nodes `[n]` of tokens, of m kinds: where each kind stands first, in the order of
    these places, and which kind each token is, so that `nodes[first][index]` is `nodes`."""
    kinds, index = torch.unique(nodes, return_inverse=True)
    earliest = torch.full((len(kinds),), len(nodes))
    earliest.scatter_reduce_(0, index, torch.arange(len(nodes)), "amin")
    first, order = earliest.sort()
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    return first, rank[index]


def _common(one: np.ndarray, two: np.ndarray) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(two))
    differ = one[:length] != two[:length]
    return int(differ.argmax()) if bool(differ.any()) else length
