"""Decoding steps without the model's modules: which models take them, and that the numbers are the model's own."""

from collections.abc import Callable

import pytest
import torch

from rollstock import GenerationRequest, ModelSpec, Sampling, UserError
from rollstock.backends.native import Native, lean
from rollstock.backends.native.lean import LeanDecoder

Requests = Callable[[int], list[GenerationRequest]]
LIKE_A_LLAMA = ["llama", "qwen3", "mistral"]
OTHERS = ["gpt2", "gemma3_text", "qwen3_moe", "bloom", "mamba2"]


@pytest.fixture
def packs_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean, "_PACKED_ROWS", 1)
    monkeypatch.setattr(lean, "_PACKED_STEPS", 1)
    monkeypatch.setattr(lean, "_PACKED_SIZE", 1)


def test_models_with_the_layers_of_a_llama_take_lean_steps_and_others_do_not(
    make_engine: Callable[..., Native], make_spec: Callable[..., ModelSpec]
) -> None:
    assert all(isinstance(make_engine(name).decoder, LeanDecoder) for name in LIKE_A_LLAMA)
    assert not any(isinstance(make_engine(name).decoder, LeanDecoder) for name in OTHERS)
    with pytest.raises(UserError, match=r"rollout.decoder: lean does not work .* other parts than a Llama's"):
        make_engine("gpt2", decoder="lean")
    with pytest.raises(UserError, match="in float32 only"):
        make_engine("llama", decoder="lean", dtype="bfloat16")


def test_a_model_that_only_looks_like_a_llama_is_found_out_by_its_numbers(
    make_engine: Callable[..., Native], make_spec: Callable[..., ModelSpec]
) -> None:
    granite = make_spec("llama")
    granite.config.update(model_type="granite", residual_multiplier=0.3)  # type: ignore[attr-defined]
    assert not isinstance(make_engine(model=granite).decoder, LeanDecoder)
    with pytest.raises(UserError, match="lean does not work with this model: the logits would be off by"):
        make_engine(model=granite, decoder="lean")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", [*LIKE_A_LLAMA, "qwen2"])
def test_lean_steps_give_what_the_models_own_forward_gives(
    name: str,
    packed: bool,
    make_engine: Callable[..., Native],
    make_spec: Callable[..., ModelSpec],
    requests_of: Requests,
    request: pytest.FixtureRequest,
) -> None:
    if packed:
        request.getfixturevalue("packs_everything")
    model = make_spec("llama") if name == "qwen2" else make_spec(name)
    if name == "qwen2":  # which has biases in its attention
        model.config.update(model_type="qwen2")  # type: ignore[attr-defined]
    sampling = Sampling(max_new_tokens=12, temperature=0.7)
    engines = [make_engine(model=model, decoder=decoder) for decoder in ("lean", "shared")]
    for engine in engines:
        for weight, tensor in engine._model.named_parameters():
            if weight.endswith("bias"):  # they start at 0
                tensor.copy_(torch.linspace(-0.5, 0.5, tensor.numel()))
    found, right = (engine.generate(requests_of(4), sampling).completions for engine in engines)
    for mine, theirs in zip(found, right, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=2e-5)


def test_packed_weights_are_those_of_the_latest_load_and_are_let_go_of(
    packs_everything: None, make_engine: Callable[..., Native], requests_of: Requests
) -> None:
    engine, sampling = make_engine("llama"), Sampling(max_new_tokens=6)
    decoder = engine.decoder
    assert isinstance(decoder, LeanDecoder)
    before = engine.generate(requests_of(2), sampling).completions
    assert (decoder._layers, decoder._head) == ([], None)  # nothing is kept between two calls
    weights = [(name, tensor.clone()) for name, tensor in engine._model.state_dict().items()]
    for _, tensor in weights:
        tensor.mul_(1.5)
    engine.load_weights(weights, 2)
    after = engine.generate(requests_of(2), sampling).completions
    fresh = make_engine("llama", decoder="shared")
    fresh.load_weights(weights, 2)
    right = fresh.generate(requests_of(2), sampling).completions
    assert [done.tokens for done in after] == [done.tokens for done in right] != [done.tokens for done in before]


def test_few_rows_or_steps_are_not_worth_packing(
    make_engine: Callable[..., Native], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lean, "_PACKED_SIZE", 1)
    decoder = make_engine("llama").decoder
    assert isinstance(decoder, LeanDecoder)
    with torch.inference_mode():
        for rows, limit, packed in [(15, 99, False), (99, 15, False), (16, 16, True), (2, 2, True)]:
            decoder.start([(1, 2, 3)], [rows], limit)
            assert decoder._head is not None
            assert decoder._head.packed == packed  # once packed, they stay so until the engine is done
        decoder.release()
        decoder.start([(1, 2, 3)], [2], 2)
        assert decoder._head is not None
        assert not decoder._head.packed
