"""What a reward process serves."""

import math

import numpy as np
import pytest
import torch

from rollstock import NoOptions, PluginError, Reward, Sample, Task
from rollstock.scoring import checked_reward, make_scorer
from rollstock.testing import installed


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (True, 1.0),
        (-0.5, -0.5),
        (np.float32(0.25), 0.25),
        (torch.tensor(2.0), 2.0),
        (None, None),
    ],
)
def test_a_number_of_any_sort_is_a_reward_and_none_abstains(value, expected):
    found = checked_reward(value, "mine")
    assert found == expected
    assert found is None or type(found) is float


@pytest.mark.parametrize("value", ["1.0", [1.0], {"reward": 1.0}, object()])
def test_anything_else_is_refused_by_its_type(value):
    with pytest.raises(TypeError, match=f"reward 'mine' returned {type(value).__name__}, not a number or None"):
        checked_reward(value, "mine")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64("nan")])
def test_a_number_must_be_finite(value):
    with pytest.raises(ValueError, match="reward 'mine' returned .*, which is not finite"):
        checked_reward(value, "mine")


class Counts(Reward[NoOptions]):
    """The length of the response, and how many tasks the environment has."""

    def setup(self, environment):
        self.environment = environment

    def score(self, sample):
        return len(sample.response) + 1000 * (self.environment.plugin_name == "arithmetic")


def test_each_reward_is_made_once_with_the_environment_and_asked_by_its_place():
    sample = Sample(task=Task(id="1", prompt="1+1=", answer="2"), response="2")
    with installed("reward", "counts", Counts):
        score = make_scorer({"name": "arithmetic"}, [{"name": "counts"}, {"name": "environment"}], [], 0)
    assert score((0, sample)) == 1001.0
    assert score((1, sample)) == 1.0


def test_a_blocked_reward_is_not_made():
    with pytest.raises(PluginError, match="reward:environment is blocked"):
        make_scorer({"name": "arithmetic"}, [{"name": "environment"}], ["environment"], 0)
