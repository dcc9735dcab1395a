"""Keys and values of sequences that were generated lately, for prompts that begin as these do.

For the decoders that share prompts. A later turn of a conversation, a response that is continued, and prompts that
begin alike read only what is new. States belong to the weights that made them: whoever loads others clears them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """The first `length` of the consecutive tokens whose keys and values these are, `[layers, 2, Hkv, n, D]`."""

    states: Tensor
    length: int


@dataclass(frozen=True)
class Prefix:
    """The beginning of a sequence: `length` tokens, whose keys and values the pieces hold one after the other."""

    length: int
    pieces: tuple[Piece, ...]

    def cut(self, length: int) -> Prefix:
        """Its first tokens alone."""
        kept: list[Piece] = []
        left = length
        for piece in self.pieces:
            if left > 0:
                kept.append(Piece(piece.states, min(piece.length, left)))
                left -= piece.length
        return Prefix(length, tuple(kept))

    def joined(self) -> Tensor:
        """`[layers, 2, Hkv, length, D]`."""
        return torch.cat([piece.states[..., : piece.length, :] for piece in self.pieces], dim=3)


class PrefixCache:
    """The states of the sequences that were added or found last: at most so many, in at most so many bytes.

    Pieces that several sequences share, as the samples of a prompt do, are there once.
    """

    def __init__(self, most_states: int, most_bytes: int) -> None:
        self.most_states = most_states
        self.most_bytes = most_bytes
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._sorted: list[tuple[int, ...]] = []  # neighbours in this order have the longest beginnings in common
        self._states: dict[tuple[int, ...], Prefix] = {}  # the least recent first
        self._users: dict[int, int] = {}  # of each piece's tensor, by its id, the states that have it
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._states)

    def find(self, prompt: Sequence[int]) -> Prefix | None:
        """The longest beginning of `prompt` that is known; never all of it, because its last token is asked for what
        comes next."""
        wanted = tuple(prompt)
        place = bisect_left(self._sorted, wanted)
        near = self._sorted[max(0, place - 1) : place + 1]
        common, tokens = max(((_common(wanted, tokens), tokens) for tokens in near), default=(0, ()))
        length = min(common, len(wanted) - 1)
        if length <= 0:
            return None
        found = self._states.pop(tokens)
        self._states[tokens] = found  # the most recent now
        return found.cut(length)

    def add(self, tokens: Sequence[int], pieces: Sequence[Piece]) -> None:
        """Keep a sequence, and forget the least recent ones that there is no room for beside it."""
        key = tuple(tokens)
        self._remove(key)
        self._states[key] = Prefix(len(key), tuple(pieces))
        insort(self._sorted, key)
        for piece in pieces:
            users = self._users.get(id(piece.states), 0)
            self._users[id(piece.states)] = users + 1
            self.num_bytes += 0 if users else piece.states.nbytes
        while len(self._states) > self.most_states or (self._states and self.num_bytes > self.most_bytes):
            self._remove(next(iter(self._states)))

    def _remove(self, key: tuple[int, ...]) -> None:
        state = self._states.pop(key, None)
        if state is None:
            return
        del self._sorted[bisect_left(self._sorted, key)]
        for piece in state.pieces:
            self._users[id(piece.states)] -= 1
            if not self._users[id(piece.states)]:
                del self._users[id(piece.states)]
                self.num_bytes -= piece.states.nbytes


def _common(one: tuple[int, ...], two: tuple[int, ...]) -> int:
    """How many tokens both begin with; compared in slices, because prompts can be thousands of tokens long."""
    low, high = 0, min(len(one), len(two))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == two[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
