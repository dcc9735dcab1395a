"""Responses that are asked for in parts are those that one request would have given, if the weights stay."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rollstock import Completion, Environment, GenerationResult, NoOptions, Sampling, Task
from rollstock.build import build, choose
from rollstock.episodes import Player
from rollstock.interrupt import Interrupt
from rollstock.stages import Stages
from rollstock.tokens import character_tokenizer

TOKENIZER = character_tokenizer("abcdef")


@pytest.fixture(scope="module")
def run(small_run, tmp_path_factory) -> Iterator[Any]:
    """The built-in engine with a model of random weights."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("partial")
    config = small_run(directory, "pipeline=async", "pipeline.partial_tokens=3", "sampling.max_new_tokens=20")
    made = build(config, directory, choose(config), Interrupt())
    Stages(made).sync()
    yield made
    made.close("finished")


def played(player, sampling, partial, tasks, samples=6):
    play = player.begin(
        tasks,
        samples=samples,
        sampling=sampling,
        seed_of=lambda place, k: 1000 * place + k,
        partial_tokens=partial,
    )
    while play.active:
        player.advance([play])
    return play


@pytest.mark.parametrize("partial", [1, 2, 3, 7, 19, 20, 50])
@pytest.mark.parametrize(
    "options",
    [{}, {"stop": ("1", "23", "+4")}, {"min_new_tokens": 8}, {"min_new_tokens": 5, "stop": ("1", "2", "34")}],
    ids=["plain", "stop texts", "least length", "both"],
)
def test_the_native_engine_continues_what_it_said_as_if_it_had_not_been_interrupted(run, partial, options):
    sampling = Sampling(max_new_tokens=20, stop_token_ids=(0,), **options)
    tasks = [Task(id="a", prompt="1+2="), Task(id="b", prompt="7+"), Task(id="c", prompt="=")]
    whole = played(run.player, sampling, None, tasks)
    parts = played(run.player, sampling, partial, tasks)
    assert len({len(episode.tokens) for episode in whole.episodes}) > 3  # some stop early, some late
    for one, other in zip(whole.episodes, parts.episodes, strict=True):
        assert other.tokens == one.tokens
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-5)
        assert (other.finish_reason, other.versions, other.mask) == (one.finish_reason, one.versions, one.mask)
        assert (other.turns, other.num_turns) == (one.turns, 1)


def test_the_models_own_limit_ends_a_response_also_between_two_parts(run):
    """The model reads 32 tokens; parts of 4 end at that very place."""
    sampling = Sampling(max_new_tokens=40, min_new_tokens=40, stop_token_ids=(0,))
    tasks = [Task(id="a", prompt="1+2="), Task(id="b", prompt="7+")]
    whole, parts = (played(run.player, sampling, partial, tasks, samples=2) for partial in (None, 4))
    assert [len(e.tokens) for e in whole.episodes] == [28, 28, 30, 30]
    assert [e.tokens for e in parts.episodes] == [e.tokens for e in whole.episodes]
    assert {e.finish_reason for e in parts.episodes} == {"length"}


class Quiet(Environment[NoOptions]):
    def num_tasks(self, split):
        return None

    def task(self, split, index):
        return Task(id=str(index), prompt="a")


class Speller:
    """An engine that spells a text, and sees stop texts only within one request, as engines do."""

    def __init__(self, text: str) -> None:
        self.ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
        self.requests: list[Any] = []

    def __call__(self, requests, sampling):
        self.requests += requests
        return GenerationResult([self.spell(request, sampling) for request in requests])

    def spell(self, request, sampling):
        start, tokens, reason = len(request.prompt) - 1, [], "length"
        for token in self.ids[start : start + request.max_new_tokens]:
            tokens.append(token)
            if len(tokens) > sampling.min_new_tokens and any(
                stop in TOKENIZER.decode(tokens) for stop in sampling.stop
            ):
                reason = "stop"
                break
        return Completion(
            tokens=tokens,
            logprobs=[-float(place) for place in range(start, start + len(tokens))],
            finish_reason=reason,
            versions=[1] * len(tokens),
            routed_experts=torch.zeros(len(request.prompt) + len(tokens) - 1, 1, 1, dtype=torch.int16),
        )


def spelled(text, partial, **options):
    engine = Speller(text)
    player = Player(engine, Quiet(), TOKENIZER, max_prompt_tokens=None, overlong="error")
    sampling = Sampling(max_new_tokens=len(text), **options)
    return engine, played(player, sampling, partial, [Task(id="t", prompt="a")], samples=1)


@pytest.mark.parametrize("partial", range(1, 10))
@pytest.mark.parametrize("options", [{}, {"min_new_tokens": 3}, {"min_new_tokens": 5}])
def test_a_stop_text_that_two_requests_share_is_found_and_what_follows_it_is_counted(partial, options):
    text = "abcabcdefabc"
    _, whole = spelled(text, None, stop=("bcd",), **options)
    engine, parts = spelled(text, partial, stop=("bcd",), **options)
    (one,), (other,) = whole.episodes, parts.episodes
    assert other.turns == [{"role": "assistant", "content": "abcabcd"}]
    assert (other.tokens, other.logprobs, other.versions) == (one.tokens, one.logprobs, one.versions)
    assert (other.mask, other.finish_reason) == (one.mask, "stop")
    assert len(other.routed) == len(one.routed) == len(one.prompt) + len(one.tokens) - 1
    assert all(request.max_new_tokens <= partial for request in engine.requests)


def test_tokens_behind_a_stop_text_that_was_found_late_are_counted():
    _, parts = spelled("abcdefabcdef", 5, stop=("ef",))  # the first request ends with e, the second has five more
    (episode,) = parts.episodes
    assert episode.turns[0]["content"] == "abcdef"
    assert parts.metrics()["rollout/num_tokens_past_stop"].value == 4


def test_episodes_of_several_plays_share_their_requests():
    engine = Speller("abcdef")
    player = Player(engine, Quiet(), TOKENIZER, max_prompt_tokens=None, overlong="error")
    plays = [
        player.begin([Task(id="t", prompt="a")], samples=2, sampling=Sampling(max_new_tokens=4), seed_of=lambda g, k: k)
        for _ in range(2)
    ]
    player.advance(plays)
    assert len(engine.requests) == 4
    assert [play.active for play in plays] == [[], []]
