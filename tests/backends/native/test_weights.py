"""The engine takes the trainer's weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rollstock import GenerationRequest, RunError, Sampling, fingerprint
from rollstock.backends.models import named_weights
from rollstock.backends.native import Native


def changed(model: Any) -> list[tuple[str, torch.Tensor]]:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return list(named_weights(model))


def greedy(engine: Native) -> list[int]:
    request = GenerationRequest(prompt=(1, 2, 3), seed=0)
    return engine.generate([request], Sampling(temperature=0, max_new_tokens=12)).completions[0].tokens


@pytest.mark.parametrize("name", ["llama", "gpt2"])  # gpt2 ties its head to its embedding
@pytest.mark.parametrize("alias", [True, False])
def test_loaded_weights_are_used_and_fingerprinted(
    name: str, alias: bool, make_engine: Callable[..., Native], make_model: Any
) -> None:
    engine, model = make_engine(name), make_model(name)
    before, old = engine.fingerprint(), greedy(engine)
    assert before == fingerprint(named_weights(model))
    weights = changed(model)
    engine.load_weights(iter(weights), 1, alias=alias)
    assert engine.fingerprint() == fingerprint(weights) != before
    with torch.no_grad():
        sequence = [1, 2, 3]
        for _ in range(12):
            sequence.append(int(model(torch.tensor([sequence])).logits[0, -1].argmax()))
    assert greedy(engine) == sequence[3:] != old


def test_an_alias_shares_memory_and_a_later_copy_does_not_write_into_it(
    make_engine: Callable[..., Native], make_model: Any
) -> None:
    engine, model, other = make_engine(), make_model("llama"), make_model("llama")
    weights = list(named_weights(model))
    engine.load_weights(weights, 1, alias=True)
    assert {t.data_ptr() for _, t in named_weights(engine._model)} == {t.data_ptr() for _, t in weights}
    kept = fingerprint(weights)
    engine.load_weights(changed(other), 2)
    assert fingerprint(weights) == kept
    assert engine.fingerprint() == fingerprint(named_weights(other)) != kept


def test_a_copy_does_not_follow_the_trainer(make_engine: Callable[..., Native], make_model: Any) -> None:
    engine, model = make_engine(), make_model("llama")
    engine.load_weights(list(named_weights(model)), 1)
    kept = engine.fingerprint()
    changed(model)
    assert engine.fingerprint() == kept


def test_tied_weights_may_come_under_either_name(make_engine: Callable[..., Native], make_model: Any) -> None:
    engine, model = make_engine("gpt2"), make_model("gpt2")
    weights = dict(changed(model))
    weights["lm_head.weight"] = weights.pop("transformer.wte.weight")
    engine.load_weights(weights.items(), 1)
    assert engine.fingerprint() == fingerprint(weights.items())


def test_weights_that_do_not_fit_are_named(make_engine: Callable[..., Native], make_model: Any) -> None:
    engine, weights = make_engine(), dict(named_weights(make_model("llama")))
    with pytest.raises(RunError, match=r"no weight 'model.norm.weigt'.*Did you mean 'model.norm.weight'"):
        engine.load_weights([("model.norm.weigt", torch.ones(48))], 1)
    with pytest.raises(RunError, match=r"'model.norm.weight' is \[49\] at the trainer, \[48\] in the rollout"):
        engine.load_weights([("model.norm.weight", torch.ones(49))], 1)
    weights.pop("model.norm.weight")
    with pytest.raises(RunError, match=r"1 weights did not arrive at the rollout, the first is 'model.norm.weight'"):
        engine.load_weights(weights.items(), 1)


def test_a_rounding_engine_reports_the_fingerprint_of_what_arrived(
    make_engine: Callable[..., Native], make_model: Any
) -> None:
    engine, weights = make_engine(dtype="bfloat16"), list(named_weights(make_model("llama")))
    engine.load_weights(weights, 1, alias=True)
    assert engine.fingerprint() == fingerprint(weights)
    assert {t.dtype for _, t in named_weights(engine._model)} == {torch.bfloat16}
