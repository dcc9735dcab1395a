"""Which models have layers with exactly the parts of a Llama, and where these parts are.

For code that runs such layers from their weights, without their modules: the torch backend's in training, the native
rollout's in decoding. Llama, Qwen 2 and 3, Mistral and many others are built of these parts, with or without biases and
norms of queries and keys. Models that only look alike (scaled residuals, say) are told apart by whoever runs them, by
their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BODY = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_QUERY_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class OtherPartsError(Exception):
    """A model has other parts than a Llama; the text says where."""


@dataclass(frozen=True)
class LlamaLayer:
    """The modules of one layer: norms with `weight` and `variance_epsilon`, and plain linear layers."""

    before_attention: Any
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    query_norm: Any | None
    key_norm: Any | None
    output: nn.Linear
    before_mlp: Any
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    activation: Callable[[Tensor], Tensor]
    head_size: int
    scale: float
    index: int


@dataclass(frozen=True)
class LlamaParts:
    """The modules of a whole model. `head` is its output embedding; None if it has none, as a value model."""

    embedding: nn.Embedding
    layers: tuple[LlamaLayer, ...]
    norm: Any
    rotary: Any
    head: nn.Linear | None


def llama_parts(model: PreTrainedModel) -> LlamaParts:
    """The parts of a causal language model. Raises OtherPartsError for one that has others."""
    body: Any = model.get_decoder()
    _same(body, _BODY, "model")
    if type(body.embed_tokens) is not nn.Embedding:
        raise OtherPartsError(f"{type(body.embed_tokens).__name__} is no plain embedding")
    head = model.get_output_embeddings()
    return LlamaParts(
        embedding=body.embed_tokens,
        layers=tuple(_layer(layer) for layer in body.layers),
        norm=_norm(body.norm),
        rotary=body.rotary_emb,
        head=None if head is None or isinstance(head, nn.Identity) else _linear(head),
    )


def _layer(layer: Any) -> LlamaLayer:
    _same(layer, _LAYER, "layer")
    attention, mlp = layer.self_attn, layer.mlp
    norms = _QUERY_NORMS & set(dict(attention.named_children()))
    _same(attention, _ATTENTION | norms, "attention")
    _same(mlp, _MLP, "mlp")
    if norms not in (set(), _QUERY_NORMS):
        raise OtherPartsError(f"an attention of {type(attention).__name__} has a norm of one of queries and keys")
    return LlamaLayer(
        before_attention=_norm(layer.input_layernorm),
        query=_linear(attention.q_proj),
        key=_linear(attention.k_proj),
        value=_linear(attention.v_proj),
        query_norm=_norm(attention.q_norm) if norms else None,
        key_norm=_norm(attention.k_norm) if norms else None,
        output=_linear(attention.o_proj),
        before_mlp=_norm(layer.post_attention_layernorm),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
        activation=mlp.act_fn,
        head_size=attention.head_dim,
        scale=float(attention.scaling),
        index=attention.layer_idx,
    )


def _same(module: nn.Module, parts: set[str], what: str) -> None:
    found = {name for name, _ in module.named_children()}
    if found != parts:
        raise OtherPartsError(f"a {what} of {type(module).__name__} has other parts than a Llama's")


def _linear(module: Any) -> nn.Linear:
    if type(module) is not nn.Linear:
        raise OtherPartsError(f"{type(module).__name__} is no plain linear layer")
    return module


def _norm(module: Any) -> Any:
    if not hasattr(module, "variance_epsilon"):
        raise OtherPartsError(f"{type(module).__name__} is no norm of a Llama's kind")
    return module


def gates_by_silu(layer: LlamaLayer) -> bool:
    """Whether the gate of a layer's second half is SiLU, found out by numbers: classes for it have many names."""
    probe = torch.linspace(-8, 8, 33)
    return torch.allclose(layer.activation(probe), nn.functional.silu(probe))
