"""The estimate of memory adds up from sizes that can be counted by hand, and is held against what there is."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from rollstock.doctor.memory import PROGRAM, Load, estimate, examine_memory
from rollstock.doctor.model import ModelFacts, model_facts
from rollstock.errors import ConfigError
from rollstock.schema import ModelSection

MODEL = ModelFacts(
    num_parameters=1_000_000,
    num_layers=4,
    hidden_size=64,
    intermediate_size=256,
    vocab_size=1000,
    cache_width=2 * 2 * 16,
    max_positions=512,
    linear_layers=(("q_proj", 64, 64), ("down_proj", 256, 64)),
)
LOAD = Load(
    roles=("actor", "rollout", "reward"),
    backend={},
    rollout={},
    scheduler={},
    num_sequences=64,
    prompt_tokens=10,
    new_tokens=30,
)


def test_the_parts_of_full_training() -> None:
    parts = estimate(MODEL, LOAD)
    assert parts["weights (float32)"] == 4_000_000
    assert parts["gradients"] == 4_000_000
    assert parts["optimizer"] == 8_000_000
    assert parts["key-value cache"] == 64 * 40 * 4 * 64 * 4
    assert parts["logits"] == 3 * 64 * 30 * 1000 * 4
    assert parts["activations"] == 64 * 40 * 4 * (12 * 64 + 4 * 256) * 4
    assert parts["program"] == PROGRAM
    assert "reference model" not in parts
    assert "weights of the generator" not in parts


@pytest.mark.parametrize(
    ("change", "part", "value"),
    [
        ({"roles": ("actor", "reference")}, "reference model", 4_000_000),
        ({"roles": ("actor", "critic")}, "critic with optimizer", 16_000_000),
        ({"rollout": {"dtype": "bfloat16"}}, "weights of the generator", 2_000_000),
        ({"rollout": {"max_batch": 8}}, "key-value cache", 8 * 40 * 4 * 64 * 4),
        ({"scheduler": {"tokens_per_micro_batch": 80}}, "logits", 3 * 2 * 30 * 1000 * 4),
        ({"scheduler": {"tokens_per_micro_batch": 7}}, "logits", 3 * 1 * 30 * 1000 * 4),
        ({"backend": {"logits_memory_mib": 1}}, "logits", 3 << 20),
        ({"backend": {"compute_dtype": "bfloat16"}}, "activations", 64 * 40 * 4 * (12 * 64 + 4 * 256) * 2),
        ({"backend": {"share_prompts": True}, "samples_per_prompt": 8}, "activations",
         (8 * 10 + 64 * 30) * 4 * (12 * 64 + 4 * 256) * 4),
        ({"backend": {"activation_checkpointing": True}}, "activations",
         64 * 40 * (4 * 64 * 4 + (12 * 64 + 4 * 256) * 4)),
    ],
)  # fmt: skip
def test_what_options_change(change: dict[str, object], part: str, value: int) -> None:
    assert estimate(MODEL, replace(LOAD, **change))[part] == value  # type: ignore[arg-type]


def test_adapters_alone_have_gradients_and_an_optimizer() -> None:
    parts = estimate(MODEL, replace(LOAD, backend={"lora": {"rank": 2, "targets": []}}))
    trained = 2 * (64 + 64) + 2 * (256 + 64)
    assert parts["gradients"] == 4 * trained
    assert parts["optimizer"] == 8 * trained
    assert parts["weights (float32)"] == 4 * (1_000_000 + trained)
    assert parts["weights of the generator"] == 4_000_000, "merged weights are a copy"
    assert MODEL.adapter_parameters(2, ["q_proj"]) == 2 * (64 + 64)


def test_what_several_processes_divide_is_counted_by_what_each_keeps() -> None:
    roles = ("actor", "critic", "reference", "rollout")
    whole = estimate(MODEL, replace(LOAD, roles=roles))
    shares = {"actor": 0.25, "critic": 0.5, "reference": 1.0}
    parts = estimate(MODEL, replace(LOAD, roles=roles, shares=shares))
    assert parts["weights (float32)"] == 1_000_000
    assert parts["gradients"] == 1_000_000
    assert parts["optimizer"] == 2_000_000
    assert parts["critic with optimizer"] == 8_000_000
    assert parts["reference model"] == 4_000_000
    assert parts["weights of the generator"] == 4_000_000, "whole weights are a copy of what others keep parts of"
    kept = ("activations", "logits", "key-value cache", "logits of sampling", "program")
    assert {name: parts[name] for name in kept} == {name: whole[name] for name in kept}


def test_the_shares_are_said() -> None:
    load = replace(LOAD, shares={"actor": 0.25, "reference": 1.0})
    (finding,) = examine_memory(MODEL, load, device="cpu", total=2**34, free=2**34)
    assert "each process keeps 25% of the actor's weights, gradients and optimizer; cpu has" in finding.message
    (finding,) = examine_memory(MODEL, LOAD, device="cpu", total=2**34, free=2**34)
    assert "each process" not in finding.message


@pytest.mark.parametrize(
    ("total", "free", "severity"), [(2**34, 2**34, "ok"), (2**34, 2**29, "warning"), (2**29, 2**29, "error")]
)
def test_the_verdict_follows_what_is_there(total: int, free: int, severity: str) -> None:
    (finding,) = examine_memory(MODEL, LOAD, device="cpu", total=total, free=free)
    assert finding.severity == severity
    assert "1M parameters" in finding.message
    assert bool(finding.advice) == (severity != "ok")


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"scheduler": {"tokens_per_micro_batch": 10**9}, "num_sequences": 10**6}, "scheduler.tokens_per_micro_batch"),
        ({"num_sequences": 10**6}, "a smaller model"),
    ],
)
def test_the_advice_names_options_that_exist(change: dict[str, object], advice: str) -> None:
    (finding,) = examine_memory(MODEL, replace(LOAD, **change), device="cpu", total=1, free=1)  # type: ignore[arg-type]
    assert advice in finding.advice


BLOCK = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 99,
}


def llama() -> LlamaConfig:
    return LlamaConfig(**{name: value for name, value in BLOCK.items() if name != "model_type"}, vocab_size=77)


def test_a_model_is_measured_without_being_made() -> None:
    facts = model_facts(ModelSection(config=BLOCK), vocab_size=77)
    made = AutoModelForCausalLM.from_config(llama())
    assert facts.num_parameters == sum(parameter.numel() for parameter in made.parameters())
    assert (facts.num_layers, facts.vocab_size, facts.max_positions) == (3, 77, 99)
    assert facts.cache_width == 2 * 2 * 12
    assert len(facts.linear_layers) == 3 * 7
    assert ("down_proj", 96, 48) in facts.linear_layers


def test_a_model_directory_is_measured_from_its_config_alone(tmp_path) -> None:
    llama().save_pretrained(tmp_path)
    before = torch.get_default_dtype()
    facts = model_facts(ModelSection(path=str(tmp_path)), vocab_size=5)
    assert facts == model_facts(ModelSection(config=BLOCK), vocab_size=77)
    assert torch.get_default_dtype() == before


def test_a_model_that_cannot_be_laid_out_is_a_config_error(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot lay it out"):
        model_facts(ModelSection(config={**BLOCK, "num_attention_heads": 5}), vocab_size=77)
    with pytest.raises(ConfigError, match="cannot lay it out"):
        model_facts(ModelSection(path=str(tmp_path)), vocab_size=77)
