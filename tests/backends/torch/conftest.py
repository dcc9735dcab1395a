"""Models of several architectures, networks over them, and plain transformers to compare with."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollstock import Batch, ModelSpec
from rollstock.backends.models import build_model
from rollstock.backends.torch.backend import TorchBackend
from rollstock.backends.torch.check import check_network
from rollstock.backends.torch.config import TorchConfig
from rollstock.backends.torch.layout import make_layout
from rollstock.backends.torch.network import Network
from rollstock.hardware.cpu import CPU
from rollstock.testing import make_trajectory

VOCABULARY = 31

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
BLOCKS: dict[str, dict[str, Any]] = {
    "llama": {**_GROUPED, "max_position_embeddings": 64},
    "qwen3": {**_GROUPED, "head_dim": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mistral": {**_GROUPED, "sliding_window": 4},
    "gemma2": {**_GROUPED, "head_dim": 8, "sliding_window": 4},
    "gemma3_text": {**_GROUPED, "num_hidden_layers": 6, "head_dim": 8, "sliding_window": 4},
    "cohere": _GROUPED,
    "gpt_oss": {**_GROUPED, "head_dim": 8, "sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**_GROUPED, **_EXPERTS, "head_dim": 8, "num_experts": 4},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2},
    "recurrent_gemma": {**_GROUPED, "num_hidden_layers": 3, "lru_width": 32},
}


def spec(name: str = "llama", **others: Any) -> ModelSpec:
    """The model of that name, with weights large enough that its distributions are not flat."""
    block = {"model_type": name, "vocab_size": VOCABULARY, **BLOCKS[name]}
    if name != "recurrent_gemma":  # which has no such setting
        block["initializer_range"] = 0.2
    return ModelSpec(config=block, seed=3, **others)


@pytest.fixture
def make_spec() -> Callable[..., ModelSpec]:
    """See `spec`."""
    return spec


@pytest.fixture
def make_network() -> Callable[..., Network]:
    """A checked network over the model of that name."""

    def make(name: str = "llama", *, head: str = "lm", logits_bytes: int = 1 << 30) -> Network:
        network = Network(build_model(spec(name, head=head)), head=head, logits_bytes=logits_bytes)
        check_network(network, share_prompts=True)
        return network

    return make


@pytest.fixture
def make_backend() -> Callable[..., TorchBackend]:
    """A backend on the CPU, set up; options by name."""

    def make(
        model: ModelSpec | None = None, *, trainable: bool = True, total_updates: int = 10, **options: Any
    ) -> TorchBackend:
        backend = TorchBackend(TorchConfig(**{"learning_rate": 1e-2, **options}))
        backend.setup(model or spec(), CPU(), trainable=trainable, total_updates=total_updates)
        return backend

    return make


@pytest.fixture
def batch() -> Batch:
    """Three groups: four uneven responses (one empty), a single one with observations, and two equal ones."""
    rows = [(0, 9, 7), (0, 9, 3), (1, 4, 6), (0, 9, 0), (2, 6, 5), (0, 9, 8), (2, 6, 5)]
    return Batch.from_trajectories(
        [
            make_trajectory(
                length,
                group=group,
                seed=i,
                vocab_size=VOCABULARY,
                prompt=torch.randint(1, VOCABULARY, (width,), generator=torch.Generator().manual_seed(group)).tolist(),
                observations=[1, 2] if i == 2 else [],
            )
            for i, (group, width, length) in enumerate(rows)
        ]
    )


@pytest.fixture
def alike() -> Batch:
    """Sequences of two tokens: prompts and responses begin as others do, one is all of another, two are equal."""
    rows = [(0, 5, 7), (0, 5, 6), (1, 3, 6), (0, 5, 0), (2, 6, 5), (0, 5, 7), (2, 6, 5), (1, 3, 4)]
    return Batch.from_trajectories(
        [
            make_trajectory(
                length,
                group=group,
                seed=i % 5,
                vocab_size=3,
                prompt=[1, 2, 1, 1, 2, 2][:width],
                observations=[1, 2] if i == 2 else [],
            )
            for i, (group, width, length) in enumerate(rows)
        ]
    )


def run_packed(
    network: Network, batch: Batch, *, share_prompts: bool = True, temperature: float = 0.7
) -> dict[str, Tensor]:
    """Flat `[N]` log-probs and entropies of every response token, observations included."""
    layout = make_layout(batch, share_prompts=share_prompts)
    found: dict[str, Tensor] = network(
        layout, ("logprobs", "entropy"), layout.predicts, batch.flat("response"), temperature
    )
    return found


@pytest.fixture
def packed() -> Callable[..., dict[str, Tensor]]:
    """See `run_packed`."""
    return run_packed


@pytest.fixture
def plain() -> Callable[..., dict[str, Tensor]]:
    """The same from a plain transformers model, one sequence after the other, without any packing."""

    def run(model: Any, batch: Batch, *, temperature: float = 0.7) -> dict[str, Tensor]:
        logprobs, entropies = [], []
        for i, prompt in enumerate(batch.prompts):
            response = batch.response(i)
            logits = model(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits[0]
            scores = (logits[len(prompt) - 1 : len(prompt) - 1 + len(response)] / temperature).log_softmax(-1)
            logprobs.append(scores.gather(1, response[:, None])[:, 0])
            entropies.append(-(scores.exp() * scores).sum(-1))
        return {"logprobs": torch.cat(logprobs), "entropy": torch.cat(entropies)}

    return run


@pytest.fixture
def gradients() -> Callable[..., dict[str, Tensor]]:
    """Backpropagate an arbitrary loss of log-probs and entropies; returns the gradients by name, and clears them."""

    def run(
        named: Iterable[tuple[str, nn.Parameter]], found: dict[str, Tensor], weights: Tensor | None = None
    ) -> dict[str, Tensor]:
        size = len(found["logprobs"])
        if weights is None:
            weights = torch.randn(size, generator=torch.Generator().manual_seed(1))
        (found["logprobs"] * weights + 0.3 * found["entropy"] * weights.flip(0)).sum().backward()
        result = {}
        for name, parameter in named:
            assert parameter.grad is not None, name
            result[name] = parameter.grad
            parameter.grad = None
        return result

    return run
