"""SAPO: a gate that lets gradients fade, faster for negative advantages."""

import math

import pytest
import torch

import rollstock.algorithms.functional as F
from rollstock.algorithms.sapo import SAPO, SAPOConfig


def test_the_gate_by_hand_and_its_temperature_by_the_sign_of_the_advantage():
    losses, weights = F.sapo_loss(
        torch.tensor([2.0, 2.0, 0.5]).log(), torch.zeros(3), torch.tensor([3.0, -3.0, 0.0]), tau_pos=1.0, tau_neg=2.0
    )
    one, two = 1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(-2.0))
    assert losses.tolist() == pytest.approx([-3 * 4 * one, 3 * 4 / 2 * two, 0.0])
    assert weights[:2].tolist() == pytest.approx([4 * one * (1 - one), 4 * two * (1 - two)])


def test_on_policy_the_gradient_is_the_plain_policy_gradient(make_batch, make_micro):
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, -0.1]])
    advantages = torch.tensor([[2.0, 2.0], [-1.0, 0.0]])
    micro = make_micro(make_batch([[1, 1], [1]], [0.0, 0.0]), logprobs, advantages=advantages)
    loss = SAPO(SAPOConfig(tau_pos=0.7, tau_neg=3.0)).loss(micro)
    loss.value.backward()
    assert logprobs.grad.tolist() == [pytest.approx([-0.5, -0.5]), pytest.approx([0.5, 0.0])]
    assert loss.metrics["actor/gate_weight"].value == pytest.approx(1.0)


def test_the_options_are_the_temperatures_of_their_sign(make_batch, make_micro):
    advantages = torch.tensor([[2.0], [-3.0]])
    micro = make_micro(
        make_batch([[1], [1]], [0.0, 0.0]), torch.zeros(2, 1), old_logprobs=torch.ones(2, 1), advantages=advantages
    )
    loss = SAPO(SAPOConfig(tau_pos=1.0, tau_neg=2.0)).loss(micro)
    down = math.exp(-1.0) - 1
    up, low = 4 / (1 + math.exp(-down)), 2 / (1 + math.exp(-2 * down))
    assert float(loss.value.detach()) == pytest.approx((-2 * up + 3 * low) / 2)


def test_the_gradient_fades_with_distance_faster_for_a_larger_temperature():
    gaps = torch.tensor([0.0, 0.3, 1.0, 2.0])
    found = {}
    for tau in (1.0, 4.0):
        logprobs = gaps.clone().requires_grad_()
        losses, weights = F.sapo_loss(logprobs, torch.zeros(4), torch.ones(4), tau_pos=tau, tau_neg=1.0)
        (grad,) = torch.autograd.grad(losses.sum(), logprobs)
        torch.testing.assert_close(grad, -weights * gaps.exp())  # what is left of the plain ratio's gradient
        found[tau] = weights
    for weights in found.values():
        assert (weights.diff() < 0).all()
    assert (found[4.0][1:] < found[1.0][1:]).all()


def test_temperatures_must_be_above_0():
    with pytest.raises(ValueError, match="above 0, got tau_pos=0 and tau_neg=1"):
        F.sapo_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), tau_pos=0, tau_neg=1)
