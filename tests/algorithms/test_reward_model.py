"""Reward modelling: Bradley and Terry's loss of pairs, by hand."""

import math

import pytest
import torch

from rollstock import MicroBatch, Totals
from rollstock.algorithms.reward_model import RewardModel, RewardModelConfig, last_scores


def loss_of(batch, said, **options):
    micro = MicroBatch(batch, Totals.of(batch, response_limit=4), {"token_scores": said})
    return RewardModel(RewardModelConfig(**options)).loss(micro)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.fixture
def pairs(make_batch):
    """Two pairs; the first's responses are chosen first, the second's the other way round."""
    return make_batch([[1, 1], [1, 1, 1], [1], [1, 1]], [1.0, 0.0, 0.0, 1.0], groups=[0, 0, 1, 1])


SAID = [[9.0, 2.0, 9.0], [9.0, 9.0, 0.5], [1.0, 9.0, 9.0], [9.0, 0.0, 9.0]]  # read: 2 over 0.5, and 0 over 1


def test_the_loss_is_the_mean_over_pairs_of_their_log_probability(pairs):
    said = torch.tensor(SAID, requires_grad=True)
    loss = loss_of(pairs, said)
    assert float(loss.value.detach()) == pytest.approx(-(math.log(sigmoid(1.5)) + math.log(sigmoid(-1.0))) / 2)
    loss.value.backward()
    first, second = (1 - sigmoid(1.5)) / 2, (1 - sigmoid(-1.0)) / 2
    expected = torch.zeros(4, 3)
    expected[0, 1], expected[1, 2], expected[2, 0], expected[3, 1] = -first, first, second, -second
    torch.testing.assert_close(said.grad, expected)


def test_accuracy_and_margin_are_recorded(pairs):
    metrics = loss_of(pairs, torch.tensor(SAID)).metrics
    assert metrics["rewards/accuracies"].value == 0.5
    assert metrics["rewards/margins"].value == pytest.approx((1.5 - 1.0) / 2)
    assert metrics["rewards/chosen"].value == pytest.approx(1.0)
    assert metrics["actor/loss"].value == pytest.approx(float(loss_of(pairs, torch.tensor(SAID)).value))


def test_the_score_is_read_at_the_last_token_of_the_policy(make_batch):
    batch = make_batch([[1, 0, 1, 0], [0, 0], [1, 1]], [1.0, 0.0, 0.0])
    said = torch.arange(12.0).reshape(3, 4)
    assert last_scores(said, batch.mask).tolist() == [2.0, 0.0, 9.0]


def test_a_response_without_tokens_makes_no_pair(make_batch):
    batch = make_batch([[1, 1], [], [1], [1]], [1.0, 0.0, 1.0, 0.0], groups=[0, 0, 1, 1])
    said = torch.tensor([[0.0, 5.0], [7.0, 7.0], [1.0, 0.0], [0.0, 0.0]], requires_grad=True)
    loss = loss_of(batch, said)
    loss.value.backward()
    assert said.grad[:2].abs().sum() == 0
    assert said.grad[2, 0] < 0 < said.grad[3, 0]
    assert loss.metrics["rewards/accuracies"].value == 1.0


def test_a_constant_on_all_scores_changes_only_the_centred_loss(pairs):
    said = torch.tensor(SAID)
    assert float(loss_of(pairs, said + 3).value) == pytest.approx(float(loss_of(pairs, said).value), rel=1e-5)
    plain, centred = loss_of(pairs, said), loss_of(pairs, said, centre_coef=0.1)
    assert float(centred.value - plain.value) == pytest.approx(0.1 * (2.5**2 + 1.0**2) / 2)


def test_a_margin_asks_for_more_and_smoothing_for_less(pairs):
    said = torch.tensor(SAID)
    expected = -(math.log(sigmoid(1.0)) + math.log(sigmoid(-1.5))) / 2
    assert float(loss_of(pairs, said, margin=0.5).value) == pytest.approx(expected)
    smooth = [0.9 * math.log(sigmoid(z)) + 0.1 * math.log(sigmoid(-z)) for z in (1.5, -1.0)]
    assert float(loss_of(pairs, said, label_smoothing=0.1).value) == pytest.approx(-sum(smooth) / 2)
