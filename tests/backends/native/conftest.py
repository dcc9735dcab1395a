"""Small models, and engines that run them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rollstock import GenerationRequest, ModelSpec
from rollstock.backends.models import build_model
from rollstock.backends.native import Native, NativeConfig
from rollstock.hardware.cpu import CPU

VOCABULARY = 97

_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4}
SPECS: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, "num_hidden_layers": 3, "num_key_value_heads": 2, "max_position_embeddings": 128},
    "qwen3": {**_SIZES, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16},
    "gpt2": {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mistral": {**_SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, "sliding_window": 5},
    "gemma3_text": {**_SIZES, "num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 4},
    "qwen3_moe": {
        **_SIZES,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gemma2": {**_SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 5},
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 48, "n_layer": 2, "n_head": 4},
    "mamba2": {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_heads": 6,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 1,
    },
}


def spec(name: str, *, vocab_size: int = VOCABULARY, **others: Any) -> ModelSpec:
    """The model of that name; weights a little larger than usual, so that its distributions are not flat."""
    config = {"model_type": name, "initializer_range": 0.2, **SPECS[name], "vocab_size": vocab_size}
    return ModelSpec(config=config, seed=3, **others)


@pytest.fixture
def make_spec() -> Callable[..., ModelSpec]:
    """See `spec`."""
    return spec


@pytest.fixture
def make_engine() -> Callable[..., Native]:
    """An engine of the model of that name, on the CPU."""

    def make(
        name: str = "llama", *, device: Any = None, tokenizer: Any = None, model: Any = None, **options: Any
    ) -> Native:
        engine = Native(NativeConfig(**options))
        engine.setup(model or spec(name), device or CPU(), tokenizer)
        return engine

    return make


@pytest.fixture
def make_model() -> Callable[[str], Any]:
    """The model itself, with the weights that `make_engine` gives its engines."""
    return lambda name: build_model(spec(name)).eval()


@pytest.fixture
def prompts() -> list[tuple[int, ...]]:
    """Four prompts of three lengths."""
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(0, VOCABULARY, (n,), generator=generator).tolist()) for n in (7, 3, 12, 7)]


@pytest.fixture
def requests_of(prompts: list[tuple[int, ...]]) -> Callable[[int], list[GenerationRequest]]:
    """Requests for so many samples of each prompt, every one with a seed of its own."""
    return lambda samples: [
        GenerationRequest(prompt=prompt, seed=100 * i + j) for i, prompt in enumerate(prompts) for j in range(samples)
    ]


@pytest.fixture
def words() -> Any:
    """A byte-level tokenizer in which some characters and words take several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, "en", "end", "st", "op", "xs", "topic"]
    merges = [("e", "n"), ("en", "d"), ("s", "t"), ("o", "p"), ("x", "s")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=["<turn>"])
