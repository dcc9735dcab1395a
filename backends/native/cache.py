"""Keys and values of one attention layer while a batch is being generated.

Two stores. The prefix holds each distinct prompt once, however many samples it has: `[G, Hkv, P, D]`, short prompts
padded on the right. The tail holds what each row has generated: `[B, Hkv, T, D]`; rows start together, so that it has
no holes and needs no mask. For `attention`, which reads and writes it.
"""

from __future__ import annotations

from torch import Tensor

_FIRST_TAIL = 64  # tokens that the tail has room for at first; it doubles from there, up to the longest response


class LayerCache:
    """The two stores of one layer. `used` is how many tokens every row's tail holds."""

    def __init__(self) -> None:
        self.prefix_keys: Tensor | None = None
        self.prefix_values: Tensor | None = None
        self.tail_keys: Tensor | None = None
        self.tail_values: Tensor | None = None
        self.used = 0

    def store_prefix(self, first: int, groups: int, width: int, keys: Tensor, values: Tensor) -> None:
        """Write the prompts from `first` on, of `groups` in all: `[g, Hkv, p, D]`, p at most `width`, the store's P."""
        if self.prefix_keys is None or self.prefix_values is None:
            self.prefix_keys = keys.new_zeros((groups, keys.shape[1], width, keys.shape[3]))
            self.prefix_values = values.new_zeros((groups, values.shape[1], width, values.shape[3]))
        self.prefix_keys[first : first + len(keys), :, : keys.shape[2]] = keys
        self.prefix_values[first : first + len(values), :, : values.shape[2]] = values

    def prefix(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the prompts, `[G, Hkv, P, D]`."""
        assert self.prefix_keys is not None
        assert self.prefix_values is not None
        return self.prefix_keys, self.prefix_values

    def append(self, keys: Tensor, values: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        """Add one token to every row, `[B, Hkv, D]`; returns the whole tails, `[B, Hkv, t, D]`, views of the store."""
        if self.tail_keys is None or self.tail_values is None or self.used == self.tail_keys.shape[2]:
            self.tail_keys = self._grown(self.tail_keys, keys, limit)
            self.tail_values = self._grown(self.tail_values, values, limit)
        rows = len(keys)
        self.tail_keys[:rows, :, self.used] = keys
        self.tail_values[:rows, :, self.used] = values
        self.used += 1
        return self.tail_keys[:rows, :, : self.used], self.tail_values[:rows, :, : self.used]

    def tail(self, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values of what one row has generated, `[Hkv, t, D]`."""
        if self.tail_keys is None or self.tail_values is None:
            keys, values = self.prefix()
            return keys[0, :, :0], values[0, :, :0]
        return self.tail_keys[row, :, : self.used], self.tail_values[row, :, : self.used]

    def _grown(self, store: Tensor | None, like: Tensor, limit: int) -> Tensor:
        """A store with room for more tokens, in which the first rows are those of `store`."""
        room = min(limit, max(_FIRST_TAIL, 2 * self.used))
        grown = like.new_empty((len(like), like.shape[1], room, like.shape[2]))
        if store is not None:
            grown[:, :, : self.used] = store[: len(like), :, : self.used]
        return grown

    def move_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the tails of the rows `sources` over those of `targets`."""
        if self.tail_keys is not None and self.tail_values is not None:
            self.tail_keys[targets, :, : self.used] = self.tail_keys[sources, :, : self.used]
            self.tail_values[targets, :, : self.used] = self.tail_values[sources, :, : self.used]

    def bytes_per_token(self) -> int:
        """What one token of one row takes in this layer."""
        return sum(store.shape[1] * store.shape[3] * store.element_size() for store in self.prefix())
