"""A tiny language model and its tokenizer, and what plain transformers says of it: the yardstick of the model kits.

For the kits of backends and rollouts, and for tests of plugin authors. It is read from a `ModelSpec` as any backend
would, but by transformers alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollstock.defaults import DEFAULT_PLUGINS
from rollstock.interfaces.device import Device
from rollstock.interfaces.model import ModelSpec
from rollstock.manager import make_manager
from rollstock.tokens import END, character_tokenizer, end_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHARACTERS = "0123456789+="


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer of twelve characters and an end mark."""
    made: PreTrainedTokenizerBase = character_tokenizer(CHARACTERS)
    return made


def tiny_model(*, tied: bool = True, seed: int = 0) -> ModelSpec:
    """A random model of about 30 thousand weights, which reads at most 48 tokens. Its weights are larger than usual,
    so that it has opinions.
    """
    tokenizer = tiny_tokenizer()
    return ModelSpec(
        config={
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 48,
            "initializer_range": 0.2,
            "tie_word_embeddings": tied,
        },
        seed=seed,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_ids=end_ids(tokenizer),
    )


def value_model(model: ModelSpec) -> ModelSpec:
    """The same model with a critic's head."""
    return replace(model, head="value")


def shared_model(model: ModelSpec) -> ModelSpec:
    """The same model with a policy's and a critic's head."""
    return replace(model, head="lm+value")


def scoring_model(model: ModelSpec) -> ModelSpec:
    """The same model with a reward model's head."""
    return replace(model, head="score")


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer of single bytes and an end mark, which can encode every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {END: 0, **{character: i + 1 for i, character in enumerate(characters)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )
    return made


def save_classifier(path: Path, *, num_labels: int = 1, max_tokens: int = 512, seed: int = 0) -> None:
    """Write a tiny random sequence classifier, and a tokenizer of bytes, as transformers would: a reward model."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    tokenizer = byte_tokenizer()
    block = {**tiny_model().config, "max_position_embeddings": max_tokens, "vocab_size": len(tokenizer)}
    config = AutoConfig.for_model(**block, num_labels=num_labels, pad_token_id=None, eos_token_id=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(path)
    tokenizer.save_pretrained(path)


def get_device(device: Device[Any] | str | None) -> Device[Any]:
    """A device, active: the one given, or the installed plugin of that name, by default a run's default."""
    if not isinstance(device, Device):
        device = make_manager().create_as(Device, {"name": device or DEFAULT_PLUGINS["device"]})
    device.activate()
    return device


def plain_model(model: ModelSpec, weights: Iterable[tuple[str, Tensor]] | None = None) -> PreTrainedModel:
    """The model as transformers makes it, in float32 on the CPU, with `weights` put in by name.

    Raises ValueError for weights that are unknown, missing or of another shape.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if model.path is not None:
        made = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32, local_files_only=True)
    else:
        block = {"vocab_size": model.vocab_size, "pad_token_id": model.pad_token_id, **model.config}
        block.setdefault("eos_token_id", list(model.eos_token_ids) or None)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(model.seed)
            config = AutoConfig.for_model(**{key: value for key, value in block.items() if value is not None})
            made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if weights is not None:
        put_weights(made, weights)
    loaded: PreTrainedModel = made.eval()
    return loaded


def put_weights(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy weights into a model by name; one of two tied names will do. Raises ValueError as `plain_model` does."""
    held = model.state_dict(keep_vars=True)
    missing = {id(tensor): name for name, tensor in held.items() if isinstance(tensor, torch.nn.Parameter)}
    with torch.no_grad():
        for name, tensor in weights:
            if name not in held:
                raise ValueError(f"transformers knows no weight {name!r} of this model")
            if held[name].shape != tensor.shape:
                raise ValueError(
                    f"weight {name!r} is {list(tensor.shape)}, and {list(held[name].shape)} in transformers"
                )
            held[name].copy_(tensor)
            missing.pop(id(held[name]), None)
    if missing:
        raise ValueError(f"there is no weight {sorted(missing.values())[0]!r}")


def named_weights(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """A copy of a model's weights under their names, tied ones once."""
    return [(name, tensor.detach().clone()) for name, tensor in model.named_parameters()]


@torch.no_grad()
def plain_logits(model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """The logits [T, V] that predict each token of a response, from one plain forward pass."""
    tokens = torch.tensor([[*prompt, *response]], dtype=torch.int64)
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits[0].float()
    return logits[len(prompt) - 1 : len(prompt) + len(response) - 1]


def plain_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], temperature: float
) -> dict[str, Tensor]:
    """`logprobs` of the response's tokens and the `entropy` of each distribution [T], in nats."""
    scores = torch.log_softmax(plain_logits(model, prompt, response) / temperature, dim=-1)
    picked = scores.gather(1, torch.tensor(response, dtype=torch.int64)[:, None])[:, 0]
    return {"logprobs": picked, "entropy": -(scores.exp() * scores).sum(dim=-1)}


def changed(weights: Mapping[str, Tensor], *, by: float = 0.05, seed: int = 5) -> list[tuple[str, Tensor]]:
    """Weights moved a little by seeded noise, as an update would."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (name, tensor + by * torch.randn(tensor.shape, generator=generator)) for name, tensor in sorted(weights.items())
    ]
