"""Attention over shared prompts, in place of a model's own: transformers calls it through its attention interface.

For `decoder`, which runs a model's forward inside `attending`. The forward gets one stream of tokens `[1, L]` without
padding; only here do they become rows again. In a prefill, the stream is distinct prompts end to end. In a decoding
step it is one token of every row: the samples of a prompt then read its keys and values together, as one matrix
product, and their own tails apart. Tokens with one past are one token of the stream, whether prompts or samples begin
alike: only attention has them for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from rollstock.backends.native.cache import LayerCache
from rollstock.backends.native.prefixes import Piece, Prefix
from rollstock.backends.prefix_tree import first_places

IMPLEMENTATION: Final = "rollstock_native"
"""The name under which transformers finds this attention."""

_MERGED: Final = 0.1
"""The share of a decoding step's rows that must be spared before equal ones are merged, which costs a few copies."""

_CHANGES_SCORES: Final = ("softcap", "s_aux", "position_bias", "head_mask", "indices", "block_mask")


class UnsupportedAttentionError(Exception):
    """A layer asks for something that this attention does not do; the model's own attention does."""


class SharedBatch:
    """What is being attended: the caches, and where each row's prompt is.

    lengths: tokens of each prompt, [G]; counts: rows of each prompt, [G], each at least 1; limit: the most tokens that
    a row generates. Row r belongs to the prompt `groups[r]`; rows come in the order of their prompts, until `keep`
    moves them.
    """

    def __init__(self, lengths: Sequence[int], counts: Sequence[int], limit: int, device: torch.device) -> None:
        self.lengths = torch.tensor(lengths, dtype=torch.int64)
        self.width = max(lengths)
        self.limit = limit
        self.device = device
        self.layers: dict[int, LayerCache] = {}
        self.reused = torch.zeros_like(self.lengths)  # tokens of each prompt whose keys and values are known already
        self.known: Tensor | None = None  # these, [layers, 2, G, Hkv, most of them, D]
        self.chunk = (0, 0)  # the prompts of the prefill under way: first and one behind the last
        self.generated = 0  # tokens in every tail, the one being computed included
        self.settings: dict[int, tuple[float, int | None]] = {}  # of each layer: the scale of scores, and the window
        self.windows: set[int] = set()  # of the layers with a sliding window
        # Of the stream under way, the row of each of its tokens and the token of each row; None where these are one.
        self.merged: tuple[Tensor, Tensor] | None = None
        self.num_merged = 0  # tokens that were not computed because another has the same past
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}
        self.place_rows(torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)))
        self._pasts: Tensor | None = self.groups  # of each row, what it has in common with those that are equal to it

    def merge_prompts(self, nodes: Tensor) -> None:
        """Make one token of those of a prefill's stream that have one past, given the node of each, [n] on the CPU."""
        self._merge(*first_places(nodes))

    def merge_rows(self, tokens: Tensor, *, multiple: int = 1) -> Tensor | None:
        """Make one row of those that were equal so far, and still are, in a decoding step in which row r gets
        `tokens[r]`. The first row is repeated until the step has a `multiple` of rows.

        Returns which rows are left, on the device; None: all, as they are.
        """
        first = index = torch.arange(len(tokens))
        if self._pasts is not None:
            tokens = tokens.cpu()
            places, self._pasts = first_places(self._pasts * (tokens.max() + 1) + tokens)
            if len(places) <= (1 - _MERGED) * len(tokens):
                first, index = places, self._pasts
            if len(places) == len(tokens):  # no two are equal, and so they stay
                self._pasts = None
        self._merge(first, index, multiple=multiple)
        return None if self.merged is None else self.merged[0]

    def _merge(self, first: Tensor, index: Tensor, *, multiple: int = 1) -> None:
        """Of the n tokens of a stream, keep those at the places `first`; `index` [n] is which of them each one is."""
        self.num_merged += len(index) - len(first)
        missing = -len(first) % multiple
        self.merged = None
        if missing or len(first) < len(index):
            first = torch.cat([first, first[:1].expand(missing)])
            self.merged = (first.to(self.device), index.to(self.device))

    def reuse(self, prefixes: Sequence[Prefix | None]) -> None:
        """Take the beginnings of the prompts, [G], that are known already; the prefill then reads the rest alone."""
        found = {group: prefix for group, prefix in enumerate(prefixes) if prefix is not None}
        if not found:
            return
        for group, prefix in found.items():
            self.reused[group] = prefix.length
            states = prefix.joined()
            if self.known is None:
                layers, _, kv_heads, _, size = states.shape
                width = max(other.length for other in found.values())
                self.known = states.new_zeros((layers, 2, len(prefixes), kv_heads, width, size))
            self.known[:, :, group, :, : prefix.length] = states

    def prompt_states(self, group: int) -> Piece:
        """Keys and values of what the prefill read of a prompt."""
        start, end = int(self.reused[group]), int(self.lengths[group])
        parts = [store[group, :, start:end] for index in sorted(self.layers) for store in self.layers[index].prefix()]
        return Piece(_by_layer(parts), end - start)

    def row_states(self, row: int) -> Piece:
        """Keys and values of what a row has generated; of its last token there are none yet."""
        parts = [part for index in sorted(self.layers) for part in self.layers[index].tail(row)]
        return Piece(_by_layer(parts), self.generated)

    def place_rows(self, groups: Tensor) -> None:
        """Give every row a slot in a `[G, n]` table, n being the most rows that a prompt has now."""
        self.groups = groups
        counts = torch.bincount(groups, minlength=len(self.lengths))
        self.per_group = int(counts.max())
        order = torch.argsort(groups, stable=True)
        within = torch.empty_like(groups)
        within[order] = torch.arange(len(groups)) - (torch.cumsum(counts, 0) - counts)[groups[order]]
        slots = groups * self.per_group + within
        full = len(groups) == len(self.lengths) * self.per_group and bool((slots == torch.arange(len(slots))).all())
        self.slots = None if full else slots.to(self.device)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but `rows` (on the CPU): row i is then the old `rows[i]`. Only rows that move are copied."""
        targets = (rows != torch.arange(len(rows))).nonzero()[:, 0]
        if len(targets):
            sources = rows[targets].to(self.device)
            targets = targets.to(self.device)
            for layer in self.layers.values():
                layer.move_rows(sources, targets)
        self.place_rows(self.groups[rows])
        self._pasts = None if self._pasts is None else self._pasts[rows]

    def step(self) -> Tensor:
        """Begin a decoding step; returns the position of every row's token, `[1, B]`."""
        self._masks = {key: mask for key, mask in self._masks.items() if key[1] is None}  # windows move, padding stays
        positions = self.lengths[self.groups] + self.generated
        self.generated += 1
        return positions[None].to(self.device)

    def layer(self, index: int) -> LayerCache:
        """The cache of the layer `index`."""
        return self.layers.setdefault(index, LayerCache())

    def prefix_mask(self, kv_heads: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """What to add to the scores of prompts in this step, `[G * Hkv, 1, P]`; None if every key is seen.

        Not seen is the padding behind a short prompt, and, of a sliding window, what lies too far back.
        """
        key = (kv_heads, window)
        if key not in self._masks:
            places = torch.arange(self.width)
            seen = places < self.lengths[:, None]
            if window is not None:
                seen &= places > (self.lengths + self.generated - 1)[:, None] - window
            mask = None
            if not bool(seen.all()):
                mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
                mask = mask.repeat_interleave(kv_heads, dim=0)[:, None].to(self.device)
            self._masks[key] = mask
        return self._masks[key]


_active: ContextVar[SharedBatch] = ContextVar("rollstock_native_batch")


@contextmanager
def attending(batch: SharedBatch) -> Iterator[None]:
    """Let the forward passes inside (of this thread) read and write the caches of `batch`."""
    token = _active.set(batch)
    try:
        yield
    finally:
        _active.reset(token)


def shared_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer; the arguments are those of transformers' attention functions.

    query `[1, H, L, D]`, key and value `[1, Hkv, L, D]`; returns `[1, L, H, D]`. Raises UnsupportedAttentionError for
    what it cannot do.
    """
    asked = [name for name in _CHANGES_SCORES if others.get(name) is not None]
    index = getattr(module, "layer_idx", None)
    if asked or attention_mask is not None or index is None or not others.get("is_causal", True):
        raise UnsupportedAttentionError(f"{type(module).__name__} asks for {', '.join(asked) or 'a mask of its own'}")
    batch = _active.get()
    if sliding_window is not None:
        batch.windows.add(sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # [L, H, D] each
    if batch.generated == 0:
        batch.settings[index] = (scale, sliding_window)
        output = _as_one(_prefill, batch, index, *rows, scale=scale, window=sliding_window)
    else:
        output = _as_one(_decode, batch, index, *rows, scale=scale, window=sliding_window)
    return output[None], None


def decode_rows(
    batch: SharedBatch, index: int, query: Tensor, key: Tensor, value: Tensor, *, scaled: bool = False
) -> Tensor:
    """Attention of a decoding step in the layer `index`, as the prefill was told to do it: one token of each row.

    query `[B, H, D]`, key and value `[B, Hkv, D]`; returns `[B, H, D]`; of rows that are merged, one each. scaled: the
    queries are multiplied with the scale of the scores already.
    """
    scale, window = batch.settings[index]
    return _as_one(_decode, batch, index, query, key, value, scale=1.0 if scaled else scale, window=window)


def _as_one(
    attend: Callable[..., Tensor], batch: SharedBatch, index: int, *stream: Tensor, scale: float, window: int | None
) -> Tensor:
    """`attend` for queries, keys and values of a stream, each token of which may stand for several rows."""
    if batch.merged is None:
        return attend(batch, index, *stream, scale=scale, window=window)
    first, places = batch.merged
    rows = attend(batch, index, *(part.index_select(0, places) for part in stream), scale=scale, window=window)
    return rows.index_select(0, first)


def _prefill(
    batch: SharedBatch,
    index: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Distinct prompts end to end, `[L, H, D]`: causal attention within each; keeps their keys and values."""
    cache = batch.layer(index)
    first, last = batch.chunk
    if bool(batch.reused[first:last].any()):
        return _prefill_the_rest(batch, cache, index, query, key, value, scale=scale, window=window)
    lengths = batch.lengths[first:last]
    width = int(lengths.max())
    padded = int(lengths.min()) < width
    places = None
    if padded:  # a row sees nothing behind itself, so that padding on the right needs no mask
        places = (torch.arange(width) < lengths[:, None]).flatten().nonzero()[:, 0].to(batch.device)

    def boxed(rows: Tensor) -> Tensor:  # [L, H, D] to [g, H, p, D]
        if places is not None:
            rows = rows.new_zeros((len(lengths) * width, *rows.shape[1:])).index_copy(0, places, rows)
        return rows.reshape(len(lengths), width, *rows.shape[1:]).transpose(1, 2)

    query, key, value = boxed(query), boxed(key), boxed(value)
    cache.store_prefix(first, len(batch.lengths), batch.width, key, value)
    mask = None
    if window is not None and window < width:
        mask = torch.ones(width, width, dtype=torch.bool, device=batch.device).tril().triu(1 - window)
    output = F.scaled_dot_product_attention(
        query, key, value, mask, scale=scale, is_causal=mask is None, enable_gqa=query.shape[1] != key.shape[1]
    )
    output = output.transpose(1, 2).reshape(-1, output.shape[1], output.shape[3])
    return output if places is None else output[places]


def _prefill_the_rest(
    batch: SharedBatch,
    cache: LayerCache,
    index: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """The same for prompts whose first tokens are known already: the stream is what comes after these."""
    first, last = batch.chunk
    reused = batch.reused[first:last]
    lengths = batch.lengths[first:last] - reused
    assert batch.known is not None
    cache.store_prefix(first, len(batch.lengths), batch.width, *batch.known[index, :, first:last])
    groups = torch.repeat_interleave(torch.arange(last - first), lengths)
    places = torch.arange(len(groups)) - (torch.cumsum(lengths, 0) - lengths)[groups]
    where = (groups.to(batch.device), places.to(batch.device))
    columns = (reused[groups] + places).to(batch.device)
    keys, values = (store[first:last] for store in cache.prefix())
    keys[where[0], :, columns] = key
    values[where[0], :, columns] = value
    width = int(lengths.max())
    boxed = query.new_zeros((last - first, width, *query.shape[1:]))
    boxed[where] = query
    seen = torch.arange(batch.width) <= (reused[:, None] + torch.arange(width))[..., None]  # [g, p, P]
    if window is not None:
        seen &= torch.arange(batch.width) > (reused[:, None] + torch.arange(width))[..., None] - window
    output = F.scaled_dot_product_attention(
        boxed.transpose(1, 2),
        keys,
        values,
        seen[:, None].to(batch.device),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2)[where]


def _by_layer(parts: Sequence[Tensor]) -> Tensor:
    """Keys and values of one layer after the other, [Hkv, n, D] each, as [layers, 2, Hkv, n, D]."""
    stacked = torch.stack(list(parts))
    return stacked.view(len(parts) // 2, 2, *stacked.shape[1:])


def _decode(
    batch: SharedBatch,
    index: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """One token of each row, `[B, H, D]`: scores against the prompts and the row's own tail, under one softmax."""
    cache = batch.layer(index)
    keys, values = cache.append(key, value, batch.limit)
    if window is not None and keys.shape[2] > window:
        keys, values = keys[:, :, -window:], values[:, :, -window:]
    rows, heads, size = query.shape
    kv_heads = key.shape[1]
    query = (query if scale == 1 else query * scale).reshape(rows, kv_heads, heads // kv_heads, size).contiguous()
    prefix_keys, prefix_values = cache.prefix()
    mask = batch.prefix_mask(kv_heads, window, query.dtype)
    boxed = _to_groups(batch, query)  # [G * Hkv, n * H / Hkv, D]
    box_keys = prefix_keys.flatten(0, 1).transpose(1, 2)
    shared = torch.bmm(boxed, box_keys) if mask is None else torch.baddbmm(mask, boxed, box_keys)
    split = prefix_keys.shape[2]
    scores = query.new_empty((*query.shape[:3], split + keys.shape[2]))  # [B, Hkv, H / Hkv, P + t]
    _to_rows(batch, shared, scores[..., :split], add=False)
    scores[..., split:] = torch.matmul(query, keys.transpose(2, 3))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    output = torch.matmul(weights[..., split:], values)
    boxed = torch.bmm(_to_groups(batch, weights[..., :split]), prefix_values.flatten(0, 1))
    _to_rows(batch, boxed, output, add=True)
    return output.reshape(rows, heads, -1)


def _to_groups(batch: SharedBatch, rows: Tensor) -> Tensor:
    """[B, Hkv, r, X] to [G * Hkv, n * r, X]: the rows of a prompt side by side, zeros where it has fewer than n."""
    groups, most = len(batch.lengths), batch.per_group
    if batch.slots is not None:
        rows = rows.new_zeros((groups * most, *rows.shape[1:])).index_copy(0, batch.slots, rows)
    _, kv_heads, repeats, size = rows.shape
    boxed: Tensor = rows.unflatten(0, (groups, most)).transpose(1, 2)
    return boxed.reshape(groups * kv_heads, most * repeats, size)


def _to_rows(batch: SharedBatch, boxed: Tensor, rows: Tensor, *, add: bool) -> None:
    """Write [G * Hkv, n * r, X] to `rows` [B, Hkv, r, X], or add it to what is there."""
    groups, most = len(batch.lengths), batch.per_group
    _, kv_heads, repeats, size = rows.shape
    found = boxed.view(groups, kv_heads, most, repeats, size).transpose(1, 2)  # [G, n, Hkv, r, X]
    if batch.slots is None:
        rows = rows.unflatten(0, (groups, most))
    else:
        found = found.reshape(groups * most, kv_heads, repeats, size)[batch.slots]
    if add:
        rows.add_(found)
    else:
        rows.copy_(found)


AttentionInterface.register(IMPLEMENTATION, shared_attention)
