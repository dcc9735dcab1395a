"""Pairs found in a batch, and their losses: closed forms, gradients, and the limits that the papers state."""

import math

import pytest
import torch

from rollstock.algorithms.preference import preference_loss, preferred_pairs

YES = torch.ones(5, dtype=torch.bool)


def pairs_of(scores, groups, valid=None):
    found = preferred_pairs(
        torch.tensor(scores),
        torch.tensor(groups),
        torch.ones(len(scores), dtype=torch.bool) if valid is None else valid,
    )
    return list(zip(found.better.tolist(), found.worse.tolist(), found.weights.tolist(), strict=True))


def test_the_better_response_of_each_group_is_found_wherever_it_stands():
    assert pairs_of([0.0, 1.0, 1.0, 0.0], [7, 7, 3, 3]) == [(1, 0, 1.0), (2, 3, 1.0)]
    assert pairs_of([1.0, 1.0, 0.0, 0.0], [1, 2, 2, 1]) == [(0, 3, 1.0), (1, 2, 1.0)]


def test_ranked_responses_make_all_their_pairs_which_together_count_as_one():
    third = pytest.approx(1 / 3)
    assert pairs_of([1.0, 0.5, 0.0, 1.0, 0.0], [0, 0, 0, 1, 1]) == [
        (0, 1, third),
        (0, 2, third),
        (1, 2, third),
        (3, 4, 1.0),
    ]


def test_a_lone_response_equal_scores_and_empty_responses_make_no_pair():
    assert pairs_of([1.0, 0.5, 0.5], [0, 1, 1]) == []
    assert pairs_of([1.0, 0.0], [0, 0], torch.tensor([True, False])) == []
    assert pairs_of([], []) == []


def test_metrics_are_means_over_groups_not_over_pairs():
    scores, groups = torch.tensor([1.0, 0.5, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 1])
    metrics = preferred_pairs(scores, groups, YES).metrics(torch.tensor([3.0, 1.0, 2.0, 5.0, 5.0]))
    assert metrics["rewards/accuracies"].value == pytest.approx((2 / 3 + 0) / 2)  # equal ones are not in order
    assert metrics["rewards/margins"].value == pytest.approx(((2 + 1 - 1) / 3 + 0) / 2)
    assert metrics["rewards/chosen"].value == pytest.approx(((3 + 3 + 1) / 3 + 5) / 2)
    assert metrics["rewards/rejected"].value == pytest.approx(((1 + 2 + 2) / 3 + 5) / 2)
    assert metrics["rewards/margins"].weight == pytest.approx(2)


def test_metrics_of_no_pair_weigh_nothing():
    metrics = preferred_pairs(torch.ones(2), torch.zeros(2), YES[:2]).metrics(torch.zeros(2))
    assert {metric.weight for metric in metrics.values()} == {0.0}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kind": "sigmoid"}, math.log1p(math.exp(-0.5 * 1.2))),
        (
            {"kind": "sigmoid", "label_smoothing": 0.2},
            0.8 * math.log1p(math.exp(-0.6)) + 0.2 * math.log1p(math.exp(0.6)),
        ),
        (
            {"kind": "robust", "label_smoothing": 0.2},
            (0.8 * math.log1p(math.exp(-0.6)) - 0.2 * math.log1p(math.exp(0.6))) / 0.6,
        ),
        ({"kind": "hinge"}, 0.4),
        ({"kind": "ipo"}, (1.2 - 1.0) ** 2),
        ({"kind": "sigmoid", "margin": 0.25}, math.log1p(math.exp(-0.35))),
        ({"kind": "hinge", "margin": 0.25}, 0.65),
    ],
)
def test_losses_in_closed_form(options, expected):
    found = preference_loss(torch.tensor([1.2], dtype=torch.float64), beta=0.5, **options)
    assert found.tolist() == pytest.approx([expected], rel=1e-12)


def test_at_the_reference_a_pair_costs_the_logarithm_of_two():
    assert float(preference_loss(torch.zeros(1), beta=0.1, kind="sigmoid")) == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("kind", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.3), ("robust", 0.3), ("hinge", 0.0), ("ipo", 0.0)]
)
def test_gradients_agree_with_finite_differences(kind, smoothing):
    gaps = torch.tensor([-3.0, -0.4, 0.1, 2.0, 30.0], dtype=torch.float64, requires_grad=True)

    def loss(gaps):
        return preference_loss(gaps, beta=0.3, kind=kind, label_smoothing=smoothing)

    assert torch.autograd.gradcheck(loss, (gaps,))


def test_conservative_dpo_stops_where_the_reward_has_the_smoothed_odds():
    """Its gradient is 0 where sigmoid(beta * gap) is 1 - label_smoothing, and pulls back beyond."""
    smoothing, beta = 0.2, 0.5
    best = math.log((1 - smoothing) / smoothing) / beta
    gaps = torch.tensor([best - 1, best, best + 1], dtype=torch.float64, requires_grad=True)
    preference_loss(gaps, beta=beta, kind="sigmoid", label_smoothing=smoothing).sum().backward()
    assert gaps.grad[0] < 0
    assert float(gaps.grad[1]) == pytest.approx(0, abs=1e-12)
    assert gaps.grad[2] > 0


def test_robust_dpo_is_the_loss_of_clean_labels_on_average_over_flipped_ones():
    """arXiv:2403.00409: unbiased when labels are flipped with the probability that it is told."""
    gap, options = torch.tensor([0.7], dtype=torch.float64), {"beta": 0.5, "label_smoothing": 0.3}
    flipped = 0.7 * preference_loss(gap, kind="robust", **options) + 0.3 * preference_loss(
        -gap, kind="robust", **options
    )
    assert float(flipped) == pytest.approx(float(preference_loss(gap, beta=0.5, kind="sigmoid")), rel=1e-12)


def test_huge_gaps_overflow_nothing():
    gaps = torch.tensor([-1e6, 1e6], requires_grad=True)
    losses = preference_loss(gaps, beta=1.0, kind="sigmoid")
    losses.sum().backward()
    assert losses.tolist() == [1e6, 0.0]
    assert gaps.grad.tolist() == [-1.0, 0.0]


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="sigmoid, ipo, hinge, robust; got 'kto'"):
        preference_loss(torch.zeros(1), beta=1.0, kind="kto")
