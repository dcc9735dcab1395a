"""GSPO: one ratio and one clip a response, and the token variant that shares both."""

import math

import pytest
import torch

from rollstock.algorithms.gspo import GSPO, GSPOConfig

MASKS = [[1, 0, 1], [1, 1, 1], []]


@pytest.fixture
def drifted():
    """Log ratios of means 0.2, on action tokens, and -0.1; the observation's is far away."""
    return torch.tensor([[0.3, 7.0, 0.1], [-0.3, 0.3, -0.3], [0.0, 0.0, 0.0]], dtype=torch.float64)


def columns(advantages):
    return {"advantages": torch.tensor(advantages), "old_logprobs": torch.zeros(3, 3)}


def test_the_loss_is_the_mean_over_responses_of_the_clipped_sequence_ratio(make_batch, make_micro, drifted):
    micro = make_micro(
        make_batch(MASKS, [0.0] * 3), drifted, **columns([[1.0, 0.0, 1.0], [-2.0, -2.0, -2.0], [0.0] * 3])
    )
    loss = GSPO(GSPOConfig(clip=0.2, clip_high=0.3)).loss(micro)
    assert float(loss.value.detach()) == pytest.approx((-math.exp(0.2) + 2 * math.exp(-0.1)) / 2)
    assert loss.metrics["actor/pg_clipfrac"].value == 0
    loss.value.backward()
    first, second = -math.exp(0.2) / 2 / 2, 2 * math.exp(-0.1) / 3 / 2
    assert drifted.grad[0].tolist() == pytest.approx([first, 0.0, first])  # an observation has no part in it
    assert drifted.grad[1].tolist() == pytest.approx([second] * 3)
    assert drifted.grad[2].tolist() == [0.0] * 3


def test_a_clip_takes_the_whole_response_and_only_on_the_side_that_it_is_pushed_to(make_batch, make_micro, drifted):
    micro = make_micro(make_batch(MASKS, [0.0] * 3), drifted, **columns([[1.0, 0.0, 1.0], [2.0] * 3, [0.0] * 3]))
    loss = GSPO(GSPOConfig(clip=0.05, clip_high=0.1)).loss(micro)
    assert float(loss.value.detach()) == pytest.approx((-1.1 - 2 * math.exp(-0.1)) / 2)
    assert loss.metrics["actor/pg_clipfrac"].value == pytest.approx(2 / 5)
    loss.value.backward()
    assert drifted.grad[0].tolist() == [0.0] * 3
    assert (drifted.grad[1] < 0).all()


@pytest.mark.parametrize("aggregation", ["seq_mean_token_mean", "token_mean", "seq_mean_token_sum"])
def test_both_levels_are_one_where_a_response_shares_its_advantage(make_batch, make_micro, drifted, aggregation):
    results = []
    for level in ("sequence", "token"):
        logprobs = drifted.clone()
        micro = make_micro(make_batch(MASKS, [0.0] * 3), logprobs, **columns([[1.0, 0.0, 1.0], [-2.0] * 3, [0.0] * 3]))
        options = GSPOConfig(clip=0.2, clip_high=0.3, level=level, aggregation=aggregation)
        loss = GSPO(options).loss(micro)
        loss.value.backward()
        results.append((float(loss.value.detach()), logprobs.grad))
    assert results[0][0] == pytest.approx(results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])


def test_the_token_level_gives_each_token_its_own_advantage(make_batch, make_micro):
    logprobs = torch.tensor([[0.1, 0.3]], dtype=torch.float64)
    micro = make_micro(
        make_batch([[1, 1]], [0.0]),
        logprobs,
        advantages=torch.tensor([[1.0, -3.0]]),
        old_logprobs=torch.zeros(1, 2),
    )
    GSPO(GSPOConfig(clip=0.9, clip_high=0.9, level="token")).loss(micro).value.backward()
    assert logprobs.grad[0].tolist() == pytest.approx([-math.exp(0.2) / 2, 3 * math.exp(0.2) / 2])
    logprobs.grad = None
    GSPO(GSPOConfig(clip=0.9, clip_high=0.9)).loss(micro).value.backward()
    assert logprobs.grad[0].tolist() == pytest.approx([math.exp(0.2) / 2] * 2)  # the mean advantage is -1


def test_the_default_range_is_that_of_the_paper():
    assert (GSPO().config.clip, GSPO().config.upper, GSPO().config.aggregation) == (3e-4, 4e-4, "seq_mean_token_mean")
