"""Losses, importance weights and KL estimates against known numbers, limits and their defining gradients."""

import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import rollstock.algorithms.functional as F

CASES: dict[str, Any] = json.loads((Path(__file__).parents[1] / "cases" / "numbers.json").read_text())
NAN, INF = math.nan, math.inf


def close(actual: Tensor, expected: Any, *, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Equal to the digits that the cases give."""
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=rtol, atol=atol)


def bools(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.bool)


class TestPolicyLosses:
    def test_dual_clip_known_numbers(self) -> None:
        case = CASES["dual_clip"]
        losses, clipped = F.clipped_surrogate(
            torch.tensor(case["ratios"]).log(),
            torch.zeros(3),
            torch.tensor(case["advantages"]).float(),
            eps_low=case["eps"],
            eps_high=case["eps"],
            dual_clip=case["c"],
        )
        close(losses, case["loss"])
        assert clipped.tolist() == [True, True, False]

    def test_asymmetric_clip_by_hand(self) -> None:
        ratios, advantages = torch.tensor([1.25, 1.35, 0.75, 0.85, 1.0]), torch.tensor([1.0, 1.0, -1.0, -1.0, 3.0])
        losses, clipped = F.clipped_surrogate(ratios.log(), torch.zeros(5), advantages, eps_low=0.2, eps_high=0.28)
        close(losses, [-1.25, -1.28, 0.8, 0.85, -3.0])
        assert clipped.tolist() == [False, True, True, False, False]

    def test_clipped_tokens_are_those_without_a_gradient(self) -> None:
        generator = torch.Generator().manual_seed(1)
        logprobs = torch.randn(400, generator=generator).requires_grad_()
        advantages = torch.randn(400, generator=generator)
        losses, clipped = F.clipped_surrogate(
            logprobs, torch.zeros(400), advantages, eps_low=0.2, eps_high=0.3, dual_clip=2.0
        )
        (grad,) = torch.autograd.grad(losses.sum(), logprobs)
        assert 0 < clipped.sum() < 400
        assert torch.equal(clipped, grad == 0)

    def test_on_policy_gradient_is_the_plain_policy_gradient(self) -> None:
        logprobs, advantages = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([0.5, -3.0])
        old = logprobs.detach()
        for losses, clipped in (
            F.clipped_surrogate(logprobs, old, advantages, eps_low=0.2, eps_high=0.2),
            F.cispo_loss(logprobs, old, advantages, eps_low=0.2, eps_high=0.2),
        ):
            (grad,) = torch.autograd.grad(losses.sum(), logprobs)
            close(grad, -advantages)
            assert not clipped.any()

    def test_dual_clip_must_exceed_one(self) -> None:
        with pytest.raises(ValueError, match="dual_clip must be above 1, got 1"):
            F.clipped_surrogate(*torch.zeros(3, 1, 1), eps_low=0.2, eps_high=0.2, dual_clip=1.0)

    def test_cispo_known_numbers_and_gradient_to_the_logprobs_only(self) -> None:
        case = CASES["cispo"]
        logprobs = torch.tensor(case["logprobs"], requires_grad=True)
        ratios, advantages = torch.tensor(case["ratios"]).float(), torch.tensor(case["advantages"]).float()
        losses, clipped = F.cispo_loss(
            logprobs, logprobs.detach() - ratios.log(), advantages, eps_low=case["eps_low"], eps_high=case["eps_high"]
        )
        close(losses.detach(), case["loss"])
        assert clipped.tolist() == [False, False, True, True]
        (grad,) = torch.autograd.grad(losses.sum(), logprobs)
        close(grad, -ratios.clamp(1 - case["eps_low"], 1 + case["eps_high"]) * advantages)

    def test_gspo_ratio_is_the_geometric_mean(self) -> None:
        ratios, mask = torch.tensor([[2.0, 8.0, NAN], [5.0, 5.0, 5.0]]), bools([1, 1, 0], [0, 0, 0])
        close(F.gspo_ratio(ratios.log(), torch.zeros(2, 3), mask), [4.0, 1.0])

    def test_gspo_ratio_spreads_its_gradient_evenly(self) -> None:
        logprobs = torch.zeros(1, 4, requires_grad=True)
        ratio = F.gspo_ratio(logprobs, torch.zeros(1, 4), bools([1, 0, 1, 0]))
        (grad,) = torch.autograd.grad(ratio.sum(), logprobs)
        close(grad, [[0.5, 0.0, 0.5, 0.0]])

    def test_gspo_ratio_feeds_the_clipped_surrogate(self) -> None:
        ratio = torch.tensor([1.5, 0.5])
        losses, clipped = F.clipped_surrogate(ratio.log(), torch.zeros(2), torch.ones(2), eps_low=0.1, eps_high=0.1)
        close(losses, [-1.1, -0.5])
        assert clipped.tolist() == [True, False]

    def test_value_loss_by_hand(self) -> None:
        values, old = torch.tensor([1.0, 0.1, -1.0]), torch.zeros(3)
        losses, clipped = F.clipped_value_loss(values, old, torch.ones(3), clip=0.2)
        close(losses, [0.32, 0.405, 2.0])
        assert clipped.tolist() == [True, False, False]
        losses, clipped = F.clipped_value_loss(values, old, torch.ones(3), clip=None)
        close(losses, [0.0, 0.405, 2.0])
        assert not clipped.any()

    @pytest.mark.parametrize(("shift", "weight"), [(1e3, math.exp(20)), (-1e3, math.exp(-20))])
    def test_absurd_ratios_stay_finite(self, shift: float, weight: float) -> None:
        logprobs, zeros, mask = torch.full((1, 2), shift), torch.zeros(1, 2), bools([1, 1])
        losses, _ = F.clipped_surrogate(logprobs, zeros, -torch.ones(1, 2), eps_low=INF, eps_high=INF)
        close(losses, [[weight, weight]])
        close(F.gspo_ratio(logprobs, zeros, mask), [weight])
        close(F.importance_weights(logprobs, zeros, mask, level="sequence", cap=INF), [[weight, weight]])


class TestImportanceWeights:
    LOGPROBS = torch.tensor([[0.5, 4.0, 0.25], [1.0, 1.0, NAN]]).log()
    MASK = bools([1, 1, 1], [1, 1, 0])

    def test_tokens_are_truncated_above_and_below(self) -> None:
        weights = F.importance_weights(self.LOGPROBS, torch.zeros(2, 3), self.MASK, cap=2.0)
        close(weights, [[0.5, 2.0, 0.25], [1.0, 1.0, 0.0]])
        weights = F.importance_weights(self.LOGPROBS, torch.zeros(2, 3), self.MASK, cap=2.0, floor=0.4)
        close(weights, [[0.5, 2.0, 0.4], [1.0, 1.0, 0.0]])

    def test_a_sequence_has_the_product_on_each_of_its_tokens(self) -> None:
        weights = F.importance_weights(self.LOGPROBS, torch.zeros(2, 3), self.MASK, level="sequence", cap=2.0)
        close(weights, [[0.5, 0.5, 0.5], [1.0, 1.0, 0.0]])

    def test_weights_are_constants(self) -> None:
        logprobs = torch.zeros(1, 1, requires_grad=True)
        assert not F.importance_weights(logprobs, logprobs, bools([1]), cap=2.0).requires_grad

    def test_unknown_level(self) -> None:
        with pytest.raises(ValueError, match="level must be one of token, sequence; got 'turn'"):
            F.importance_weights(self.LOGPROBS, self.LOGPROBS, self.MASK, level="turn", cap=2.0)  # type: ignore[arg-type]


class TestKL:
    @pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
    def test_known_numbers(self, kind: F.KLKind) -> None:
        case = CASES["kl_estimators"]
        logprobs, reference = torch.tensor(case["logprobs"]), torch.tensor(case["ref_logprobs"])
        close(F.kl_estimate(logprobs, reference, kind=kind), case[kind])
        if kind != "k2":
            plus: F.KLKind = "k1+" if kind == "k1" else "k3+"
            close(F.kl_estimate(logprobs, reference, kind=plus), case[kind])

    def test_abs(self) -> None:
        case = CASES["kl_estimators"]
        logprobs, reference = torch.tensor(case["logprobs"]), torch.tensor(case["ref_logprobs"])
        close(F.kl_estimate(logprobs, reference, kind="abs"), [abs(value) for value in case["k1"]])

    @staticmethod
    def expected_gradient(kind: F.KLKind, *, in_reward: bool = False) -> Tensor:
        """The gradient with respect to the logits, averaged over what the policy would sample: all three tokens."""
        case = CASES["kl_gradient"]
        logits = torch.tensor(case["pi"]).log().requires_grad_()
        logprobs, reference = logits.log_softmax(-1), torch.tensor(case["ref"]).log()
        estimate = F.kl_estimate(logprobs, reference, kind=kind)
        if in_reward:
            estimate = estimate.detach() * logprobs
        (grad,) = torch.autograd.grad((torch.tensor(case["pi"]) * estimate).sum(), logits)
        return grad

    @pytest.mark.parametrize("kind", ["k2", "k1+", "k3+"])
    def test_gradient_of_the_divergence(self, kind: F.KLKind) -> None:
        close(self.expected_gradient(kind), CASES["kl_gradient"]["right_gradient_wrt_logits"], rtol=0, atol=1e-4)

    def test_k1_in_the_reward_is_exact(self) -> None:
        expected = CASES["kl_gradient"]["right_gradient_wrt_logits"]
        close(self.expected_gradient("k1", in_reward=True), expected, rtol=0, atol=1e-4)

    @pytest.mark.parametrize("kind", ["k1", "k3"])
    def test_gradient_of_k1_and_k3_as_losses_is_the_documented_other_one(self, kind: F.KLKind) -> None:
        close(self.expected_gradient(kind), CASES["kl_gradient"][f"{kind}_as_loss"], rtol=0, atol=1e-4)

    @pytest.mark.parametrize("kind", ["k1", "k3"])
    def test_k1_and_k3_average_to_the_divergence(self, kind: F.KLKind) -> None:
        case = CASES["kl_gradient"]
        pi, reference = torch.tensor(case["pi"]), torch.tensor(case["ref"])
        close((pi * F.kl_estimate(pi.log(), reference.log(), kind=kind)).sum(), case["kl"], rtol=0, atol=1e-4)

    def test_k3_keeps_its_digits_for_small_gaps(self) -> None:
        gap = torch.tensor([1e-4])
        close(F.kl_estimate(gap, torch.zeros(1), kind="k3"), [0.5e-8 - 1e-12 / 6], rtol=1e-3, atol=0)

    @pytest.mark.parametrize("kind", get_args(F.KLKind))
    def test_gaps_beyond_float32_stay_finite(self, kind: F.KLKind) -> None:
        logprobs = torch.tensor([-500.0, 0.0], requires_grad=True)
        estimate = F.kl_estimate(logprobs, torch.tensor([0.0, -500.0]), kind=kind)
        (grad,) = torch.autograd.grad(estimate.sum(), logprobs)
        assert estimate.isfinite().all()
        assert grad.isfinite().all()

    def test_unknown_kind(self) -> None:
        with pytest.raises(ValueError, match="kind must be one of k1, k2, k3, abs, k1"):
            F.kl_estimate(torch.zeros(1), torch.zeros(1), kind="low_var_kl")  # type: ignore[arg-type]
