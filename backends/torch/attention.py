"""Attention over a packed stream, as an attention function of transformers.

For the network of this backend. One scaled-dot-product call covers many segments of similar length (see `layout`), instead of
a block-diagonal mask over the whole stream, which costs the square of it. Any transformers model whose layers ask the
attention interface works: grouped queries, sliding and chunked windows, logit soft-caps and attention sinks included.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from rollstock.backends.torch.layout import Call, Layout

NAME: Final = "rollstock_packed"
"""The name under which transformers knows the function."""

LAYOUT: Final = "packed_layout"
"""The keyword argument of a model's forward that carries the Layout."""


def register() -> None:
    """Make the function known to transformers; doing so again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, position_mask)


def position_mask(*, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **rule: Any) -> Tensor | None:
    """Who may see whom within one sequence of `kv_length` positions: [1, 1, M, M] bool, or None for plain causal attention.

    The mask is one over positions, not over the stream: each call cuts its part out of it. `kv_length` is the length of the
    longest sequence, because the network passes a mask of that length.
    """
    from transformers.masking_utils import sdpa_mask

    mask: Tensor | None = sdpa_mask(q_length=kv_length, kv_length=kv_length, attention_mask=None, **rule)
    return mask


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function: query [1, H, L, D], key and value [1, K, L, D] to [1, L, H, D]. `attention_mask`: `position_mask`'s.

    Raises RuntimeError if the model did not hand the layout on, or passes a learned bias, which has no place here.
    """
    layout = options.get(LAYOUT)
    if not isinstance(layout, Layout):
        raise RuntimeError(f"{type(module).__name__} got no packed layout: the model does not pass keyword arguments on")
    if options.get("position_bias") is not None:
        raise RuntimeError(f"{type(module).__name__} adds a position bias, which packed attention does not know")
    queries = _split(query, layout.queries, [(call.size, call.width) for call in layout.calls])
    shapes = [(call.size, call.prefix + call.width) for call in layout.calls]
    keys = _split(key, layout.keys, shapes)
    values = _split(value, layout.keys, shapes)
    outputs = [
        _attend(q, k, v, _visible(call, attention_mask, q), scaling=scaling, softcap=softcap, sinks=s_aux)
        for call, q, k, v in zip(layout.calls, queries, keys, values, strict=True)
    ]
    rows = [out.transpose(1, 2).flatten(0, 1) for out in outputs]
    stream = rows[0] if len(rows) == 1 else torch.cat(rows)
    if layout.restore is not None:
        stream = stream.index_select(0, layout.restore)
    return stream.unsqueeze(0), None


def _split(states: Tensor, index: Tensor | None, shapes: list[tuple[int, int]]) -> list[Tensor]:
    """[1, H, L, D] to one [n, H, width, D] a call."""
    stream = states[0].transpose(0, 1)
    if index is not None:
        stream = stream.index_select(0, index)
    parts = stream.split([size * width for size, width in shapes])
    return [part.unflatten(0, shape).transpose(1, 2) for part, shape in zip(parts, shapes, strict=True)]


def _visible(call: Call, mask: Tensor | None, like: Tensor) -> Tensor | None:
    """[width, prefix + width] bool: the keys that each query of a call may see; None where that is plain causal.

    Padded queries and keys stand to the right, so that the causal rule alone keeps real queries from seeing them.
    """
    end = call.prefix + call.width
    if mask is None:
        if call.prefix == 0:
            return None
        return torch.ones(call.width, end, dtype=torch.bool, device=like.device).tril(call.prefix)
    whole = mask[0, 0]
    return whole[call.prefix : end, :end]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    *,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    if softcap is not None or sinks is not None:
        return _attend_plainly(query, key, value, visible, scaling=scaling, softcap=softcap, sinks=sinks)
    return nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=visible,
        is_causal=visible is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _attend_plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    *,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention spelled out, for what the fused kernels lack: soft-capped logits, and a learned logit [H] that takes up weight."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if visible is None:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.float().masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype)
    return weights @ value
