"""GMPO: the geometric mean of ratios that were clipped one by one, in log space."""

import math

import pytest
import torch

from rollstock.algorithms.gmpo import GMPO, GMPOConfig
from rollstock.algorithms.gspo import GSPO, GSPOConfig


def run(make_batch, make_micro, config, log_ratios, advantages, masks):
    logprobs = torch.tensor(log_ratios, dtype=torch.float64)
    batch = make_batch(masks, [0.0] * len(masks))
    spread = torch.tensor(advantages)[:, None] * batch.mask
    loss = GMPO(config).loss(make_micro(batch, logprobs, advantages=spread, old_logprobs=torch.zeros(logprobs.shape)))
    loss.value.backward()
    return loss, logprobs.grad


def test_tokens_are_clipped_on_the_side_that_the_advantage_pushes_to(make_batch, make_micro):
    rows = [[0.9, -0.9, 0.1], [0.9, -0.9, 0.1]]
    config = GMPOConfig(clip=0.4, clip_high=0.5)
    loss, grad = run(make_batch, make_micro, config, rows, [1.0, -2.0], [[1, 1, 1]] * 2)
    up, down = math.exp((0.5 - 0.9 + 0.1) / 3), math.exp((0.9 - 0.4 + 0.1) / 3)
    assert float(loss.value.detach()) == pytest.approx((-up + 2 * down) / 2)
    assert grad[0].tolist() == pytest.approx([0.0, -up / 6, -up / 6])
    assert grad[1].tolist() == pytest.approx([2 * down / 6, 0.0, 2 * down / 6])
    assert loss.metrics["actor/pg_clipfrac"].value == pytest.approx(2 / 6)


def test_the_default_range_is_exp_of_plus_and_minus_0_4(make_batch, make_micro):
    loss, grad = run(make_batch, make_micro, GMPOConfig(), [[0.41, 0.39]], [1.0], [[1, 1]])
    assert float(loss.value.detach()) == pytest.approx(-math.exp((0.4 + 0.39) / 2))
    assert grad[0, 0] == 0


def test_observations_and_empty_responses_have_no_part_in_it(make_batch, make_micro):
    loss, grad = run(make_batch, make_micro, GMPOConfig(), [[0.2, 5.0], [0.0, 0.0]], [1.0, 1.0], [[1, 0], []])
    assert float(loss.value.detach()) == pytest.approx(-math.exp(0.2))
    assert grad.tolist() == [[pytest.approx(-math.exp(0.2)), 0.0], [0.0, 0.0]]


def test_without_a_clip_it_is_gspo_without_a_clip(make_batch, make_micro):
    rows, masks = [[0.9, -0.2, 0.1], [-0.5, 1.3, 0.0]], [[1, 1, 1], [1, 1, 0]]
    loss, grad = run(make_batch, make_micro, GMPOConfig(clip=50.0), rows, [1.0, -2.0], masks)
    logprobs = torch.tensor(rows, dtype=torch.float64)
    batch = make_batch(masks, [0.0] * 2)
    micro = make_micro(
        batch,
        logprobs,
        advantages=torch.tensor([1.0, -2.0])[:, None] * batch.mask,
        old_logprobs=torch.zeros(logprobs.shape),
    )
    other = GSPO(GSPOConfig(clip=1.0, clip_high=1e9)).loss(micro)
    other.value.backward()
    assert float(loss.value.detach()) == pytest.approx(float(other.value.detach()))
    torch.testing.assert_close(grad, logprobs.grad)
