"""Attention over a packed stream, as an attention function of transformers.

For the network of this backend. One scaled-dot-product call covers many segments of similar length (see `layout`),
instead of a block-diagonal mask over the whole stream, which costs the square of it. Any transformers model whose
layers ask the attention interface works: grouped queries, sliding and chunked windows, logit soft-caps and attention
sinks included.
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
    """Who may see whom within one sequence of `kv_length` positions: [1, 1, M, M] bool, or None for plain causal
    attention.

    The mask is one over positions, not over the stream: each call cuts its part out of it. `kv_length` is the length
    of the longest sequence, because the network passes a mask of that length.
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
    """The attention function: query [1, H, L, D], key and value [1, K, L, D] to [1, L, H, D]. `attention_mask`:
    `position_mask`'s.

    Raises RuntimeError if the model did not hand the layout on, or passes a learned bias, which has no place here.
    """
    layout = options.get(LAYOUT)
    if not isinstance(layout, Layout):
        raise RuntimeError(
            f"{type(module).__name__} got no packed layout: the model does not pass keyword arguments on"
        )
    if options.get("position_bias") is not None:
        raise RuntimeError(f"{type(module).__name__} adds a position bias, which packed attention does not know")
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    stream = attend_stream(query, key, value, layout, attention_mask, scaling=scaling, softcap=softcap, sinks=s_aux)
    return stream.unsqueeze(0), None


def attend_stream(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a stream: query [L, H, D], key and value [L, K, D] to [L, H, D]. `mask`: `position_mask`'s."""
    queries, keys, values = (_by_call(states, layout) for states in (query, key, value))
    keys, values = _with_prefix(keys, layout), _with_prefix(values, layout)
    outputs = [
        _attend(q, k, v, _visible(call, mask), scaling=scaling, softcap=softcap, sinks=sinks)
        for call, q, k, v in zip(layout.calls, queries, keys, values, strict=True)
    ]
    rows = [output.transpose(1, 2).flatten(0, 1) for output in outputs]
    stream = rows[0] if len(rows) == 1 else torch.cat(rows)
    if layout.rows is not None and layout.places is not None:
        stream = _FromRows.apply(stream, layout.rows, layout.places)  # type: ignore[no-untyped-call]  # torch's own
    return stream


def _by_call(stream: Tensor, layout: Layout) -> list[Tensor]:
    """[L, H, D] to one [size, H, width, D] a call."""
    if layout.rows is not None and layout.places is not None:
        stream = _ToRows.apply(stream, layout)  # type: ignore[no-untyped-call]  # torch's own
    parts = stream.split([call.size * call.width for call in layout.calls])
    return [
        part.unflatten(0, (call.size, call.width)).transpose(1, 2)
        for part, call in zip(parts, layout.calls, strict=True)
    ]


class _ToRows(torch.autograd.Function):
    """Stream to rows. A token's gradient is the sum of its real rows': padded rows, which nothing sees, have none."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        assert layout.rows is not None
        return stream.index_select(0, layout.rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        layout = ctx.layout
        found = gradient.index_select(0, layout.places)
        if layout.again is not None:
            rows, tokens = layout.again
            found.index_add_(0, tokens, gradient.index_select(0, rows))
        return found, None


class _FromRows(torch.autograd.Function):
    """Rows to stream: those that are no token's place are dropped, and get the gradient 0."""

    @staticmethod
    def forward(ctx: Any, rows_of: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.num_rows = len(rows)
        return rows_of.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        spread = gradient.new_zeros((ctx.num_rows, *gradient.shape[1:]))
        return spread.index_copy_(0, places, gradient), None, None


def _with_prefix(states: list[Tensor], layout: Layout) -> list[Tensor]:
    """Keys or values by call, with those of a shared prompt before each segment's own."""
    single: dict[int, tuple[Tensor, ...]] = {}
    result: list[Tensor] = []
    for call, own in zip(layout.calls, states, strict=True):
        prefix = call.prefix
        if prefix is None:
            result.append(own)
            continue
        if prefix.call not in single:
            single[prefix.call] = states[prefix.call].unbind()
        shared = single[prefix.call][prefix.row][:, : prefix.length]
        result.append(torch.cat([shared.expand(call.size, *shared.shape), own], dim=2))
    return result


def _visible(call: Call, mask: Tensor | None) -> Tensor | None:
    """[width, prefix + width] bool: the keys that each query of a call may see; None where that is plain causal.

    Padded queries and keys stand to the right, so that the causal rule alone keeps real queries from seeing them.
    """
    if mask is None:
        return call.visible
    start = call.prefix.length if call.prefix else 0
    end = start + call.width
    return mask[0, 0, start:end, :end]


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
    """Attention spelled out, for what fused kernels lack: soft-capped logits, and sinks [H], which take weight."""
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
