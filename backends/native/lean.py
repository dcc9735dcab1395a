"""Decoding steps without the model's modules: the same sums as a Llama's layers, in far fewer calls.

For the engine. A step of a small batch is short, and much of it goes into what surrounds the matrix products: module
calls, masks that are built and thrown away, copies of a cache. Models whose layers have exactly the parts of a Llama
are run here from their weights. Prompts are still read by the model itself. Whether the result is right is tried by
`trial`.

On a CPU, matrix products of a few dozen rows go faster with weights in the order that oneDNN reads them in, and oneDNN
adds, multiplies and gates while it writes. Putting weights there costs about five steps' worth of what it gains, so it
is done for batches of enough rows and steps, once in a call of the engine, and undone at its end: a colocated trainer
needs the memory. Copied as they are then, weights that read the same input are joined, and the norm's weights and the
scale of the attention are multiplied into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rollstock.backends.llama import LlamaLayer, OtherPartsError, gates_by_silu, llama_parts
from rollstock.backends.native.attention import UnsupportedAttentionError, decode_rows
from rollstock.backends.native.decoder import SharedDecoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PACKED_ROWS, _PACKED_STEPS = 16, 16  # what a batch has to have at least
_PACKED_STREAM = 8
"""What the rows of a step are filled up to a multiple of: oneDNN makes code for every number of rows that it meets, and
keeps it, half a MiB for each product of a layer."""

_PACKED_SIZE = 2**17  # elements of a weight, below which calling oneDNN costs more than its order gains


@dataclass(frozen=True)
class _Linear:
    """The tensors of one or several linear layers that read the same input; `packed`: in the order of oneDNN."""

    weight: Tensor
    bias: Tensor | None
    packed: bool

    def __call__(self, x: Tensor) -> Tensor:
        if not self.packed:
            return F.linear(x, self.weight, self.bias)
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return found

    def gated(self, x: Tensor) -> Tensor:
        """SiLU of the output."""
        if not self.packed:
            return F.silu(F.linear(x, self.weight, self.bias), inplace=True)
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "swish", [], "")
        return found

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """The output times `other`."""
        if not self.packed:
            return F.linear(x, self.weight, self.bias).mul_(other)
        found: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, "mul")
        return found

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The output plus `other`."""
        if not self.packed:
            return torch.addmm(other, x, self.weight.t()) if self.bias is None else self(x).add_(other)
        found: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, "add")
        return found


@dataclass(frozen=True)
class _Norm:
    """A root-mean-square norm over the last dimension. weight: None where it was multiplied into what comes after."""

    eps: Tensor
    weight: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        found = x * torch.addcmul(self.eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return found if self.weight is None else found.mul_(self.weight)


@dataclass(frozen=True)
class _Layer:
    """What a step needs of a layer.

    inputs: queries, keys and values, joined or one by one; query_norm: of queries and keys, joined; scaled: whether the
    scale of the attention is in the queries.
    """

    before_attention: _Norm
    inputs: tuple[_Linear, ...]
    query_norm: _Norm | None
    output: _Linear
    before_mlp: _Norm
    gate: _Linear
    up: _Linear
    down: _Linear
    parts: LlamaLayer
    scaled: bool

    @property
    def heads(self) -> int:
        """How many heads of queries there are."""
        return self.parts.query.out_features // self.parts.head_size


class LeanDecoder(SharedDecoder):
    """Shared prompts, and steps from the weights themselves. Raises UnsupportedAttentionError for other layers."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        if model.dtype != torch.float32:  # lower precisions round at places of their own, which modules decide
            raise UnsupportedAttentionError(f"steps without modules are in float32 only, not {model.dtype}")
        try:
            self._parts = llama_parts(model)
        except OtherPartsError as error:
            raise UnsupportedAttentionError(str(error)) from error
        assert self._parts.head is not None
        self._layers: list[_Layer] = []
        self._head: _Linear | None = None
        self._rows = 0  # for how many the weights were packed; 0: they are as they are
        self._can_pack = self.device.type == "cpu" and _onednn_packs()
        self._gates_by_silu = all(gates_by_silu(layer) for layer in self._parts.layers)

    def start(self, prompts: Sequence[Sequence[int]], counts: Sequence[int], limit: int) -> Tensor:
        """See `Decoder.start`."""
        rows = sum(counts)
        self._take_weights(rows if self._can_pack and rows >= _PACKED_ROWS and limit >= _PACKED_STEPS else 0)
        return super().start(prompts, counts, limit)

    def _take_weights(self, packed_rows: int) -> None:
        """Read the weights, once until `release`; pack them for so many rows, unless that is 0."""
        if self._head is None or (packed_rows and not self._rows):
            self._rows = packed_rows
            self._layers = [_read(layer, packed_rows) for layer in self._parts.layers]
            head, norm = self._parts.head, self._parts.norm
            assert head is not None
            self._head = _linear([head], packed_rows)
            self._norm = _norm(norm, folded=False)
            self._multiple = _PACKED_STREAM if self._head.packed or self._layers[0].gate.packed else 1

    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder.step`."""
        assert self._batch is not None
        assert self._head is not None
        batch = self._batch
        tokens, positions = self._next(tokens)
        stream = self._parts.embedding(tokens)  # [U, hidden]
        cos, sin = (part[0][:, None] for part in self._parts.rotary(stream[None], positions[None]))
        half = cos.shape[-1] // 2
        turn = (cos, sin[..., :half], sin[..., half:])
        for layer in self._layers:
            both, value = _project(layer, layer.before_attention(stream))
            both = _turned(both if layer.query_norm is None else layer.query_norm(both), *turn)
            query, key = both[:, : layer.heads], both[:, layer.heads :]
            attended = decode_rows(batch, layer.parts.index, query, key, value, scaled=layer.scaled)
            stream = layer.output.plus(attended.flatten(1), stream)
            x = layer.before_mlp(stream)
            gate = layer.gate.gated(x) if self._gates_by_silu else layer.parts.activation(layer.gate(x))
            stream = layer.down.plus(layer.up.times(x, gate), stream)
        return self._head(self._norm(stream))

    def release(self) -> None:
        """See `Decoder.release`."""
        super().release()
        self._layers, self._head = [], None


def _project(layer: _Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of a normed stream, joined, [B, H + K, D], and values, [B, K, D]."""
    size = layer.parts.head_size
    if len(layer.inputs) == 1:
        heads = layer.inputs[0](x).view(len(x), -1, size)
        keys = (heads.shape[1] - layer.heads) // 2
        return heads[:, : layer.heads + keys], heads[:, layer.heads + keys :]
    query, key, value = (linear(x).view(len(x), -1, size) for linear in layer.inputs)
    return torch.cat([query, key], dim=1), value


def _turned(x: Tensor, cos: Tensor, sin_low: Tensor, sin_high: Tensor) -> Tensor:
    """`x` [B, H, D] with rotary positions; the tables are [B, 1, D] and two of [B, 1, D / 2]."""
    half = sin_low.shape[-1]
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], sin_low, value=-1)
    turned[..., half:].addcmul_(x[..., :half], sin_high)
    return turned


def _read(layer: LlamaLayer, packed_rows: int) -> _Layer:
    """The layer's tensors, without gradients, packed for so many rows (0: as they are).

    They are joined and multiplied into each other where they are copied anyway, or small.
    """
    inputs = [layer.query, layer.key, layer.value]
    joined = bool(packed_rows) or all(part.weight.numel() < _PACKED_SIZE for part in inputs)
    first, second = layer.before_attention.weight.detach(), layer.before_mlp.weight.detach()
    by_column = (first, second) if joined else (None, None)
    if joined:
        scale = layer.scale if layer.query_norm is None else 1.0
        linears: tuple[_Linear, ...] = (_linear(inputs, packed_rows, by_column[0], scale),)
    else:
        linears = tuple(_linear([part], packed_rows) for part in inputs)
    return _Layer(
        before_attention=_norm(layer.before_attention, folded=joined),
        inputs=linears,
        query_norm=None if layer.query_norm is None else _query_norm(layer, layer.scale if joined else 1.0),
        output=_linear([layer.output], packed_rows),
        before_mlp=_norm(layer.before_mlp, folded=joined),
        gate=_linear([layer.gate], packed_rows, by_column[1]),
        up=_linear([layer.up], packed_rows, by_column[1]),
        down=_linear([layer.down], packed_rows),
        parts=layer,
        scaled=joined,
    )


def _linear(
    modules: Sequence[nn.Linear], packed_rows: int, by_column: Tensor | None = None, first_scale: float = 1.0
) -> _Linear:
    """Layers that read the same input, as one. by_column: what multiplies each column of the weights; first_scale: what
    multiplies the output of the first."""
    weights = [module.weight.detach() for module in modules]
    biases = [_bias(module) for module in modules] if any(module.bias is not None for module in modules) else []
    if by_column is not None:
        weights = [weight * by_column for weight in weights]
    if first_scale != 1:
        weights[0] = weights[0] * first_scale
        biases[:1] = [bias * first_scale for bias in biases[:1]]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    bias = torch.cat(biases) if biases else None
    if not packed_rows or weight.numel() < _PACKED_SIZE:
        return _Linear(weight, bias, packed=False)
    return _Linear(torch.ops.mkldnn._reorder_linear_weight(weight, packed_rows), bias, packed=True)


def _bias(module: nn.Linear) -> Tensor:
    return module.weight.new_zeros(module.out_features) if module.bias is None else module.bias.detach()


def _norm(module: Any, *, folded: bool) -> _Norm:
    weight = module.weight.detach()
    return _Norm(weight.new_full((1, 1), module.variance_epsilon), None if folded else weight)


def _query_norm(layer: LlamaLayer, query_scale: float) -> _Norm:
    """The norms of queries and keys as one, [H + K, D]."""
    assert layer.query_norm is not None
    assert layer.key_norm is not None
    heads = [part.out_features // layer.head_size for part in (layer.query, layer.key)]
    query, key = (norm.weight.detach() for norm in (layer.query_norm, layer.key_norm))
    weight = torch.cat([(query * query_scale).expand(heads[0], -1), key.expand(heads[1], -1)])
    return _Norm(weight.new_full((1, 1, 1), layer.query_norm.variance_epsilon), weight)


def _onednn_packs() -> bool:
    """Whether this build of torch has oneDNN's packed linear layers."""
    operators = torch.ops.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return torch.backends.mkldnn.is_available() and all(hasattr(operators, name) for name in names)
