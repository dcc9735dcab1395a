"""Means, returns and group advantages against known numbers, limits, and everything that a batch can hold."""

import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import rollstock.algorithms.functional as F

CASES: dict[str, Any] = json.loads((Path(__file__).parents[1] / "cases" / "numbers.json").read_text())
NAN, INF = math.nan, math.inf

SIGNATURES = {
    "masked_mean": "(x, mask)",
    "masked_whiten": "(x, mask, *, shift_mean=True)",
    "aggregate": "(losses, mask, *, mode, denominator=None)",
    "gae": "(rewards, values, mask, *, gamma, lam)",
    "discounted_returns": "(rewards, mask, *, gamma)",
    "group_normalise": "(scores, groups, *, std='unbiased', eps=1e-06)",
    "leave_one_out": "(scores, groups)",
    "overlong_penalty": "(lengths, *, limit, buffer)",
    "reinforce_pp": "(token_rewards, mask, *, gamma)",
    "kl_estimate": "(logprobs, ref_logprobs, *, kind)",
    "clipped_surrogate": "(logprobs, old_logprobs, advantages, *, eps_low, eps_high, dual_clip=None)",
    "cispo_loss": "(logprobs, old_logprobs, advantages, *, eps_low, eps_high)",
    "sapo_loss": "(logprobs, old_logprobs, advantages, *, tau_pos, tau_neg)",
    "gspo_ratio": "(logprobs, old_logprobs, mask)",
    "next_kl_coefficient": "(coefficient, kl, *, control, target, horizon, num_samples)",
    "clipped_value_loss": "(values, old_values, returns, *, clip)",
    "logprobs_and_entropy": "(logits, targets, *, temperature)",
    "importance_weights": "(logprobs, rollout_logprobs, mask, *, level='token', cap, floor=None)",
}
CHOICES = {
    "AggregationMode": (
        "token_mean",
        "token_sum",
        "seq_mean_token_sum",
        "seq_mean_token_mean",
        "seq_mean_token_sum_norm",
    ),
    "GroupStd": ("unbiased", "biased"),
    "KLControl": ("fixed", "horizon", "ratio"),
    "KLKind": ("k1", "k2", "k3", "abs", "k1+", "k3+"),
    "WeightLevel": ("token", "sequence"),
}


def close(actual: Tensor, expected: Any, *, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Equal to the digits that the cases give."""
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=rtol, atol=atol)


def bools(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.bool)


class TestPublicSurface:
    def test_names_are_frozen(self) -> None:
        assert set(F.__all__) == set(SIGNATURES) | set(CHOICES)

    @pytest.mark.parametrize("name", SIGNATURES)
    def test_signatures_are_frozen(self, name: str) -> None:
        signature = inspect.signature(getattr(F, name))
        bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
        assert str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)) == SIGNATURES[name]

    @pytest.mark.parametrize("name", CHOICES)
    def test_choices_are_frozen(self, name: str) -> None:
        assert get_args(getattr(F, name)) == CHOICES[name]

    @pytest.mark.parametrize("name", SIGNATURES)
    def test_every_function_is_documented(self, name: str) -> None:
        assert inspect.getdoc(getattr(F, name))


class TestAggregate:
    @pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean"])
    def test_known_numbers(self, mode: F.AggregationMode) -> None:
        case = CASES["aggregation"]
        close(F.aggregate(torch.tensor(case["losses"]).float(), bools(*case["mask"]), mode=mode), case[mode])

    def test_masked_slot_does_not_count(self) -> None:
        case = CASES["aggregation"]
        losses = torch.tensor(case["losses"]).float()
        losses[1, 2] = 100
        close(F.aggregate(losses, bools(*case["mask"]), mode="token_mean"), case["token_mean"])

    def test_slices_over_the_global_count_add_up_where_a_mean_of_means_is_wrong(self) -> None:
        case = CASES["loss_slicing"]
        slices = [torch.tensor([row]) for row in case["token_losses"]]
        masks = [torch.ones_like(part, dtype=torch.bool) for part in slices]
        count = sum(part.numel() for part in slices)
        parts = [F.aggregate(p, m, mode="token_mean", denominator=count) for p, m in zip(slices, masks, strict=True)]
        close(torch.stack(parts).sum(), case["right_token_mean"])
        local = [F.aggregate(p, m, mode="token_mean") for p, m in zip(slices, masks, strict=True)]
        close(torch.stack(local).mean(), case["wrong_mean_of_means"])

    def test_token_sum_and_norm(self) -> None:
        losses, mask = torch.tensor([[1.0, 2.0], [3.0, 9.0]]), bools([1, 1], [1, 0])
        close(F.aggregate(losses, mask, mode="token_sum"), 6.0)
        close(F.aggregate(losses, mask, mode="seq_mean_token_sum_norm", denominator=2 * 4), 0.75)

    def test_sequences_without_tokens_are_not_counted_by_default(self) -> None:
        losses, mask = torch.tensor([[1.0, 3.0], [5.0, 5.0]]), bools([1, 1], [0, 0])
        close(F.aggregate(losses, mask, mode="seq_mean_token_mean"), 2.0)
        close(F.aggregate(losses, mask, mode="seq_mean_token_sum"), 4.0)
        close(F.aggregate(losses, mask, mode="seq_mean_token_sum", denominator=2), 2.0)

    def test_a_tensor_is_a_denominator(self) -> None:
        losses, mask = torch.tensor([[1.0, 3.0]]), bools([1, 1])
        close(F.aggregate(losses, mask, mode="token_mean", denominator=torch.tensor(8)), 0.5)

    @pytest.mark.parametrize("mode", get_args(F.AggregationMode))
    def test_all_masked_is_zero_with_zero_gradient(self, mode: F.AggregationMode) -> None:
        losses = torch.tensor([[NAN, INF]], requires_grad=True)
        denominator = None if mode == "token_sum" else 0
        total = F.aggregate(losses, bools([0, 0]), mode=mode, denominator=denominator)
        total.backward()
        close(total.detach(), 0.0)
        assert losses.grad is not None
        close(losses.grad, [[0.0, 0.0]])

    def test_half_precision_is_summed_in_float32(self) -> None:
        losses = torch.ones(1, 4096, dtype=torch.bfloat16)
        total = F.aggregate(losses, torch.ones_like(losses, dtype=torch.bool), mode="token_sum")
        assert total.dtype == torch.float32
        close(total, 4096.0)

    def test_unknown_mode_names_the_known_ones(self) -> None:
        with pytest.raises(ValueError, match=r"mode must be one of token_mean, .*got 'mean'"):
            F.aggregate(torch.zeros(1, 1), bools([1]), mode="mean")  # type: ignore[arg-type]

    def test_a_denominator_that_would_be_ignored_or_is_missing_is_refused(self) -> None:
        with pytest.raises(ValueError, match="token_sum divides by nothing"):
            F.aggregate(torch.zeros(1, 1), bools([1]), mode="token_sum", denominator=3)
        with pytest.raises(ValueError, match="needs a denominator"):
            F.aggregate(torch.zeros(1, 1), bools([1]), mode="seq_mean_token_sum_norm")

    def test_shapes_that_would_broadcast_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"losses \[2\], mask \[2, 2\]"):
            F.aggregate(torch.zeros(2), torch.ones(2, 2, dtype=torch.bool), mode="token_mean")


class TestMaskedStatistics:
    def test_mean_leaves_masked_values_out(self) -> None:
        close(F.masked_mean(torch.tensor([[1.0, NAN], [3.0, INF]]), bools([1, 0], [1, 0])), 2.0)

    def test_mean_of_nothing_is_zero(self) -> None:
        close(F.masked_mean(torch.tensor([[NAN]]), bools([0])), 0.0)

    def test_mean_of_booleans_is_a_fraction(self) -> None:
        close(F.masked_mean(bools([1, 0, 1, 1]), bools([1, 1, 1, 1])), 0.75)

    def test_whitened_values_have_mean_0_and_unbiased_variance_1(self) -> None:
        x, mask = torch.tensor([[1.0, 2.0, NAN], [6.0, 3.0, 8.0]]), bools([1, 1, 0], [1, 1, 1])
        whitened = F.masked_whiten(x, mask)
        close(whitened[mask].mean(), 0.0)
        close(whitened[mask].var(), 1.0)
        assert whitened[0, 2] == 0
        close(F.masked_whiten(x, mask, shift_mean=False)[mask].mean(), 4.0)

    @pytest.mark.parametrize("value", [0.1, 1e8, -3e-9])
    def test_equal_values_whiten_to_exactly_zero(self, value: float) -> None:
        x, mask = torch.full((3, 7), value), torch.ones(3, 7, dtype=torch.bool)
        assert (F.masked_whiten(x, mask) == 0).all()
        close(F.masked_whiten(x, mask, shift_mean=False), x)

    @pytest.mark.parametrize("shift_mean", [True, False])
    def test_one_value_and_none_are_defined(self, shift_mean: bool) -> None:
        x = torch.tensor([[5.0, NAN]])
        close(F.masked_whiten(x, bools([1, 0]), shift_mean=shift_mean), [[0.0 if shift_mean else 5.0, 0.0]])
        close(F.masked_whiten(x, bools([0, 0]), shift_mean=shift_mean), [[0.0, 0.0]])
        assert F.masked_whiten(torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.bool)).shape == (0, 4)


class TestReturns:
    def test_gae_known_numbers(self) -> None:
        case = CASES["gae"]
        rewards, values = torch.tensor([case["rewards"]]).float(), torch.tensor([case["values"]])
        mask = torch.ones_like(rewards, dtype=torch.bool)
        advantages, returns = F.gae(rewards, values, mask, gamma=case["gamma"], lam=case["lambda"])
        close(advantages, [case["advantages"]])
        close(returns, [case["returns"]])

    def test_gae_passes_over_observations(self) -> None:
        case = CASES["gae_over_observations"]
        mask = bools(case["action_mask"])
        rewards = torch.zeros(mask.shape)
        rewards[0, -1] = case["terminal_reward"]
        values = torch.full(mask.shape, case["values"])
        advantages, _ = F.gae(rewards, values, mask, gamma=case["gamma"], lam=case["lambda"])
        close(advantages[mask], case["right_on_actions"])
        assert (advantages[~mask] == 0).all()

    def test_gae_with_observations_equals_gae_of_the_actions_alone(self) -> None:
        generator = torch.Generator().manual_seed(3)
        mask = torch.rand(5, 12, generator=generator) < 0.6
        rewards, values = torch.randn(2, 5, 12, generator=generator).unbind(0)
        advantages, returns = F.gae(rewards, values, mask, gamma=0.9, lam=0.8)
        for row in range(5):
            keep = mask[row]
            alone = F.gae(
                rewards[row : row + 1, keep], values[row : row + 1, keep], keep[keep][None], gamma=0.9, lam=0.8
            )
            close(advantages[row, keep], alone[0][0])
            close(returns[row, keep], alone[1][0])

    def test_lambda_1_gives_discounted_returns_less_values(self) -> None:
        generator = torch.Generator().manual_seed(0)
        rewards, values = torch.randn(2, 3, 9, generator=generator).unbind(0)
        mask = torch.rand(3, 9, generator=generator) < 0.7
        advantages, returns = F.gae(rewards, values, mask, gamma=0.95, lam=1.0)
        close(returns, F.discounted_returns(rewards, mask, gamma=0.95), rtol=1e-4, atol=1e-5)
        close(advantages[mask], (returns - values)[mask], rtol=1e-4, atol=1e-5)

    def test_discounted_returns_by_hand(self) -> None:
        rewards = torch.tensor([[1.0, NAN, 2.0, 4.0, INF]])
        close(F.discounted_returns(rewards, bools([1, 0, 1, 1, 0]), gamma=0.5), [[3.0, 0.0, 4.0, 4.0, 0.0]])

    def test_reward_of_an_empty_response_lands_nowhere(self) -> None:
        case = CASES["empty_response"]
        lengths = torch.tensor(case["response_lengths"])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        rewards = torch.tensor(case["rewards"])[:, None] * torch.tensor(
            [1.0, 0.0, 0.0]
        )  # the empty row's is in a masked slot
        advantages, returns = F.gae(rewards, torch.zeros(mask.shape), mask, gamma=1.0, lam=0.95)
        for result in (advantages, returns, F.discounted_returns(rewards, mask, gamma=1.0)):
            assert (result == 0).all()

    def test_reinforce_pp_is_whitened_returns(self) -> None:
        rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), bools([1, 1], [1, 1])
        returns = torch.tensor([[0.5, 1.0], [0.0, 0.0]])
        close(F.reinforce_pp(rewards, mask, gamma=0.5), (returns - returns.mean()) / returns.std())

    def test_nothing_flows_back_to_the_critic(self) -> None:
        values = torch.zeros(1, 2, requires_grad=True)
        advantages, returns = F.gae(torch.ones(1, 2), values, bools([1, 1]), gamma=1.0, lam=1.0)
        assert not advantages.requires_grad
        assert not returns.requires_grad

    @pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
    def test_empty_batches_keep_their_shape(self, shape: tuple[int, int]) -> None:
        x, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        assert all(result.shape == shape for result in F.gae(x, x, mask, gamma=1.0, lam=1.0))
        assert F.reinforce_pp(x, mask, gamma=1.0).shape == shape
        assert F.importance_weights(x, x, mask, level="sequence", cap=2.0).shape == shape
        close(F.aggregate(x, mask, mode="seq_mean_token_mean"), 0.0)


class TestGroups:
    GROUPS = torch.zeros(8, dtype=torch.int64)
    SCORES = torch.tensor([1.0, 0, 0, 1, 0, 1, 0, 0])

    @pytest.mark.parametrize(
        ("key", "function"),
        [
            ("grpo_unbiased_std", lambda s, g: F.group_normalise(s, g)),
            ("grpo_biased_std", lambda s, g: F.group_normalise(s, g, std="biased")),
            ("no_std", lambda s, g: F.group_normalise(s, g, std=None)),
            ("rloo", F.leave_one_out),
        ],
    )
    def test_three_of_eight_correct(self, key: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        right, wrong = CASES["group_of_8_with_3_correct"][key]
        close(function(self.SCORES, self.GROUPS), torch.where(self.SCORES == 1, right, wrong))

    def test_unbiased_std_with_its_epsilon(self) -> None:
        case = CASES["group_1110"]
        scores = torch.tensor(case["rewards"]).double()
        close(F.group_normalise(scores, torch.zeros(4).long()), case["grpo_unbiased_std"], rtol=0, atol=1e-6)

    @pytest.mark.parametrize("std", [None, "unbiased", "biased"])
    @pytest.mark.parametrize("score", [0.0, 3.7, -1e6, 1e30])
    def test_group_of_one_is_zero(self, std: F.GroupStd | None, score: float) -> None:
        scores, groups = torch.tensor([score, 1.0, 2.0]), torch.tensor([7, -4, -4])
        right = CASES["group_of_one"]["right_advantage"]
        assert F.group_normalise(scores, groups, std=std)[0] == right
        assert F.group_normalise(scores, groups, std=std, eps=0.0)[0] == right
        assert F.leave_one_out(scores, groups)[0] == right

    @pytest.mark.parametrize("score", [0.1, 1 / 3, 12345.678, 1e-30])
    def test_equal_scores_are_exactly_zero(self, score: float) -> None:
        scores, groups = torch.full((21,), score), torch.arange(21) % 3
        for result in (
            F.group_normalise(scores, groups),
            F.group_normalise(scores, groups, eps=0.0),
            F.leave_one_out(scores, groups),
        ):
            assert (result == 0).all()

    def test_integer_and_boolean_scores_are_numbers(self) -> None:
        for scores in (self.SCORES.long(), self.SCORES.bool(), self.SCORES.half()):
            close(F.group_normalise(scores, self.GROUPS), F.group_normalise(self.SCORES, self.GROUPS))

    def test_a_bad_score_stays_in_its_group(self) -> None:
        scores, groups = torch.tensor([NAN, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
        assert F.group_normalise(scores, groups)[2:].isfinite().all()
        assert F.leave_one_out(scores, groups)[2:].isfinite().all()
        assert F.leave_one_out(scores, groups)[0].isnan()

    def test_double_precision_is_kept(self) -> None:
        scores = torch.tensor([1e12, 1e12 + 1e-3, 5.0], dtype=torch.float64)
        gap = (scores[1] - scores[0]).item()
        close(F.leave_one_out(scores, torch.tensor([0, 0, 1])), [-gap, gap, 0.0], rtol=1e-12)

    def test_no_rows(self) -> None:
        empty = torch.zeros(0)
        assert F.group_normalise(empty, empty.long()).shape == (0,)
        assert F.leave_one_out(empty, empty.long()).shape == (0,)

    def test_unknown_std(self) -> None:
        with pytest.raises(ValueError, match="std must be one of unbiased, biased; got 'sample'"):
            F.group_normalise(self.SCORES, self.GROUPS, std="sample")  # type: ignore[arg-type]


class TestNextKLCoefficient:
    def next(self, coefficient: float, kl: float, control: F.KLControl = "horizon", num_samples: int = 64) -> float:
        return F.next_kl_coefficient(
            coefficient, kl, control=control, target=6.0, horizon=10000.0, num_samples=num_samples
        )

    def test_fixed_stays(self) -> None:
        assert self.next(0.2, 100.0, "fixed") == 0.2

    def test_horizon_corrects_by_the_error_clipped_to_a_fifth(self) -> None:
        assert self.next(0.2, 6.6) == pytest.approx(0.2 * (1 + 0.1 * 64 / 10000))
        assert self.next(0.2, 60.0) == pytest.approx(0.2 * (1 + 0.2 * 64 / 10000))
        assert self.next(0.2, -60.0) == pytest.approx(0.2 * (1 - 0.2 * 64 / 10000))

    def test_ratio_is_the_measured_over_the_target_from_0_to_1_and_comes_back_from_0(self) -> None:
        assert self.next(0.1, 3.0, "ratio") == 0.5
        assert self.next(0.1, 12.0, "ratio") == 1.0
        assert self.next(0.1, -1.0, "ratio") == 0.0
        assert self.next(0.0, 3.0, "ratio") == 0.5

    def test_an_unknown_control_is_refused(self) -> None:
        with pytest.raises(ValueError, match="control must be one of fixed, horizon, ratio; got 'pid'"):
            self.next(0.1, 1.0, "pid")  # type: ignore[arg-type]
