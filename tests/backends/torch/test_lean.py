"""Layers run from their weights: which models are, and that outputs and gradients are those of the modules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rollstock import Batch, UserError
from rollstock.backends.torch.backend import TorchBackend

Run = Callable[..., dict[str, Tensor]]
LIKE_A_LLAMA = ["llama", "qwen3", "qwen2"]
OTHERS = ["gpt2", "mistral", "gemma3_text", "qwen3_moe", "granite"]


def model_of(name: str, make_spec: Any) -> Any:
    """The model of that name; Qwen 2 (with biases) and Granite (with scaled residuals) are made of a Llama's block."""
    spec = make_spec("llama" if name in ("qwen2", "granite") else name)
    if name == "qwen2":
        spec.config.update(model_type="qwen2", use_sliding_window=False)
    elif name == "granite":
        spec.config.update(model_type="granite", residual_multiplier=0.3)
    return spec


def fill_biases(backend: TorchBackend) -> None:
    """They start at 0, which would hide what becomes of them."""
    with torch.no_grad():
        for name, tensor in backend._network.model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                tensor.add_(torch.linspace(-0.4, 0.5, tensor.numel()))


@pytest.mark.parametrize("name", LIKE_A_LLAMA + OTHERS)
def test_models_with_the_layers_of_a_llama_are_run_from_their_weights_and_others_are_not(
    name: str, make_backend: Callable[..., TorchBackend], make_spec: Any
) -> None:
    assert (make_backend(model_of(name, make_spec))._network.lean is not None) == (name in LIKE_A_LLAMA)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("gpt2", {}, "other parts than a Llama's"),
        ("granite", {}, "logits are not those of its output embedding alone|numbers are others"),
        ("mistral", {}, "sliding window"),
        ("llama", {"compute_dtype": "bfloat16"}, "bfloat16 are left to modules"),
    ],
)
def test_what_cannot_be_lean_is_refused_where_it_is_asked_for(
    name: str, options: dict[str, Any], reason: str, make_backend: Callable[..., TorchBackend], make_spec: Any
) -> None:
    model = model_of(name, make_spec)
    with pytest.raises(UserError, match=f"backend.layers: lean does not work with this model: .*({reason})"):
        make_backend(model, layers="lean", **options)
    assert make_backend(model, **options)._network.lean is None


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", LIKE_A_LLAMA)
def test_outputs_and_gradients_are_those_of_the_modules(
    name: str,
    checkpointed: bool,
    make_backend: Callable[..., TorchBackend],
    make_spec: Any,
    batch: Batch,
    packed: Run,
    gradients: Run,
) -> None:
    results = []
    for layers in ("lean", "modules"):
        backend = make_backend(model_of(name, make_spec), layers=layers, activation_checkpointing=checkpointed)
        fill_biases(backend)
        network = backend._network
        found = packed(network, batch)
        results.append((found, gradients(network.model.named_parameters(), found)))
    (lean, of_lean), (plain, of_plain) = results
    for found, expected in ((lean, plain), (of_lean, of_plain)):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            scale = max(1.0, float(value.detach().abs().max()))
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-5 * scale, msg=lambda text, k=key: k + text)


def test_gradients_of_slices_add_up(
    make_backend: Callable[..., TorchBackend], batch: Batch, packed: Run, gradients: Run
) -> None:
    network = make_backend(layers="lean")._network
    weights = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(2))
    whole = gradients(network.model.named_parameters(), packed(network, batch), weights)
    for name, parameter in network.model.named_parameters():
        parameter.grad = torch.ones_like(whole[name])  # that of a micro-batch before
    later = gradients(network.model.named_parameters(), packed(network, batch), weights)
    for name, value in whole.items():
        torch.testing.assert_close(later[name], value + 1, rtol=0, atol=1e-5, msg=lambda text, k=name: k + text)
