"""Episodes: turns of the policy and of the other side, in tokens that are never encoded twice."""

import pytest
import torch

from rollstock import (
    Batch,
    Completion,
    Environment,
    GenerationResult,
    Metric,
    NoOptions,
    Sampling,
    Task,
    UserError,
)
from rollstock.episodes import Player, greedy
from rollstock.tokens import character_tokenizer

TOKENIZER = character_tokenizer("abcxyz?")
A, B, C, X, Y, Z, ASK = range(1, 8)
END = 0


class Talk(Environment[NoOptions]):
    """Answers `?` to everything, `rounds` times."""

    rounds = 1

    def num_tasks(self, split):
        return None

    def task(self, split, index):
        return Task(id=str(index), prompt="ab")

    def respond(self, task, turns, state):
        state["count"] = state.get("count", 0) + 1
        return "?" if state["count"] <= self.rounds else None


class Script:
    """Stands in for the engine: says what it is told, and remembers what it was asked."""

    def __init__(self, *turns):
        self.turns = list(turns)
        self.requests = []

    def __call__(self, requests, sampling):
        self.requests.append(list(requests))
        tokens, reason = self.turns[len(self.requests) - 1]
        done = [
            Completion(
                tokens=list(tokens), logprobs=[-1.0] * len(tokens), finish_reason=reason, versions=[4] * len(tokens)
            )
            for _ in requests
        ]
        return GenerationResult(done, {"rollout/calls": Metric(1, 1.0, "sum")})


def play(script, *, environment=None, tasks=None, samples=1, limit=None, overlong="error", max_new_tokens=8):
    player = Player(script, environment or Talk(), TOKENIZER, max_prompt_tokens=limit, overlong=overlong)
    tasks = [Task(id="t", prompt="ab")] if tasks is None else tasks
    sampling = Sampling(max_new_tokens=max_new_tokens)
    return player.play(tasks, samples=samples, sampling=sampling, seed_of=lambda g, k: 100 * g + 10 * k)


def test_the_other_sides_tokens_are_masked_and_have_no_version():
    script = Script(([X, END], "stop"), ([Y, END], "stop"))
    (episode,), metrics = play(script)
    batch = Batch.from_trajectories([episode.trajectory()])
    assert batch.flat("response").tolist() == [X, END, ASK, Y, END]
    assert batch.mask.tolist() == [[True, True, False, True, True]]
    assert batch.versions.tolist() == [[4, 4, -1, 4, 4]]
    assert batch.rollout_logprobs.tolist() == [[-1.0, -1.0, 0.0, -1.0, -1.0]]
    assert metrics["rollout/calls"].value == 2
    assert metrics["rollout/max_turns"].value == 2
    assert metrics["response_length/mean"].value == 4  # the policy's tokens alone


def test_each_turn_continues_the_very_tokens_and_has_a_seed_of_its_own():
    script = Script(([X, END], "stop"), ([Y], "stop"))
    play(script)
    first, second = script.requests[0][0], script.requests[1][0]
    assert first.prompt == (A, B)
    assert second.prompt == (A, B, X, END, ASK)
    assert first.seed != second.seed
    assert (first.max_new_tokens, second.max_new_tokens) == (8, 5)


def test_sampled_ids_are_kept_although_their_text_encodes_otherwise():
    script = Script(([X, END, X], "stop"), ([Y], "stop"))
    (episode,), _ = play(script)
    assert episode.turns[0]["content"] == "xx"  # the mark between is no text
    assert episode.tokens[:3] == [X, END, X]


def test_an_episode_ends_when_the_limit_is_reached():
    script = Script(([X] * 8, "length"))
    (episode,), metrics = play(script)
    assert episode.finish_reason == "length"
    assert len(script.requests) == 1
    assert metrics["response_length/clip_ratio"].value == 1.0


def test_a_reply_that_leaves_no_room_ends_the_episode_by_length():
    script = Script(([X] * 7, "stop"))
    (episode,), _ = play(script)
    assert episode.finish_reason == "length"
    assert episode.tokens == [X] * 7


def test_samples_of_a_task_stand_side_by_side_with_one_group_and_seeds_of_their_own():
    silent = Talk()
    silent.rounds = 0
    script = Script(([X], "stop"))
    episodes, _ = play(
        script, environment=silent, tasks=[Task(id="0", prompt="a"), Task(id="1", prompt="b")], samples=3
    )
    assert [e.group for e in episodes] == [0, 0, 0, 1, 1, 1]
    assert [e.seed for e in episodes] == [0, 10, 20, 100, 110, 120]
    assert len({id(e.state) for e in episodes}) == 6


def test_rewards_see_plain_data():
    script = Script(([X, END], "stop"), ([Y, END], "stop"))
    (episode,), _ = play(script)
    sample = episode.sample()
    assert sample.response == "y"
    assert [turn["role"] for turn in sample.turns] == ["assistant", "user", "assistant"]
    assert (sample.num_tokens, sample.finish_reason, sample.state) == (4, "stop", {"count": 2})


def test_a_prompt_over_the_limit_is_an_error_that_says_the_ways_out():
    with pytest.raises(UserError, match=r"task 't' has 2 tokens, over sampling.max_prompt_tokens=1.*overlong_prompt"):
        play(Script(), limit=1)


def test_skipping_or_cutting_long_prompts_is_counted():
    tasks = [Task(id="0", prompt="abc"), Task(id="1", prompt="a")]
    silent = Talk()
    silent.rounds = 0
    script = Script(([X], "stop"))
    episodes, metrics = play(script, environment=silent, tasks=tasks, limit=2, overlong="skip")
    assert [e.task.id for e in episodes] == ["1"]
    assert metrics["prompt_length/num_skipped"].value == 1
    script = Script(([X], "stop"))
    episodes, metrics = play(script, environment=silent, tasks=tasks, limit=2, overlong="truncate_left")
    assert episodes[0].prompt == [B, C]
    assert metrics["prompt_length/num_truncated"].value == 1


def test_when_everything_is_skipped_there_are_no_episodes():
    episodes, metrics = play(Script(), limit=1, overlong="skip")
    assert episodes == []
    assert metrics["prompt_length/num_skipped"].value == 1


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(UserError, match="task 'e' has no tokens"):
        play(Script(), tasks=[Task(id="e", prompt="")])


def test_greedy_keeps_limits_and_stops():
    sampling = greedy(Sampling(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=3, stop=("x",), stop_token_ids=(2,)))
    assert sampling == Sampling(temperature=0.0, max_new_tokens=3, stop=("x",), stop_token_ids=(2,), exploring=False)


class RoutedScript(Script):
    """An engine that says of every token which expert read it: 100 x turn + place."""

    def __call__(self, requests, sampling):
        result = super().__call__(requests, sampling)
        for request, done in zip(requests, result.completions, strict=True):
            places = torch.arange(len(request.prompt) + len(done.tokens) - 1, dtype=torch.int16)
            done.routed_experts = (100 * len(self.requests) + places)[:, None, None]
        return result


def test_tokens_keep_the_experts_that_they_were_sampled_with():
    """The second turn reads the first again; of that only the token that nobody had read before is news."""
    (episode,), _ = play(RoutedScript(([X, END], "stop"), ([Y, END], "stop")))
    made = episode.trajectory()
    assert made.routed_experts is not None
    # prompt a b, then x END, the other side's ?, and y END, of which the last was never read
    assert made.routed_experts.flatten().tolist() == [100, 101, 102, 203, 204, 205, 32767]
    assert len(made.routed_experts) == len(made.prompt) + len(made.response)


def test_an_episode_becomes_columns_of_the_types_that_batches_have_and_keeps_its_text() -> None:
    silent = Talk()
    silent.rounds = 0
    (episode,), _ = play(Script(([A, B, END], "stop")), environment=silent)
    made = episode.trajectory()
    assert {name: getattr(made, name).dtype for name in Batch.TOKEN_COLUMNS} == Batch.TOKEN_COLUMNS
    assert made.response.tolist() == [A, B, END]
    assert made.action_mask.tolist() == [True] * 3
    assert made.rollout_logprobs.tolist() == [-1.0] * 3
    assert made.versions.tolist() == [4] * 3
    assert made.metadata["text"] == TOKENIZER.decode([A, B, END], skip_special_tokens=True)
    (longer,), _ = play(Script(([A, END], "stop"), ([B, END], "stop")), environment=Talk())
    assert "text" not in longer.trajectory().metadata
    empty = type(episode)(episode.task, 0, 0, [A]).trajectory()
    assert {name: getattr(empty, name).dtype for name in Batch.TOKEN_COLUMNS} == Batch.TOKEN_COLUMNS
