"""GRPO: what a group's rewards become."""

import pytest
import torch

from rollstock import MicroBatch, Totals
from rollstock.algorithms.grpo import GRPO, GRPOConfig


@pytest.mark.parametrize(
    ("scale", "key"), [("unbiased", "grpo_unbiased_std"), ("biased", "grpo_biased_std"), ("none", "no_std")]
)
def test_advantages_of_a_group_of_eight_with_three_correct(cases, make_batch, scale, key):
    batch = make_batch([[1, 1]] * 8, [1.0] * 3 + [0.0] * 5)
    right, wrong = cases["group_of_8_with_3_correct"][key]
    advantages = GRPO(GRPOConfig(scale=scale)).advantages(batch)
    assert torch.allclose(advantages, torch.tensor([[right] * 2] * 3 + [[wrong] * 2] * 5), atol=1e-4)


def test_masked_tokens_and_equal_groups_have_no_advantage(make_batch):
    batch = make_batch([[1, 0, 1], [1], [], [1, 1]], [1.0, 0.0, 0.5, 0.5], groups=[0, 0, 1, 1])
    advantages = GRPO().advantages(batch)
    assert advantages[0].tolist() == pytest.approx([0.7071, 0.0, 0.7071], abs=1e-4)
    assert advantages[2:].abs().sum() == 0


def micro(batch, logprobs, advantages, **columns):
    for name, value in {"advantages": advantages, **columns}.items():
        batch[name] = value
    return MicroBatch(batch, Totals.of(batch, response_limit=4), {"logprobs": logprobs})


def test_the_loss_is_the_clipped_surrogate_over_all_action_tokens(make_batch):
    batch = make_batch([[1, 1], [1, 0]], [1.0, 0.0])
    logprobs = torch.tensor([[0.5, 0.0], [0.0, 9.0]], requires_grad=True)
    loss = GRPO().loss(micro(batch, logprobs, torch.tensor([[1.0, 1.0], [-1.0, 0.0]]), old_logprobs=torch.zeros(2, 2)))
    assert float(loss.value.detach()) == pytest.approx((-1.2 - 1.0 + 1.0) / 3)
    assert loss.metrics["actor/pg_clipfrac"].value == pytest.approx(1 / 3)
    loss.value.backward()
    assert logprobs.grad.tolist() == [[0.0, pytest.approx(-1 / 3)], [pytest.approx(1 / 3), 0.0]]


def test_a_kl_term_needs_the_reference_and_pulls_towards_it(make_batch):
    algorithm = GRPO(GRPOConfig(kl_coef=0.5, kl_kind="k2"))
    assert algorithm.needed_columns() == {"old_logprobs", "ref_logprobs"}
    assert GRPO().needed_columns() == {"old_logprobs"}
    logprobs = torch.tensor([[1.0]], requires_grad=True)
    loss = algorithm.loss(micro(make_batch([[1]], [0.0]), logprobs, torch.zeros(1, 1), ref_logprobs=torch.zeros(1, 1)))
    assert float(loss.value.detach()) == pytest.approx(0.25)
    assert loss.metrics["actor/kl_loss"].value == pytest.approx(0.5)
    loss.value.backward()
    assert float(logprobs.grad) == pytest.approx(0.5)


def test_an_entropy_bonus_is_subtracted(make_batch):
    algorithm = GRPO(GRPOConfig(entropy_coef=0.1))
    assert algorithm.training_outputs() == {"logprobs", "entropy"}
    batch = make_batch([[1]], [0.0])
    batch["advantages"] = torch.zeros(1, 1)
    outputs = {"logprobs": torch.zeros(1, 1, requires_grad=True), "entropy": torch.full((1, 1), 2.0)}
    loss = algorithm.loss(MicroBatch(batch, Totals.of(batch, response_limit=1), outputs))
    assert float(loss.value.detach()) == pytest.approx(-0.2)


def test_dual_clip_must_be_above_one():
    with pytest.raises(ValueError, match="dual_clip must be above 1"):
        GRPOConfig(dual_clip=1)


def test_a_lone_sample_has_no_advantage_or_its_raw_score(make_batch):
    batch = make_batch([[1, 0], [1], [1]], [0.75, 1.0, 0.0], groups=[7, 3, 3])
    assert GRPO().advantages(batch)[0].tolist() == [0.0, 0.0]
    raw = GRPO(GRPOConfig(lone="raw")).advantages(batch)
    assert raw[0].tolist() == [0.75, 0.0]
    assert torch.equal(raw[1:], GRPO().advantages(batch)[1:])
