"""What must hold for any batch: slicing, padding, order, shift, scale, and that masked slots hold nothing."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import rollstock.algorithms.functional as F

seeds = st.integers(0, 2**31 - 1)
quick = settings(max_examples=30, deadline=None)
GARBAGE = [0.0, 1e30, -1e30, 3.4e38, math.inf, -math.inf, math.nan]

# Each takes three tensors [B, T] and the mask; losses of tokens are yet to be masked by `aggregate`.
TokenFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
PER_TOKEN: dict[str, TokenFunction] = {
    "gae": lambda x, y, z, mask: F.gae(x, y, mask, gamma=0.97, lam=0.9)[0],
    "gae returns": lambda x, y, z, mask: F.gae(x, y, mask, gamma=0.97, lam=0.9)[1],
    "discounted_returns": lambda x, y, z, mask: F.discounted_returns(x, mask, gamma=0.9),
    "importance_weights token": lambda x, y, z, mask: F.importance_weights(x, y, mask, cap=2.0, floor=0.5),
    "importance_weights sequence": lambda x, y, z, mask: F.importance_weights(x, y, mask, level="sequence", cap=9.0),
}
LOSSES: dict[str, TokenFunction] = {
    "clipped_surrogate": lambda x, y, z, mask: F.clipped_surrogate(x, y, z, eps_low=0.2, eps_high=0.3)[0],
    "clipped_surrogate dual": lambda x, y, z, mask: F.clipped_surrogate(
        x, y, z, eps_low=0.2, eps_high=0.3, dual_clip=3.0
    )[0],
    "cispo_loss": lambda x, y, z, mask: F.cispo_loss(x, y, z, eps_low=0.2, eps_high=0.3)[0],
    "sapo_loss": lambda x, y, z, mask: F.sapo_loss(x, y, z, tau_pos=1.0, tau_neg=2.5)[0],
    "clipped_value_loss": lambda x, y, z, mask: F.clipped_value_loss(x, y, z, clip=0.3)[0],
    "gspo_ratio": lambda x, y, z, mask: F.gspo_ratio(x, y, mask)[:, None] * torch.where(mask, z, 0.0),
} | {f"kl {kind}": lambda x, y, z, mask, kind=kind: F.kl_estimate(x, y, kind=kind) for kind in get_args(F.KLKind)}
# A sum over T is added up in an order that depends on T; sigmoid rounds otherwise in the last lanes of a vector.
UP_TO_ROUNDING = ("gspo_ratio", "importance_weights sequence", "sapo_loss")


def draw(seed: int, *, rows: int = 5, width: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three float64 tensors and a mask with observations inside, padding on the right and, often, an empty row."""
    generator = torch.Generator().manual_seed(seed)
    x, y, z = torch.randn(3, rows, width, generator=generator, dtype=torch.float64).unbind(0)
    lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths) & (torch.rand(rows, width, generator=generator) < 0.8)
    return x, y, z, mask


def groups_of(seed: int, size: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 4, (size,), generator=generator).double()  # few values: ties and equal groups are common
    return scores, torch.randint(-3, 6, (size,), generator=generator)


@pytest.mark.parametrize("mode", get_args(F.AggregationMode))
@given(seed=seeds, cuts=st.lists(st.integers(1, 7), max_size=3), reverse=st.booleans())
@quick
def test_any_slicing_gives_the_same_loss_and_gradient(
    mode: F.AggregationMode, seed: int, cuts: list[int], reverse: bool
) -> None:
    losses, _, _, mask = draw(seed, rows=8)
    count: float | None = float(mask.sum())
    if mode.startswith("seq_mean"):
        count = float(mask.any(-1).sum())
    if mode == "seq_mean_token_sum_norm":
        count = 8 * 7.0
    if mode == "token_sum":
        count = None
    whole, parts = losses.clone().requires_grad_(), losses.clone().requires_grad_()
    total = F.aggregate(whole, mask, mode=mode, denominator=count)
    (expected,) = torch.autograd.grad(total, whole)

    order = torch.arange(8).flip(0) if reverse else torch.arange(8)
    edges = sorted({0, 8, *cuts})
    summed = torch.zeros((), dtype=torch.float64)
    for start, stop in pairwise(edges):
        rows = order[start:stop]
        part = F.aggregate(parts[rows], mask[rows], mode=mode, denominator=count)
        part.backward()  # gradients accumulate over slices
        summed += part.detach()
    torch.testing.assert_close(summed, total.detach())
    assert parts.grad is not None
    torch.testing.assert_close(parts.grad, expected)


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean"])
@given(seed=seeds)
@quick
def test_the_default_denominator_is_the_count_of_what_is_there(mode: F.AggregationMode, seed: int) -> None:
    losses, _, _, mask = draw(seed)
    count = mask.sum() if mode == "token_mean" else mask.any(-1).sum()
    given_count = F.aggregate(losses, mask, mode=mode, denominator=int(count))
    torch.testing.assert_close(F.aggregate(losses, mask, mode=mode), given_count)


@pytest.mark.parametrize("name", PER_TOKEN | LOSSES)
@given(seed=seeds, garbage=st.sampled_from(GARBAGE), padding=st.integers(0, 3))
@quick
def test_padding_changes_nothing(name: str, seed: int, garbage: float, padding: int) -> None:
    x, y, z, mask = draw(seed)
    function = (PER_TOKEN | LOSSES)[name]
    wide = [torch.nn.functional.pad(tensor, (0, padding), value=garbage) for tensor in (x, y, z)]
    wide_mask = torch.nn.functional.pad(mask, (0, padding), value=False)
    padded = torch.where(mask, function(*wide, wide_mask)[:, : x.shape[1]], 0.0)
    plain = torch.where(mask, function(x, y, z, mask), 0.0)
    if name in UP_TO_ROUNDING:
        torch.testing.assert_close(padded, plain, rtol=1e-13, atol=0)
    else:
        assert torch.equal(padded, plain)


@pytest.mark.parametrize("name", PER_TOKEN | LOSSES)
@given(seed=seeds)
@quick
def test_a_trajectory_does_not_depend_on_its_neighbours(name: str, seed: int) -> None:
    x, y, z, mask = draw(seed)
    function = (PER_TOKEN | LOSSES)[name]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    together = function(x, y, z, mask)
    tolerance = 1e-13 if name in UP_TO_ROUNDING else 0.0
    shuffled, alone = function(x[order], y[order], z[order], mask[order]), function(x[:1], y[:1], z[:1], mask[:1])
    torch.testing.assert_close(shuffled, together[order], rtol=tolerance, atol=0)
    torch.testing.assert_close(alone, together[:1], rtol=tolerance, atol=0)


@pytest.mark.parametrize("name", PER_TOKEN)
@given(seed=seeds, garbage=st.sampled_from(GARBAGE))
@quick
def test_masked_slots_are_zero_whatever_they_held(name: str, seed: int, garbage: float) -> None:
    x, y, z, mask = draw(seed)
    dirty = [torch.where(mask, tensor, garbage) for tensor in (x, y, z)]
    result = PER_TOKEN[name](*dirty, mask)
    assert (result[~mask] == 0).all()
    assert torch.equal(result, PER_TOKEN[name](x, y, z, mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("name", LOSSES)
@given(seed=seeds, garbage=st.sampled_from(GARBAGE))
@settings(max_examples=10, deadline=None)
def test_masked_slots_reach_neither_loss_nor_gradient(
    name: str, which: tuple[int, ...], dtype: torch.dtype, seed: int, garbage: float
) -> None:
    inputs = [tensor.to(dtype) for tensor in draw(seed)[:3]]
    mask = draw(seed)[3]

    def loss_and_gradient(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        x = tensors[0].clone().requires_grad_()
        loss = F.aggregate(LOSSES[name](x, *tensors[1:], mask), mask, mode="token_mean")
        (grad,) = torch.autograd.grad(loss, x)
        return loss.detach(), grad

    dirty = [torch.where(mask, t, garbage).to(dtype) if i in which else t for i, t in enumerate(inputs)]
    loss, grad = loss_and_gradient(dirty)
    clean_loss, clean_grad = loss_and_gradient(inputs)
    assert (grad[~mask] == 0).all()
    torch.testing.assert_close(loss, clean_loss)
    torch.testing.assert_close(grad, clean_grad)


@given(seed=seeds, garbage=st.sampled_from(GARBAGE))
@quick
def test_whitening_sees_the_unmasked_values_only(seed: int, garbage: float) -> None:
    x, _, _, mask = draw(seed)
    dirty = torch.where(mask, x, garbage).requires_grad_()
    whitened = F.masked_whiten(dirty, mask)
    (grad,) = torch.autograd.grad(whitened.square().sum(), dirty)
    assert grad.isfinite().all()
    torch.testing.assert_close(whitened.detach(), F.masked_whiten(x, mask))
    torch.testing.assert_close(whitened.detach(), F.masked_whiten(3.0 + 5.0 * x, mask), rtol=1e-6, atol=1e-6)
    assert torch.equal(F.reinforce_pp(dirty, mask, gamma=0.9), F.reinforce_pp(x, mask, gamma=0.9))


@given(seed=seeds, shift=st.floats(-1e3, 1e3), scale=st.floats(1e-2, 1e2))
@quick
def test_group_advantages_under_shift_and_scale_of_rewards(seed: int, shift: float, scale: float) -> None:
    scores, groups = groups_of(seed)
    moved = scores * scale + shift
    for std in get_args(F.GroupStd):
        expected = F.group_normalise(scores, groups, std=std, eps=0.0)
        torch.testing.assert_close(F.group_normalise(moved, groups, std=std, eps=0.0), expected, rtol=1e-7, atol=1e-7)
    centred = F.group_normalise(scores, groups, std=None)
    torch.testing.assert_close(F.group_normalise(moved, groups, std=None), centred * scale, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(
        F.leave_one_out(moved, groups), F.leave_one_out(scores, groups) * scale, rtol=1e-7, atol=1e-7
    )


@given(seed=seeds)
@quick
def test_group_advantages_do_not_depend_on_order_names_or_other_groups(seed: int) -> None:
    scores, groups = groups_of(seed)
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed))
    for function in (F.group_normalise, F.leave_one_out):
        result = function(scores, groups)
        torch.testing.assert_close(function(scores[order], groups[order]), result[order])
        torch.testing.assert_close(function(scores, -1000 * groups), result)
        for group in groups.unique():
            members = groups == group
            torch.testing.assert_close(function(scores[members], groups[members]), result[members])


@given(seed=seeds)
@quick
def test_group_advantages_follow_their_definition(seed: int) -> None:
    scores, groups = groups_of(seed)
    normalised, biased = F.group_normalise(scores, groups), F.group_normalise(scores, groups, std="biased")
    rloo = F.leave_one_out(scores, groups)
    for group in groups.unique():
        members = groups == group
        own = scores[members]
        if len(own) == 1 or (own == own[0]).all():
            assert (normalised[members] == 0).all()
            assert (rloo[members] == 0).all()
            continue
        others = (own.sum() - own) / (len(own) - 1)
        torch.testing.assert_close(rloo[members], own - others)
        torch.testing.assert_close(normalised[members], (own - own.mean()) / (own.std() + 1e-6))
        torch.testing.assert_close(biased[members], (own - own.mean()) / (own.std(correction=0) + 1e-6))


@given(seed=seeds, gamma=st.floats(0, 1), lam=st.floats(0, 1))
@quick
def test_gae_follows_its_definition(seed: int, gamma: float, lam: float) -> None:
    rewards, values, _, mask = draw(seed, rows=2)
    advantages, returns = F.gae(rewards, values, mask, gamma=gamma, lam=lam)
    for row in range(2):
        r, v = rewards[row, mask[row]].tolist(), values[row, mask[row]].tolist()
        errors = [r[t] + gamma * (v[t + 1] if t + 1 < len(r) else 0.0) - v[t] for t in range(len(r))]
        expected = [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, len(r))) for t in range(len(r))]
        torch.testing.assert_close(advantages[row, mask[row]], torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(returns, advantages + torch.where(mask, values, 0.0))
