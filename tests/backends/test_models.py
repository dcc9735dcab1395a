"""Making models: from a directory, from a config block, and every way in which that can be wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rollstock import ModelSpec, UserError
from rollstock.backends.models import build_model, named_weights

BLOCK: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 19,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model in Hugging Face format."""
    build_model(ModelSpec(config=BLOCK, seed=5)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def same(first: nn.Module, second: nn.Module) -> bool:
    others = second.state_dict()
    return all(torch.equal(tensor, others[name]) for name, tensor in first.state_dict().items())


def test_random_weights_are_a_function_of_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = build_model(ModelSpec(config=BLOCK, seed=5))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = build_model(ModelSpec(config=BLOCK, seed=5))
    assert torch.equal(torch.get_rng_state(), state)
    assert same(first, second)
    assert not same(first, build_model(ModelSpec(config=BLOCK, seed=6)))


def test_a_directory_gives_the_weights_in_it(directory: Path) -> None:
    loaded = build_model(ModelSpec(path=str(directory)))
    assert same(loaded, build_model(ModelSpec(config=BLOCK, seed=5)))
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}


def test_half_precision_files_become_float32_masters(directory: Path) -> None:
    build_model(ModelSpec(path=str(directory))).to(torch.bfloat16).save_pretrained(directory)
    assert {p.dtype for p in build_model(ModelSpec(path=str(directory))).parameters()} == {torch.float32}


def test_the_tokenizers_ids_fill_a_block_that_names_none() -> None:
    block = {key: value for key, value in BLOCK.items() if key != "vocab_size"}
    spec = ModelSpec(config=block, vocab_size=23, pad_token_id=3, bos_token_id=4, eos_token_ids=(3, 5))
    config = build_model(spec).config
    assert (config.vocab_size, config.pad_token_id, config.bos_token_id) == (23, 3, 4)
    assert config.eos_token_id == [3, 5]


def test_nothing_random_is_left_in_training_mode() -> None:
    block = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 19, "attn_pdrop": 0.5}
    model = build_model(ModelSpec(config=block))
    assert model.training
    ids = torch.arange(8)[None]
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_no_row_of_an_embedding_is_left_out_as_padding() -> None:
    model = build_model(ModelSpec(config=BLOCK, pad_token_id=2))
    assert all(m.padding_idx is None for m in model.modules() if isinstance(m, nn.Embedding))


def test_tied_weights_come_once() -> None:
    tied = build_model(ModelSpec(config={**BLOCK, "tie_word_embeddings": True}))
    names = [name for name, _ in named_weights(tied)]
    assert len(names) == len(set(names)) == len(list(tied.parameters()))
    assert "lm_head.weight" not in names


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({**BLOCK, "model_type": "lama"}, r"unknown model_type 'lama'. Did you mean 'llama'"),
        ({"hidden_size": 16}, r"it has no `model_type`"),
        ({**BLOCK, "hiden_size": 16}, r"a llama model has no 'hiden_size'. Did you mean 'hidden_size'"),
        ({**BLOCK, "hidden_size": "big"}, r"transformers refuses this llama config: .*hidden_size"),
        ({"model_type": "vit"}, r"no causal model can be made of this vit config"),
    ],
)
def test_a_block_that_makes_no_model_is_refused(block: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_model(ModelSpec(config=block))


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused() -> None:
    with pytest.raises(UserError, match="vocab_size 19 is less than the tokenizer's 20 tokens"):
        build_model(ModelSpec(config=BLOCK, vocab_size=20))


def test_a_model_needs_exactly_one_source(directory: Path) -> None:
    with pytest.raises(UserError, match="give either `path` or `config`, not both"):
        build_model(ModelSpec(path=str(directory), config=BLOCK))
    with pytest.raises(UserError, match=r"give `path` .* or `config`"):
        build_model(ModelSpec())


def test_a_path_that_is_no_model_is_refused(directory: Path, tmp_path: Path) -> None:
    def refused(path: Path, message: str) -> None:
        with pytest.raises(UserError, match=message):
            build_model(ModelSpec(path=str(path)))

    refused(tmp_path / "nowhere", "does not exist; expected a local directory")
    refused(directory / "config.json", "is a file; expected a local directory")
    refused(tmp_path, "has no config.json")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    refused(tmp_path / "m.gguf", r"python -m rollstock\.backends\.gguf")
    (directory / "model.safetensors").rename(directory / "model.gone")
    refused(directory, r"has no \*\.safetensors file$")
    (directory / "pytorch_model.bin").write_bytes(b"")
    refused(directory, "pytorch_model.bin is a pickle, which can run code and is never loaded")


def test_broken_weights_are_refused(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(UserError, match="transformers cannot load"):
        build_model(ModelSpec(path=str(directory)))


def test_missing_weights_are_refused_rather_than_drawn_at_random(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(UserError, match=r"lacks 9 of the model's weights, the first is 'model\.layers\.1\."):
        build_model(ModelSpec(path=str(directory)))


def test_code_in_a_model_directory_is_never_run(directory: Path) -> None:
    ran = directory / "ran"
    (directory / "modeling_x.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass X: pass\n")
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "x", "auto_map": dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "modeling_x.X")}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="transformers cannot load"):
        build_model(ModelSpec(path=str(directory)))
    assert not ran.exists()


def test_weights_of_another_shape_than_the_config_says_are_named(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "intermediate_size": 32}))
    with pytest.raises(UserError, match=r"3 weights of another shape .* '.*mlp.*': \[.*24.*\], not \[.*32.*\]"):
        build_model(ModelSpec(path=str(directory)))
