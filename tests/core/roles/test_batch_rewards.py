"""Rewards that score batches: one process, whole batches, and the sample at fault found and named."""

import logging
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from rollstock import Sample, Task, UserError
from rollstock.roles.reward import RewardWorker
from rollstock.testing import installed

REWARDS = """
import os
import time
from dataclasses import dataclass
from rollstock import BatchReward, Reward, hookimpl, option

@dataclass(kw_only=True)
class ManyConfig:
    batch_size: int = option(4, "samples at a time")
    refuse: bool = option(False, "refuse to start")
    say: str = option("length", "what to answer with: length, pid, size, or device")

class Many(BatchReward[ManyConfig]):
    def setup(self, environment):
        if self.config.refuse:
            from rollstock import ConfigError
            raise ConfigError("there is no such model")
        self.environment = environment

    def score_batch(self, samples):
        texts = [sample.response for sample in samples]
        if "raise" in texts:
            raise RuntimeError("cannot read this")
        if "hang" in texts:
            time.sleep(600)
        if "die" in texts:
            os._exit(9)
        if "short" in texts:
            return [1.0]
        answers = {
            "length": lambda text: None if not text else float("nan") if text == "nan" else len(text),
            "pid": lambda text: os.getpid(),
            "size": lambda text: len(texts),
            "device": lambda text: float(str(self.device.torch_device()) == "cpu"),
        }
        return [answers[self.config.say](text) for text in texts]

@hookimpl
def rollstock_reward():
    return Many
"""
ONE = """
from rollstock import NoOptions, Reward, hookimpl

class One(Reward[NoOptions]):
    def score(self, sample):
        return 100.0

@hookimpl
def rollstock_reward():
    return One
"""


@contextmanager
def worker(*rewards, timeout_s: float = 30.0) -> Iterator[RewardWorker]:
    with ExitStack() as stack:
        for name, source in (("many", REWARDS), ("one", ONE)):
            stack.enter_context(installed("reward", name, textwrap.dedent(source)))
        made = RewardWorker(
            environment={"name": "arithmetic"},
            rewards=list(rewards),
            blocked=[],
            seed=0,
            timeout_s=timeout_s,
            num_processes=2,
            device={"name": "cpu"},
        )
        stack.callback(made.close)
        yield made


def samples(*responses):
    return [Sample(task=Task(id=f"t{i}", prompt=""), response=text) for i, text in enumerate(responses)]


def count(scores, name):
    return scores.metrics[f"reward/num_{name}"].value


def test_batches_are_cut_in_order_and_their_scores_come_back_in_it():
    with worker({"name": "many"}) as role:
        scores = role.score(samples("a", "bb", "", "dddd", "eeeee", "ffffff"), 1)
    assert scores.totals == [1.0, 2.0, None, 4.0, 5.0, 6.0]
    assert count(scores, "abstained") == 1


def test_all_batch_rewards_live_in_one_process_on_the_runs_device():
    with worker(
        {"name": "many", "say": "pid"}, {"name": "many", "say": "size"}, {"name": "many", "say": "device"}
    ) as role:
        parts = role.score(samples(*"abcdef"), 1).parts
    assert len({part["many"] for part in parts}) == 1
    assert [part["many_2"] for part in parts] == [4, 4, 4, 4, 2, 2]
    assert {part["many_3"] for part in parts} == {1.0}


def test_rewards_of_both_kinds_are_weighted_and_added_up():
    with worker({"name": "one", "weight": 0.01}, {"name": "many", "weight": 2.0}) as role:
        scores = role.score(samples("a", "bb"), 1)
        nothing = role.score([], 1)
    assert scores.totals == [3.0, 5.0]
    assert scores.parts[0] == {"one": 100.0, "many": 1.0}
    assert scores.metrics["reward/many_mean"].value == 1.5
    assert nothing.totals == []


def test_the_sample_that_raises_is_named_and_its_neighbours_keep_their_scores(caplog):
    with worker({"name": "many"}) as role, caplog.at_level(logging.WARNING):
        scores = role.score(samples("a", "bb", "raise", "dddd", "eeeee"), 3)
    assert scores.totals == [1.0, 2.0, None, 4.0, 5.0]
    assert count(scores, "raised") == 1
    assert "reward 'many' of 4 samples of 't0', 't1', 't2', 't3' (step 3) raised" in caplog.text
    assert "task 't2'" in caplog.text
    assert "cannot read this" in caplog.text


@pytest.mark.parametrize(("response", "reason"), [("nan", "not finite"), ("short", "gave 1 values for 4 samples")])
def test_what_is_no_score_is_an_error(response, reason, caplog):
    with worker({"name": "many"}) as role, caplog.at_level(logging.WARNING):
        scores = role.score(samples("a", response, "cc", "d"), 1)
    assert scores.totals[2] == 2.0
    assert reason in caplog.text


def test_a_batch_that_hangs_is_ended_and_the_run_goes_on(caplog):
    with worker({"name": "many"}, timeout_s=1.5) as role, caplog.at_level(logging.WARNING):
        scores = role.score(samples("a", "hang", "c", "d", "eeeee"), 2)
        again = role.score(samples("a"), 3)
    assert scores.totals == [None, None, None, None, 5.0]
    assert count(scores, "timed_out") == 4
    assert again.totals == [1.0]
    assert "'t1'" in caplog.text


def test_a_process_that_dies_loses_its_batch_alone():
    with worker({"name": "many"}) as role:
        scores = role.score(samples("a", "die", "c", "d", "eeeee"), 2)
    assert scores.totals == [None, None, None, None, 5.0]
    assert count(scores, "raised") == 4


def test_what_a_batch_reward_refuses_is_the_users_mistake():
    with pytest.raises(UserError, match="there is no such model"), worker({"name": "many", "refuse": True}):
        pytest.fail("it was started")
