"""Pass@k: advantages by sets of k, against the closed form, against counting every set, and against limits."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollstock.algorithms.pass_at_k import PassAtK, PassAtKConfig, lead_of_sets, loss_without

REWARDS = st.lists(st.sampled_from([0.0, 0.3, 1.0, -2.0, 1e-3]), min_size=2, max_size=7)


def sets_with(size: int, k: int) -> tuple[list[tuple[int, ...]], list[list[tuple[int, ...]]]]:
    every = list(itertools.combinations(range(size), k))
    return every, [[chosen for chosen in every if j in chosen] for j in range(size)]


@given(rewards=REWARDS, data=st.data())
def test_sets_with_a_sample_are_compared_with_all_sets(rewards, data):
    k = data.draw(st.integers(1, len(rewards) - 1))
    every, with_member = sets_with(len(rewards), k)
    best = [max(rewards[i] for i in chosen) for chosen in every]
    mean = sum(best) / len(best)
    deviation = math.sqrt(sum((b - mean) ** 2 for b in best) / len(best))
    expected = [
        (sum(max(rewards[i] for i in chosen) for chosen in sets) / len(sets) - mean) / (deviation + 1e-6)
        for sets in with_member
    ]
    found = lead_of_sets(torch.tensor(rewards, dtype=torch.float64), k)
    assert found.tolist() == pytest.approx(expected, abs=1e-8)


@given(rewards=REWARDS, data=st.data())
def test_what_a_set_loses_without_a_sample(rewards, data):
    k = data.draw(st.integers(2, len(rewards)))
    _, with_member = sets_with(len(rewards), k)
    expected = [
        sum(max(rewards[i] for i in s) - max(rewards[i] for i in s if i != j) for s in sets) / len(sets)
        for j, sets in enumerate(with_member)
    ]
    found = loss_without(torch.tensor(rewards, dtype=torch.float64), k)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("size", "correct", "k"), [(8, 3, 4), (8, 1, 4), (16, 5, 8), (8, 2, 2)])
def test_rewards_of_0_and_1_have_the_papers_closed_form(make_batch, size, correct, k):
    wrong = size - correct
    mean = 1 - math.comb(wrong, k) / math.comb(size, k)
    deviation = math.sqrt(mean * (1 - mean))
    right = (1 - mean) / deviation
    other = (1 - mean - math.comb(wrong - 1, k - 1) / math.comb(size - 1, k - 1)) / deviation
    batch = make_batch([[1]] * size, [1.0] * correct + [0.0] * wrong)
    advantages = PassAtK(PassAtKConfig(group_size=size, k=k)).advantages(batch)[:, 0]
    assert advantages.tolist() == pytest.approx([right] * correct + [other] * wrong, abs=1e-5)
    assert float(advantages.sum()) == pytest.approx(0.0, abs=1e-5)


def test_a_prompt_of_which_every_set_is_solved_teaches_nothing(make_batch):
    batch = make_batch([[1]] * 6, [1.0, 1.0, 1.0, 0.0, 1.0, 0.3])
    assert PassAtK(PassAtKConfig(group_size=6, k=3)).advantages(batch).abs().max() == 0


def test_a_rarely_solved_prompt_counts_more_than_with_one_try(make_batch):
    batch = make_batch([[1]] * 8, [1.0] + [0.0] * 7)
    often = make_batch([[1]] * 8, [1.0] * 4 + [0.0] * 4)
    algorithm = PassAtK(PassAtKConfig(group_size=8, k=4))
    assert algorithm.advantages(batch)[0, 0] > 4 * algorithm.advantages(often)[0, 0]


def test_left_out_of_all_samples_only_the_best_one_counts_by_its_lead(make_batch):
    batch = make_batch([[1]] * 4, [0.25, 1.0, 0.5, 0.0])
    options = {"group_size": 4, "k": 4, "estimator": "leave_one_out"}
    assert PassAtK(PassAtKConfig(**options)).advantages(batch)[:, 0].tolist() == [0.0, 0.5, 0.0, 0.0]
    deviation = float(batch.scores.std()) + 1e-6
    scaled = PassAtK(PassAtKConfig(**options, scale="unbiased")).advantages(batch)
    assert scaled[:, 0].tolist() == pytest.approx([0.0, 0.5 / deviation, 0.0, 0.0])


def test_a_group_that_lost_samples_is_taken_at_the_largest_k_that_it_allows(make_batch):
    batch = make_batch([[1]] * 3, [1.0, 0.0, 0.0])
    left = PassAtK(PassAtKConfig(group_size=8, k=4)).advantages(batch)
    assert torch.equal(left, PassAtK(PassAtKConfig(group_size=8, k=2)).advantages(batch))
    assert (left[0] > 0).all()
    two = {"group_size": 8, "k": 8, "estimator": "leave_one_out"}
    assert PassAtK(PassAtKConfig(**two)).advantages(batch)[:, 0].tolist() == [1.0, 0.0, 0.0]


def test_without_k_half_of_a_group_counts(make_batch):
    batch = make_batch([[1]] * 8, [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    half = PassAtK(PassAtKConfig(group_size=8, k=4)).advantages(batch)
    assert torch.equal(PassAtK(PassAtKConfig(group_size=8)).advantages(batch), half)
    assert PassAtK(PassAtKConfig(group_size=2)).config.tries(2) == 1
    assert PassAtK(PassAtKConfig(group_size=2, estimator="leave_one_out")).config.tries(2) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 9}, r"k \(9\) is more than the samples per prompt \(group_size: 8\)"),
        ({"k": 8}, r"k is group_size \(8\), so that a prompt has one set of k and nothing to compare it with"),
        ({"scale": "biased"}, "scale is for estimator: leave_one_out"),
        ({"dual_clip": 1}, "dual_clip must be above 1"),
    ],
)
def test_options_that_do_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PassAtKConfig(group_size=8, **options)
