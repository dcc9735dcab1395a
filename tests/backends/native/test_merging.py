"""Tokens with one past are computed once: of prompts that begin alike, and of samples that are still equal."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rollstock import GenerationRequest, Sampling
from rollstock.backends.native import Native, lean

PROMPTS = [(1, 2, 3, 4, 5, 6), (1, 2, 3, 9), (1, 2, 3, 4, 7, 8), (1, 2, 3, 4, 5, 6, 7), (8, 8)]
DISTINCT = 6 + 1 + 2 + 1 + 2
REQUESTS = [GenerationRequest(prompt=prompt, seed=10 * i + j) for i, prompt in enumerate(PROMPTS) for j in range(6)]
# Sharp enough for samples to stay equal for a while, and with ends, so that rows leave and move.
SAMPLING = Sampling(max_new_tokens=10, temperature=0.4, stop_token_ids=tuple(range(0, 97, 5)))


def streams_of(engine: Native) -> list[int]:
    """The lengths of the streams that the model reads from now on."""
    lengths: list[int] = []

    def note(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        lengths.append(inputs[0].numel())

    engine._model.get_input_embeddings().register_forward_pre_hook(note)
    return lengths


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3_text", "gpt2", "qwen3_moe"])
def test_merging_changes_no_token_and_spares_the_model_many(name: str, make_engine: Callable[..., Native]) -> None:
    merging, apart = make_engine(name), make_engine(name)
    apart.decoder.merges = False
    few, many = streams_of(merging), streams_of(apart)
    found, right = (engine.generate(REQUESTS, SAMPLING) for engine in (merging, apart))
    assert len({len(done.tokens) for done in right.completions}) > 1
    for mine, theirs in zip(found.completions, right.completions, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=3e-5)
    assert (few[0], many[0]) == (DISTINCT, sum(map(len, PROMPTS)))
    assert sum(few[1:]) < sum(many[1:])
    assert found.metrics["rollout/merged_tokens"].value == sum(many) - sum(few)
    assert right.metrics["rollout/merged_tokens"].value == 0


def test_greedy_samples_of_a_prompt_are_one_row_to_the_end(make_engine: Callable[..., Native]) -> None:
    engine = make_engine()
    lengths = streams_of(engine)
    found = engine.generate(REQUESTS, Sampling(max_new_tokens=10, temperature=0)).completions
    assert [done.tokens for done in found[::6]] == [done.tokens for done in found[5::6]]
    assert lengths == [DISTINCT] + [len(PROMPTS)] * 9


def test_rows_of_which_few_are_equal_stay_apart(make_engine: Callable[..., Native]) -> None:
    engine = make_engine()
    lengths = streams_of(engine)
    requests = [GenerationRequest(prompt=(i, i + 1), seed=i) for i in range(40)]
    engine.generate([*requests, GenerationRequest(prompt=(0, 1), seed=0)], Sampling(max_new_tokens=3))
    assert lengths == [80, 41, 41]


def test_with_packed_weights_streams_have_few_lengths(
    make_engine: Callable[..., Native], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = make_engine().generate(REQUESTS, SAMPLING).completions
    for name in ("_PACKED_ROWS", "_PACKED_STEPS", "_PACKED_SIZE"):
        monkeypatch.setattr(lean, name, 1)
    engine = make_engine()
    lengths = streams_of(engine)
    found = engine.generate(REQUESTS, SAMPLING).completions
    assert {length % 8 for length in lengths[1:]} == {0}
    assert len(set(lengths[1:])) > 1
    for mine, theirs in zip(found, right, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=3e-5)


def test_a_prefix_cache_and_merging_go_together(make_engine: Callable[..., Native]) -> None:
    caching, plain = make_engine(prefix_cache=True), make_engine()
    first = caching.generate(REQUESTS, SAMPLING).completions
    longer = [
        GenerationRequest(prompt=(*request.prompt, *done.tokens, 5, 6), seed=request.seed)
        for request, done in zip(REQUESTS, first, strict=True)
    ]
    again, right = (engine.generate(longer, SAMPLING).completions for engine in (caching, plain))
    assert [done.tokens for done in again] == [done.tokens for done in right]
