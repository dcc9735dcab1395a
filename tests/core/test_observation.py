"""What a step records of its batch."""

import pytest
import torch

from rollstock import Batch, Sample, Task, Trajectory
from rollstock.observation import batch_metrics, rollout_rows, score_metrics
from rollstock.tokens import character_tokenizer

TOKENIZER = character_tokenizer("abc")
A, B, C = 1, 2, 3


def trajectory(response, *, group=0, reward=1.0, mask=None, prompt=(A,)):
    length = len(response)
    return Trajectory(
        prompt=torch.tensor(prompt),
        response=torch.tensor(response, dtype=torch.int64),
        action_mask=torch.tensor([True] * length if mask is None else mask, dtype=torch.bool),
        rollout_logprobs=torch.zeros(length),
        versions=torch.zeros(length, dtype=torch.int64),
        group=group,
        task_id=f"t{group}",
        reward=reward,
        metadata={
            "sample": Sample(task=Task(id="t", prompt="a", answer="b"), response=""),
            "rewards": {"rule": reward},
        },
    )


def batch(*trajectories):
    return Batch.from_trajectories(trajectories)


def values(metrics):
    return {name: metric.value for name, metric in metrics.items()}


def test_scores_are_those_of_samples_that_have_one():
    metrics = score_metrics(
        batch(
            trajectory([B], reward=1.0),
            trajectory([B], reward=None),
            trajectory([B], group=1, reward=0.5),
            trajectory([B], group=1, reward=0.0),
        )
    )
    assert values(metrics) == pytest.approx(
        {
            "reward/mean": 0.5,
            "reward/max": 1.0,
            "reward/min": 0.0,
            "reward/std": (1 / 6) ** 0.5,
            "reward/uniform_groups": 0.5,
        }
    )
    assert metrics["reward/mean"].weight == 3


def test_without_any_score_there_is_nothing_to_say():
    assert score_metrics(batch(trajectory([B], reward=None))) == {}
    assert score_metrics(batch()) == {}


def test_lengths_count_prompt_and_response_and_advantages_only_actions():
    made = batch(trajectory([A, B, C], mask=[True, False, True]), trajectory([], prompt=(A, A)))
    made["advantages"] = torch.tensor([[1.0, 0.0, -2.0], [0.0, 0.0, 0.0]])
    found = values(batch_metrics(made))
    assert found["sequence_length/min"] == 2
    assert found["sequence_length/max"] == 4
    assert found["sequence_length/mean"] == 3
    assert found["train/num_trajectories"] == 2
    assert found["train/num_action_tokens"] == 2
    assert found["response_length/num_empty"] == 1
    assert found["critic/advantages/mean"] == -0.5
    assert (found["critic/advantages/max"], found["critic/advantages/min"]) == (1.0, -2.0)
    assert "critic/values/mean" not in found


def test_a_batch_of_empty_responses_has_no_mean_of_nothing():
    made = batch(trajectory([]))
    made["advantages"] = torch.zeros(1, 0)
    found = values(batch_metrics(made))
    assert found["train/num_action_tokens"] == 0
    assert not any(name.startswith("critic/") for name in found)


def test_each_trajectory_is_a_row():
    made = batch(trajectory([B, C], mask=[True, False]), trajectory([C], group=1, reward=None))
    made["advantages"] = torch.tensor([[0.5, 0.0], [-1.5, 0.0]])
    first, second = rollout_rows(made, 3, TOKENIZER, 0)
    assert first == {
        "step": 3,
        "group": 0,
        "task_id": "t0",
        "prompt": "a",
        "response": "bc",
        "answer": "b",
        "reward": 1.0,
        "rewards": {"rule": 1.0},
        "finish_reason": "stop",
        "num_tokens": 1,
        "advantage": 0.5,
    }
    assert (second["reward"], second["advantage"]) == (None, -1.5)


def test_before_advantages_there_are_none():
    assert rollout_rows(batch(trajectory([B])), 1, TOKENIZER, 0)[0]["advantage"] is None


@pytest.mark.parametrize(("limit", "count"), [(0, 3), (2, 2), (9, 3)])
def test_rows_may_be_limited(limit, count):
    assert len(rollout_rows(batch(*[trajectory([B])] * 3), 1, TOKENIZER, limit)) == count


def test_an_empty_batch_has_no_rows():
    assert rollout_rows(batch(), 1, TOKENIZER, 0) == []


def test_a_response_whose_text_is_known_is_not_decoded_again_nor_a_prompt_twice():
    rows = [trajectory([B, C]), trajectory([B]), trajectory([C], group=1, prompt=(B, B))]
    rows[0].metadata["text"] = "as it was decoded"
    decoded = []

    class Counting:
        is_fast = True

        def decode(self, ids, **options):
            decoded.append([int(i) for i in ids])
            return TOKENIZER.decode(ids, **options)

    found = rollout_rows(batch(*rows), 1, Counting(), 0)
    assert [row["response"] for row in found] == ["as it was decoded", "b", "c"]
    assert [row["prompt"] for row in found] == ["a", "a", "bb"]
    assert decoded == [[A], [B], [B, B], [C]]
