"""The role that scores: weights, abstention, failures, and names."""

import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from rollstock import Sample, Task, UserError
from rollstock.roles.reward import RewardWorker
from rollstock.testing import installed

REWARD = """
from dataclasses import dataclass
from rollstock import Reward, hookimpl, option

@dataclass(kw_only=True)
class AnswerConfig:
    key: str = option("a", "which of a task's answers is the reward")

class Answer(Reward[AnswerConfig]):
    def setup(self, environment):
        self.bonus = environment.bonus

    def score(self, sample):
        said = sample.task.answer[self.config.key]
        if said == "raise":
            raise RuntimeError("no judgement")
        return said if said is None or isinstance(said, str) else said + self.bonus

@hookimpl
def rollstock_reward():
    return Answer
"""
ENVIRONMENT = """
from rollstock import Environment, NoOptions, Task, hookimpl

class World(Environment[NoOptions]):
    def setup(self, seed):
        self.bonus = seed

    def num_tasks(self, split):
        return None

    def task(self, split, index):
        return Task(id="0", prompt="")

@hookimpl
def rollstock_environment():
    return World
"""


@contextmanager
def worker(*rewards, seed: int = 0) -> Iterator[RewardWorker]:
    with ExitStack() as stack:
        stack.enter_context(installed("reward", "answer", textwrap.dedent(REWARD)))
        stack.enter_context(installed("environment", "world", textwrap.dedent(ENVIRONMENT)))
        made = RewardWorker(
            environment={"name": "world"},
            rewards=[{"name": "answer", **options} for options in rewards],
            blocked=[],
            seed=seed,
            timeout_s=20.0,
            num_processes=1,
        )
        stack.callback(made.close)
        yield made


def samples(*answers):
    return [Sample(task=Task(id=str(i), prompt="", answer=answer), response="") for i, answer in enumerate(answers)]


def test_rewards_are_weighted_added_up_and_kept_apart_by_name():
    with worker({"key": "a", "weight": 2.0}, {"key": "b"}) as role:
        scores = role.score(samples({"a": 1.0, "b": 0.5}, {"a": 0.0, "b": None}, {"a": None, "b": None}), 1)
    assert scores.totals == [2.5, 0.0, None]
    assert scores.parts == [
        {"answer": 1.0, "answer_2": 0.5},
        {"answer": 0.0, "answer_2": None},
        {"answer": None, "answer_2": None},
    ]
    found = {name: metric.value for name, metric in scores.metrics.items()}
    assert found == {
        "reward/num_abstained": 3,
        "reward/num_raised": 0,
        "reward/num_timed_out": 0,
        "reward/num_unscored": 1,
        "reward/answer_mean": 0.5,
        "reward/answer_2_mean": 0.5,
    }


def test_one_part_that_failed_voids_the_sum():
    with worker({"key": "a"}, {"key": "b"}) as role:
        scores = role.score(samples({"a": 1.0, "b": "raise"}, {"a": 1.0, "b": "a text"}, {"a": 1.0, "b": 1.0}), 1)
    assert scores.totals == [None, None, 2.0]
    assert scores.metrics["reward/num_raised"].value == 2
    assert scores.metrics["reward/num_unscored"].value == 2


def test_a_single_reward_is_not_recorded_twice():
    with worker({"key": "a"}) as role:
        scores = role.score(samples({"a": 1}), 1)
        nothing = role.score([], 1)
    assert scores.totals == [1.0]
    assert "reward/answer_mean" not in scores.metrics
    assert (nothing.totals, nothing.parts) == ([], [])
    assert nothing.metrics["reward/num_unscored"].value == 0


def test_the_environment_is_set_up_with_the_same_seed_everywhere():
    with worker({"key": "a"}, seed=5) as role:
        assert role.score(samples({"a": 1}), 1).totals == [6.0]


def test_an_option_that_a_reward_does_not_have_is_the_users_mistake():
    with pytest.raises(UserError, match="kye"), worker({"kye": "a"}):
        pytest.fail("it was started")
