"""Gradients of every loss and reduction against finite differences, in float64."""

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

import rollstock.algorithms.functional as F

GENERATOR = torch.Generator().manual_seed(11)
# Far from the corners of clips at these values: a finite difference across a corner is the gradient of neither side.
OLD = -3 * torch.rand(4, 6, generator=GENERATOR, dtype=torch.float64)
GAP = torch.tensor([-0.9, -0.35, -0.05, 0.08, 0.4, 1.4], dtype=torch.float64).expand(4, 6)
ADVANTAGES = torch.tensor([[1.3], [-0.7], [0.2], [-2.1]], dtype=torch.float64).expand(4, 6)
RETURNS = torch.tensor([[2.3], [-2.7], [0.55], [-3.6]], dtype=torch.float64).expand(4, 6)
MASK = torch.rand(4, 6, generator=GENERATOR) < 0.75

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = (
    {
        "clipped_surrogate": lambda x: F.clipped_surrogate(x, OLD, ADVANTAGES, eps_low=0.2, eps_high=0.3)[0],
        "clipped_surrogate with dual clip": lambda x: F.clipped_surrogate(
            x, OLD, ADVANTAGES, eps_low=0.2, eps_high=0.3, dual_clip=3.0
        )[0],
        "sapo_loss": lambda x: F.sapo_loss(x, OLD, ADVANTAGES, tau_pos=1.0, tau_neg=2.5)[0],
        "gspo_ratio": lambda x: F.gspo_ratio(x, OLD, MASK),
        "clipped_value_loss": lambda x: F.clipped_value_loss(x, OLD, RETURNS, clip=0.2)[0],
        "unclipped value loss": lambda x: F.clipped_value_loss(x, OLD, RETURNS, clip=None)[0],
        "masked_mean": lambda x: F.masked_mean(x, MASK),
        "masked_whiten": lambda x: F.masked_whiten(x, MASK),
        "masked_whiten without shift": lambda x: F.masked_whiten(x, MASK, shift_mean=False),
    }
    | {f"kl {kind}": lambda x, kind=kind: F.kl_estimate(x, OLD, kind=kind) for kind in ("k1", "k2", "k3", "abs")}
    | {
        f"aggregate {mode}": lambda x, mode=mode: F.aggregate(
            x, MASK, mode=mode, denominator=None if mode == "token_sum" else 5
        )
        for mode in get_args(F.AggregationMode)
    }
)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradient_matches_finite_differences(name: str) -> None:
    x = (OLD + GAP).requires_grad_()
    assert torch.autograd.gradcheck(FUNCTIONS[name], x)
    assert torch.autograd.grad(FUNCTIONS[name](x).sum(), x)[0].abs().sum() > 0 or name == "masked_whiten"


def test_cispo_gradient_is_that_of_the_logprob_under_a_fixed_weight() -> None:
    x = (OLD + GAP).requires_grad_()
    weight = GAP.exp().clamp(0.8, 1.3)
    (grad,) = torch.autograd.grad(F.cispo_loss(x, OLD, ADVANTAGES, eps_low=0.2, eps_high=0.3)[0].sum(), x)
    torch.testing.assert_close(grad, -weight * ADVANTAGES)


@pytest.mark.parametrize("kind", ["k1+", "k3+"])
def test_plus_estimators_have_the_gradient_of_k2(kind: F.KLKind) -> None:
    x = (OLD + GAP).requires_grad_()
    (grad,) = torch.autograd.grad(F.kl_estimate(x, OLD, kind=kind).sum(), x)
    (expected,) = torch.autograd.grad(F.kl_estimate(x, OLD, kind="k2").sum(), x)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("argument", [1, 2])
def test_gradients_reach_the_first_argument_only(argument: int) -> None:
    tensors = [OLD + GAP, OLD.clone(), ADVANTAGES.clone()]
    tensors[argument].requires_grad_()
    for losses, _ in (
        F.clipped_surrogate(*tensors, eps_low=0.2, eps_high=0.3, dual_clip=3.0),
        F.cispo_loss(*tensors, eps_low=0.2, eps_high=0.3),
        F.sapo_loss(*tensors, tau_pos=1.0, tau_neg=2.5),
        F.clipped_value_loss(*tensors, clip=0.2),
    ):
        assert not losses.requires_grad
    assert not F.kl_estimate(*tensors[:2], kind="k2").requires_grad
    assert not F.gspo_ratio(*tensors[:2], MASK).requires_grad


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.9])
@pytest.mark.parametrize("outputs", ["logprobs", "entropy", "both"])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 7)])
def test_logprobs_and_entropy_gradients(shape: tuple[int, ...], outputs: str, temperature: float) -> None:
    logits = (2 * torch.randn(shape, generator=GENERATOR, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(0, 7, shape[:-1], generator=GENERATOR)

    def function(x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        logprobs, entropy = F.logprobs_and_entropy(x, targets, temperature=temperature)
        return {"logprobs": logprobs, "entropy": entropy}.get(outputs, (logprobs, entropy))

    assert torch.autograd.gradcheck(function, logits)
