"""What earlier requests left is read instead of computed, changes no response, and is gone when the weights are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rollstock import GenerationRequest, ModelSpec, Sampling, UserError
from rollstock.backends.native import Native
from rollstock.backends.native.prefixes import Piece, PrefixCache

Make = Callable[..., Native]
Requests = Callable[[int], list[GenerationRequest]]
SAMPLING = Sampling(max_new_tokens=9, temperature=0.8)


def piece(length: int) -> Piece:
    return Piece(torch.arange(length, dtype=torch.float32).expand(2, 2, 1, 1, length).mT.contiguous(), length)


def test_the_longest_known_beginning_is_found_but_never_the_whole_prompt() -> None:
    cache = PrefixCache(10, 1 << 20)
    cache.add((1, 2, 3, 4), [piece(4)])
    cache.add((1, 2, 9), [piece(3)])
    for prompt, length in [
        ((1, 2, 3, 7, 7), 3),
        ((1, 2, 3, 4, 5), 4),
        ((1, 2, 3, 4), 3),
        ((1, 2, 9, 9), 3),
        ((1, 5), 1),
    ]:
        found = cache.find(prompt)
        assert found is not None
        assert found.length == length
        assert found.joined()[0, 0, 0, :, 0].tolist() == list(range(length))
    assert cache.find((2, 1, 2)) is None
    assert cache.find((1,)) is None


def test_the_least_recent_states_are_forgotten_first() -> None:
    cache = PrefixCache(2, 1 << 20)
    cache.add((1, 1), [piece(2)])
    cache.add((2, 2), [piece(2)])
    assert cache.find((1, 1, 1)) is not None  # which makes it recent
    cache.add((3, 3), [piece(2)])
    assert [cache.find((token, token, 0)) is not None for token in (1, 2, 3)] == [True, False, True]
    assert len(cache) == 2


def test_memory_is_bounded_and_shared_pieces_count_once() -> None:
    shared, size = piece(8), piece(8).states.nbytes
    cache = PrefixCache(100, 4 * size)
    for token in range(3):
        cache.add((*[7] * 8, *[token] * 8), [shared, piece(8)])
    assert (len(cache), cache.num_bytes) == (3, 4 * size)
    cache.add((*[7] * 8, *[4] * 8), [shared, piece(8)])
    assert (len(cache), cache.num_bytes) == (3, 4 * size)
    cache.add((9,) * 40, [piece(40)])  # larger than all of it
    assert (len(cache), cache.num_bytes) == (0, 0)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3_text"])  # two with sliding windows
def test_later_turns_are_what_they_are_without_the_cache(name: str, make_engine: Make, requests_of: Requests) -> None:
    """Three turns: the second continues the first's responses, the third those of some rows, beside new prompts."""
    engines = [make_engine(name, prefix_cache=kept) for kept in (True, False)]
    first = requests_of(3)
    rates = []
    turns: list[list[Any]] = [[], []]
    for engine, told in zip(engines, turns, strict=True):
        requests = first
        for turn in range(3):
            result = engine.generate(requests, SAMPLING)
            told.append(result.completions)
            if engine is engines[0]:
                rates.append(result.metrics["rollout/prefix_hit_rate"].value)
                reused = result.metrics["rollout/reused_tokens"].value
                assert reused + result.metrics["rollout/prefill_tokens"].value == sum(
                    len(prompt) for prompt in {request.prompt for request in requests}
                )
            more = [
                GenerationRequest(prompt=(*request.prompt, *done.tokens, 5, 6), seed=1000 * turn + i)
                for i, (request, done) in enumerate(zip(requests, result.completions, strict=True))
            ]
            requests = [*more[:: turn + 1], GenerationRequest(prompt=(8, 9, 10 + turn), seed=turn)]
    for mine, theirs in zip(*turns, strict=True):
        for found, expected in zip(mine, theirs, strict=True):
            assert found.tokens == expected.tokens
            assert found.logprobs == pytest.approx(expected.logprobs, abs=2e-5)
    assert rates[0] == 0
    assert min(rates[1:]) > 0.7


def test_a_response_that_is_continued_is_the_one_that_was_not_cut(make_engine: Make, requests_of: Requests) -> None:
    engine, whole = make_engine(prefix_cache=True), make_engine()
    expected = whole.generate(requests_of(2), Sampling(max_new_tokens=12)).completions
    requests = requests_of(2)
    half = engine.generate(requests, Sampling(max_new_tokens=5)).completions
    rest = engine.generate(
        [
            GenerationRequest(prompt=(*request.prompt, *done.tokens), seed=request.seed)
            for request, done in zip(requests, half, strict=True)
        ],
        Sampling(max_new_tokens=7),
    )
    assert [[*a.tokens, *b.tokens] for a, b in zip(half, rest.completions, strict=True)] == [
        done.tokens for done in expected
    ]
    assert rest.metrics["rollout/prefill_tokens"].value == len(requests)  # each one's last token


def test_new_weights_leave_nothing_of_the_old_ones(make_engine: Make, requests_of: Requests) -> None:
    engine, fresh = make_engine(prefix_cache=True), make_engine()
    engine.generate(requests_of(2), SAMPLING)
    weights = [(name, tensor * 1.5) for name, tensor in engine._model.state_dict().items()]
    for each in (engine, fresh):
        each.load_weights(weights, 2)
    result = engine.generate(requests_of(2), SAMPLING)
    assert result.metrics["rollout/prefix_hit_rate"].value == 0
    assert [done.tokens for done in result.completions] == [
        done.tokens for done in fresh.generate(requests_of(2), SAMPLING).completions
    ]
    again = engine.generate(requests_of(2), SAMPLING)
    assert again.metrics["rollout/prefix_hit_rate"].value > 0.8


def test_models_whose_states_cannot_be_kept_are_refused(make_engine: Make, make_spec: Callable[..., ModelSpec]) -> None:
    with pytest.raises(UserError, match="prefix_cache: this model is run with its own cache"):
        make_engine("mamba2", prefix_cache=True)
    assert "rollout/prefix_hit_rate" not in make_engine().generate([], SAMPLING).metrics
