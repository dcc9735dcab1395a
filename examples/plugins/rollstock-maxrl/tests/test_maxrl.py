"""MaxRL: its formula by hand, its estimator against the likelihood, and the promises of an algorithm."""

import pytest
import torch
from rollstock import Batch, ConfigError
from rollstock.testing import check_algorithm, make_trajectory

from rollstock_maxrl import MaxRL, MaxRLConfig, maxrl_advantages


def test_it_keeps_the_promises_of_an_algorithm():
    check_algorithm(MaxRL)
    check_algorithm("maxrl", options={"group_size": 2, "clip": 0.5})


@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [
        ([1, 0, 0, 0], [3, -1, -1, -1]),  # mean 1/4
        ([1, 1, 1, 0], [1 / 3, 1 / 3, 1 / 3, -1]),  # mean 3/4
        ([1, 1, 1, 1], [0, 0, 0, 0]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([1], [0]),
    ],
)
def test_an_advantage_is_the_centred_reward_over_the_mean(rewards, advantages):
    found = maxrl_advantages(torch.tensor(rewards).float(), torch.zeros(len(rewards), dtype=torch.int64))
    assert torch.allclose(found, torch.tensor(advantages).float())


def test_groups_may_be_mixed():
    scores, groups = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([9, 2, 9, 2])
    assert maxrl_advantages(scores, groups).tolist() == [1.0, 1.0, -1.0, -1.0]


def test_the_estimator_follows_the_truncated_likelihood():
    """The mean gradient by the logit of p is that of -sum over k of (1 - p)^k / k, for k below the group size.

    (A group without a right sample gets no baseline either; with one, k would go up to the group size itself.)
    """
    size, p = 4, 0.3
    draws = torch.tensor([[(n >> k) & 1 for k in range(size)] for n in range(2**size)]).float()  # every group there is
    chances = torch.where(draws == 1, p, 1 - p).prod(dim=1)
    groups = torch.arange(len(draws))[:, None].expand_as(draws)
    advantages = maxrl_advantages(draws.flatten(), groups.flatten()).view_as(draws)
    scores = draws - p  # d log-prob / d logit of a Bernoulli
    estimated = (chances * (advantages * scores).mean(dim=1)).sum()
    exact = sum((1 - p) ** (k - 1) for k in range(1, size)) * p * (1 - p)
    assert float(estimated) == pytest.approx(exact, rel=1e-5)


def test_what_is_rarely_solved_counts_more_than_under_grpo():
    rare = maxrl_advantages(torch.tensor([1.0, *[0.0] * 7]), torch.zeros(8, dtype=torch.int64))
    common = maxrl_advantages(torch.tensor([*[1.0] * 7, 0.0]), torch.zeros(8, dtype=torch.int64))
    assert float(rare[0]) == 7.0
    assert float(common[0]) == pytest.approx(1 / 7)


def test_unsolved_groups_are_counted():
    rows = [make_trajectory(2, group=g, reward=r) for g, r in ((0, 0.0), (0, 0.0), (1, 1.0), (1, 0.0))]
    metric = MaxRL(MaxRLConfig()).after_update(Batch.from_trajectories(rows), {})["maxrl/unsolved_groups"]
    assert metric.value == 0.5


def test_greedy_sampling_is_refused(rollstock_run):
    with pytest.raises(ConfigError, match="temperature"):
        rollstock_run({"algorithm": "maxrl"}, ["sampling.temperature=0"])


def test_it_trains(rollstock_run):
    assert rollstock_run({"algorithm": {"name": "maxrl", "group_size": 4}}).status == "finished"
