"""Decoding steps without the model's modules: the same sums as a Llama's layers, in far fewer calls.

For the engine. A step of a small batch is short, and much of it goes into what surrounds the matrix products: module
calls, masks that are built and thrown away, copies of a cache. Models whose layers have exactly the parts of a Llama
(those of Qwen 2 and 3, Mistral and many others do, with or without biases and norms of queries and keys) are run here
from their weights. Prompts are still read by the model itself. Whether the result is right is tried by `trial`.

On a CPU, matrix products of a few dozen rows go faster with weights in the order that oneDNN reads them in. Putting
them there costs about five steps' worth of what it gains, so it is done for batches of enough rows and steps, once in
a call of the engine, and undone at its end: a colocated trainer needs the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rollstock.backends.native.attention import UnsupportedAttentionError, decode_rows
from rollstock.backends.native.decoder import SharedDecoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_QUERY_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_BODY = {"embed_tokens", "layers", "norm", "rotary_emb"}
_PACKED_ROWS, _PACKED_STEPS = 16, 16  # what a batch has to have at least
_PACKED_SIZE = 2**17  # elements of a weight, below which calling oneDNN costs more than its order gains


@dataclass(frozen=True)
class _Linear:
    """A linear layer's tensors, as they are now; `packed`: the weight is in the order that oneDNN chose."""

    weight: Tensor
    bias: Tensor | None
    packed: bool

    def __call__(self, x: Tensor) -> Tensor:
        if not self.packed:
            return F.linear(x, self.weight, self.bias)
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return found


@dataclass(frozen=True)
class _Norm:
    """A root-mean-square norm over the last dimension."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.rsqrt_(scale.square_().div_(x.shape[-1]).add_(self.eps)).mul(self.weight)


@dataclass(frozen=True)
class _Layer:
    """What a step needs of a layer."""

    before_attention: _Norm
    query: _Linear
    key: _Linear
    value: _Linear
    query_norm: _Norm | None
    key_norm: _Norm | None
    output: _Linear
    before_mlp: _Norm
    gate: _Linear
    up: _Linear
    down: _Linear
    activation: Callable[[Tensor], Tensor]
    head_size: int
    index: int


class LeanDecoder(SharedDecoder):
    """Shared prompts, and steps from the weights themselves. Raises UnsupportedAttentionError for other layers."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        if model.dtype != torch.float32:  # lower precisions round at places of their own, which modules decide
            raise UnsupportedAttentionError(f"steps without modules are in float32 only, not {model.dtype}")
        self._body: Any = model.get_decoder()
        _same(self._body, _BODY, "model")
        for layer in self._body.layers:
            _read(layer, 0)
        self._layers: list[_Layer] = []
        self._head: _Linear | None = None
        self._rows = 0  # for how many the weights were packed; 0: they are as they are
        self._can_pack = self.device.type == "cpu" and _onednn_packs()

    def start(self, prompts: Sequence[Sequence[int]], counts: Sequence[int], limit: int) -> Tensor:
        """See `Decoder.start`."""
        rows = sum(counts)
        self._take_weights(rows if self._can_pack and rows >= _PACKED_ROWS and limit >= _PACKED_STEPS else 0)
        return super().start(prompts, counts, limit)

    def _take_weights(self, packed_rows: int) -> None:
        """Read the weights, once until `release`; pack them for so many rows, unless that is 0."""
        if self._head is None or (packed_rows and not self._rows):
            self._rows = packed_rows
            self._layers = [_read(layer, packed_rows) for layer in self._body.layers]
            self._head = _linear(self.model.get_output_embeddings(), packed_rows)

    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder.step`."""
        assert self._batch is not None
        assert self._head is not None
        batch = self._batch
        stream = self._body.embed_tokens(tokens)  # [B, hidden]
        cos, sin = (part[0][:, None] for part in self._body.rotary_emb(stream[None], batch.step()))
        half = cos.shape[-1] // 2
        turn = (cos, sin[..., :half], sin[..., half:])
        for layer in self._layers:
            x = layer.before_attention(stream)
            query = _heads(layer.query(x), layer.head_size)
            key = _heads(layer.key(x), layer.head_size)
            value = _heads(layer.value(x), layer.head_size)
            if layer.query_norm is not None and layer.key_norm is not None:
                query, key = layer.query_norm(query), layer.key_norm(key)
            attended = decode_rows(batch, layer.index, _turned(query, *turn), _turned(key, *turn), value)
            stream += layer.output(attended.flatten(1))
            x = layer.before_mlp(stream)
            stream += layer.down(layer.activation(layer.gate(x)).mul_(layer.up(x)))
        logits: Tensor = self._head(_norm(self._body.norm)(stream))
        return logits

    def release(self) -> None:
        """See `Decoder.release`."""
        super().release()
        self._layers, self._head = [], None


def _heads(x: Tensor, size: int) -> Tensor:
    """[B, H * D] to [B, H, D]."""
    return x.view(len(x), -1, size)


def _turned(x: Tensor, cos: Tensor, sin_low: Tensor, sin_high: Tensor) -> Tensor:
    """`x` [B, H, D] with rotary positions; the tables are [B, 1, D] and two of [B, 1, D / 2]."""
    half = sin_low.shape[-1]
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], sin_low, value=-1)
    turned[..., half:].addcmul_(x[..., :half], sin_high)
    return turned


def _read(layer: Any, packed_rows: int) -> _Layer:
    """The layer's tensors, without gradients, packed for so many rows (0: as they are).

    Raises UnsupportedAttentionError for a layer with other parts.
    """
    _same(layer, _LAYER, "layer")
    attention, mlp = layer.self_attn, layer.mlp
    norms = _QUERY_NORMS & set(dict(attention.named_children()))
    _same(attention, _ATTENTION | norms, "attention")
    _same(mlp, _MLP, "mlp")
    return _Layer(
        before_attention=_norm(layer.input_layernorm),
        query=_linear(attention.q_proj, packed_rows),
        key=_linear(attention.k_proj, packed_rows),
        value=_linear(attention.v_proj, packed_rows),
        query_norm=_norm(attention.q_norm) if norms else None,
        key_norm=_norm(attention.k_norm) if norms else None,
        output=_linear(attention.o_proj, packed_rows),
        before_mlp=_norm(layer.post_attention_layernorm),
        gate=_linear(mlp.gate_proj, packed_rows),
        up=_linear(mlp.up_proj, packed_rows),
        down=_linear(mlp.down_proj, packed_rows),
        activation=mlp.act_fn,
        head_size=attention.head_dim,
        index=attention.layer_idx,
    )


def _same(module: nn.Module, parts: set[str], what: str) -> None:
    found = {name for name, _ in module.named_children()}
    if found != parts:
        raise UnsupportedAttentionError(f"a {what} of {type(module).__name__} has other parts than a Llama's")


def _linear(module: Any, packed_rows: int) -> _Linear:
    if type(module) is not nn.Linear:
        raise UnsupportedAttentionError(f"{type(module).__name__} is no plain linear layer")
    weight, bias = module.weight.detach(), None if module.bias is None else module.bias.detach()
    if not packed_rows or weight.numel() < _PACKED_SIZE:
        return _Linear(weight, bias, packed=False)
    return _Linear(torch.ops.mkldnn._reorder_linear_weight(weight, packed_rows), bias, packed=True)


def _onednn_packs() -> bool:
    """Whether this build of torch has oneDNN's packed linear layers."""
    operators = torch.ops.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return torch.backends.mkldnn.is_available() and all(hasattr(operators, name) for name in names)


def _norm(module: Any) -> _Norm:
    if not hasattr(module, "variance_epsilon"):
        raise UnsupportedAttentionError(f"{type(module).__name__} is no norm of a Llama's kind")
    return _Norm(module.weight.detach(), module.variance_epsilon)
