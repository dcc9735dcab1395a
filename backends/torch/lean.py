"""A Llama's layers in training, from their weights: fewer and larger operations, and less that is kept.

For the network, where a model has exactly the parts of a Llama and is trained in float32. A layer is two functions with
backward passes of their own around the attention. Kept for the backward pass is what cannot be had again by one cheap
operation: the residual streams, queries, keys and values, and the two halves of the gated unit. Gradients of weights
are added to `grad` by the very matrix product that makes them, so that a second micro-batch costs no pass over all
weights. Whoever needs gradients to pass through autograd on their way to a parameter (hooks, shards, adapters) runs the
modules instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rollstock.backends.llama import LlamaLayer, LlamaParts, OtherPartsError, gates_by_silu
from rollstock.backends.torch.attention import attend_stream
from rollstock.backends.torch.layout import Layout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SLIDING = "sliding_attention"


@dataclass(frozen=True)
class _Turn:
    """The rotary tables of a stream: [L, 1, D], and two of [L, 1, D / 2]."""

    cos: Tensor
    sin_low: Tensor
    sin_high: Tensor

    def back(self) -> _Turn:
        """The turn whose forward is this one's backward."""
        return _Turn(self.cos, -self.sin_high, -self.sin_low)


class LeanLayers:
    """Runs the layers of a model. Raises OtherPartsError for one that has what these functions lack.

    The weights are those of the modules, read anew in every pass.
    """

    def __init__(self, parts: LlamaParts, config: PretrainedConfig, *, checkpointed: bool) -> None:
        """`checkpointed`: keep only each layer's input, and compute the layer again in the backward pass."""
        _check(parts, config)
        self._parts = parts
        self._checkpointed = checkpointed

    def hidden(self, layout: Layout, index: Tensor | None = None) -> Tensor:
        """[N, hidden]: the last hidden states at the places `index` of a stream; None: at all."""
        parts = self._parts
        x: Tensor = _Embed.apply(parts.embedding.weight, layout.tokens)  # type: ignore[no-untyped-call]  # torch's own
        cos, sin = (table[0][:, None] for table in parts.rotary(x[None], layout.positions[None]))
        half = cos.shape[-1] // 2
        turn = _Turn(cos, sin[..., :half], sin[..., half:])
        for layer in parts.layers:
            if self._checkpointed and torch.is_grad_enabled():
                x = checkpoint(_run, layer, x, turn, layout, use_reentrant=False, preserve_rng_state=False)
            else:
                x = _run(layer, x, turn, layout)
        if index is not None:
            x = x.index_select(0, index)
        normed: Tensor = _Norm.apply(x, parts.norm)  # type: ignore[no-untyped-call]
        return normed

    def head(self, hidden: Tensor) -> Tensor:
        """[N, V]: the logits of hidden states."""
        assert self._parts.head is not None
        logits: Tensor = _Linear.apply(hidden, self._parts.head)  # type: ignore[no-untyped-call]
        return logits


def _check(parts: LlamaParts, config: PretrainedConfig) -> None:
    text: Any = config.get_text_config()
    types = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    if window is not None and (types is None or _SLIDING in types):
        raise OtherPartsError("its attention has a sliding window")
    if not all(gates_by_silu(layer) for layer in parts.layers):
        raise OtherPartsError("its activation is not SiLU")
    if len({parameter.requires_grad for parameter in _weights(parts)}) > 1:
        raise OtherPartsError("some of its weights are frozen")


def _weights(parts: LlamaParts) -> Iterator[nn.Parameter]:
    for owner in (parts, *parts.layers):
        for part in vars(owner).values():
            if isinstance(part, nn.Module):
                yield from part.parameters()


def _run(layer: LlamaLayer, x: Tensor, turn: _Turn, layout: Layout) -> Tensor:
    query, key, value = _BeforeAttention.apply(x, layer, turn)  # type: ignore[no-untyped-call]
    attended = attend_stream(query, key, value, layout, scaling=layer.scale)
    output: Tensor = _AfterAttention.apply(x, attended.flatten(1), layer)  # type: ignore[no-untyped-call]
    return output


class _Embed(torch.autograd.Function):
    """`(weight [V, h], tokens [L]) -> [L, h]`; without the dense gradient that an embedding would make first."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, tokens: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(tokens)
        return weight.detach().index_select(0, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        (tokens,) = ctx.saved_tensors
        weight = ctx.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, tokens, gradient)
        return None, None


class _BeforeAttention(torch.autograd.Function):
    """The first norm, and queries, keys and values in their positions: `[L, h]` to `[L, H, D]` and twice
    `[L, K, D]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: LlamaLayer, turn: _Turn) -> tuple[Tensor, Tensor, Tensor]:
        scale = _inverse_rms(x, layer.before_attention)
        normed = _normed(x, scale, layer.before_attention)
        query, key, value = (_heads(_apply(part, normed), layer.head_size) for part in _inputs(layer))
        raw = (query, key) if layer.query_norm is not None else (None, None)
        if layer.query_norm is not None:
            query, key = _rms_norm(query, layer.query_norm), _rms_norm(key, layer.key_norm)
        ctx.layer, ctx.turn = layer, turn
        ctx.save_for_backward(x, scale, *raw)
        return _turned(query, turn), _turned(key, turn), value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None, None]:
        x, scale, raw_query, raw_key = ctx.saved_tensors
        layer, back = ctx.layer, ctx.turn.back()
        query, key = _turned(query, back), _turned(key, back)
        if raw_query is not None:
            query = _norm_gradient(query, raw_query, _inverse_rms(raw_query, layer.query_norm), layer.query_norm)
            key = _norm_gradient(key, raw_key, _inverse_rms(raw_key, layer.key_norm), layer.key_norm)
        normed = _normed(x, scale, layer.before_attention)
        gradient = None
        for part, output in zip(_inputs(layer), (query, key, value), strict=True):
            gradient = _linear_gradient(part, output.flatten(1), normed, gradient)
        assert gradient is not None
        return _norm_gradient(gradient, x, scale, layer.before_attention), None, None


class _AfterAttention(torch.autograd.Function):
    """The rest of a layer: `(x [L, h], attended [L, H * D]) -> [L, h]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, attended: Tensor, layer: LlamaLayer) -> Tensor:
        middle = _apply(layer.output, attended).add_(x)
        scale = _inverse_rms(middle, layer.before_mlp)
        normed = _normed(middle, scale, layer.before_mlp)
        gate, up = _apply(layer.gate, normed), _apply(layer.up, normed)
        del normed
        result = _apply(layer.down, F.silu(gate).mul_(up)).add_(middle)
        ctx.layer = layer
        ctx.save_for_backward(attended, middle, scale, gate, up)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        attended, middle, scale, gate, up = ctx.saved_tensors
        layer = ctx.layer
        squashed = torch.sigmoid(gate)
        active = gate * squashed
        of_up = _linear_gradient(layer.down, gradient, active * up)  # of the product of both halves
        # The slope of SiLU, written with what is there: s + a (1 - s).
        of_gate = squashed.addcmul_(active, squashed, value=-1).add_(active).mul_(of_up).mul_(up)
        of_up.mul_(active)
        del squashed, active, gate, up
        normed = _normed(middle, scale, layer.before_mlp)
        of_normed = _linear_gradient(layer.gate, of_gate, normed)
        of_normed = _linear_gradient(layer.up, of_up, normed, of_normed)
        del of_gate, of_up, normed
        of_middle = _norm_gradient(of_normed, middle, scale, layer.before_mlp).add_(gradient)
        return of_middle, _linear_gradient(layer.output, of_middle, attended), None


class _Norm(torch.autograd.Function):
    """A root-mean-square norm over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Any) -> Tensor:
        scale = _inverse_rms(x, norm)
        ctx.norm = norm
        ctx.save_for_backward(x, scale)
        return _normed(x, scale, norm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x, scale = ctx.saved_tensors
        return _norm_gradient(gradient, x, scale, ctx.norm), None


class _Linear(torch.autograd.Function):
    """A linear layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: nn.Linear) -> Tensor:
        ctx.linear = linear
        ctx.save_for_backward(x)
        return _apply(linear, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return _linear_gradient(ctx.linear, gradient, x), None


def _inputs(layer: LlamaLayer) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    return layer.query, layer.key, layer.value


def _heads(x: Tensor, size: int) -> Tensor:
    """[L, H * D] to [L, H, D]."""
    return x.view(len(x), -1, size)


def _turned(x: Tensor, turn: _Turn) -> Tensor:
    """`x` [L, H, D] with rotary positions."""
    half = turn.sin_low.shape[-1]
    turned = x * turn.cos
    turned[..., :half].addcmul_(x[..., half:], turn.sin_low, value=-1)
    turned[..., half:].addcmul_(x[..., :half], turn.sin_high)
    return turned


def _apply(linear: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight.detach(), None if linear.bias is None else linear.bias.detach())


def _linear_gradient(linear: nn.Linear, gradient: Tensor, x: Tensor, onto: Tensor | None = None) -> Tensor:
    """Add the gradients of a linear layer's own tensors to theirs; returns that of its input `x`, added `onto` what is
    there already."""
    parameter: Any = linear.weight  # always a parameter, of which torch's types only say that it is a tensor
    weight: Tensor = parameter.detach()
    _add_product(parameter, gradient.t(), x)
    if linear.bias is not None:
        _add(linear.bias, gradient.sum(0))
    return gradient @ weight if onto is None else onto.addmm_(gradient, weight)


def _inverse_rms(x: Tensor, norm: Any) -> Tensor:
    """[..., 1]: one over the root mean square of the last dimension."""
    scale: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return scale.square_().div_(x.shape[-1]).add_(norm.variance_epsilon).rsqrt_()


def _normed(x: Tensor, scale: Tensor, norm: Any) -> Tensor:
    return (x * scale).mul_(norm.weight.detach())


def _rms_norm(x: Tensor, norm: Any) -> Tensor:
    return _normed(x, _inverse_rms(x, norm), norm)


def _norm_gradient(gradient: Tensor, x: Tensor, scale: Tensor, norm: Any) -> Tensor:
    """The gradient of a norm's input, from that of its output; the weight's is added to its own."""
    unit = x * scale
    _add(norm.weight, (gradient * unit).flatten(0, -2).sum(0))
    gradient = gradient * norm.weight.detach()
    along = (gradient * unit).mean(dim=-1, keepdim=True)
    return gradient.sub_(unit.mul_(along)).mul_(scale)


def _add_product(parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
    if parameter.requires_grad:
        if parameter.grad is None:
            parameter.grad = left @ right
        else:
            parameter.grad.addmm_(left, right)


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.requires_grad:
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
