"""Log-probs and entropies: right values, right gradients, and memory that does not grow with the vocabulary."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollstock.algorithms import _logprobs
from rollstock.algorithms.functional import logprobs_and_entropy

CASES: dict[str, Any] = json.loads((Path(__file__).parents[1] / "cases" / "numbers.json").read_text())


def reference(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The definition, spelled out in float64 from the division on, whose rounding in float32 belongs to the input."""
    log_probs = (logits.float() / temperature).double().log_softmax(-1)
    return log_probs.gather(-1, targets[..., None])[..., 0], torch.special.entr(log_probs.exp()).sum(-1)


def draw(*shape: int, seed: int = 0, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=generator), torch.randint(0, shape[-1], shape[:-1], generator=generator)


def gradient(logits: Tensor, targets: Tensor, *, by_logprob: Tensor, by_entropy: Tensor, temperature: float) -> Tensor:
    leaf = logits.detach().clone().requires_grad_()
    logprobs, entropy = logprobs_and_entropy(leaf, targets, temperature=temperature)
    (grad,) = torch.autograd.grad((logprobs * by_logprob + entropy * by_entropy).sum(), leaf)
    return grad


def test_known_numbers() -> None:
    case = CASES["entropy"]
    logprobs, entropy = logprobs_and_entropy(
        torch.tensor(case["logits"]), torch.tensor(case["targets"]), temperature=1.0
    )
    torch.testing.assert_close(logprobs, torch.tensor(case["logprobs"]), rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, torch.tensor(case["entropy"]), rtol=0, atol=1e-5)


def test_temperature_counts() -> None:
    case = CASES["temperature_in_logprobs"]
    logits, target = torch.tensor([case["logits"]]), torch.tensor([case["token"]])
    right, _ = logprobs_and_entropy(logits, target, temperature=case["temperature"])
    wrong, _ = logprobs_and_entropy(logits, target, temperature=1.0)
    assert right.item() == pytest.approx(case["right_logprob"], abs=1e-4)
    assert wrong.item() == pytest.approx(case["wrong_logprob_at_1"], abs=1e-4)
    assert math.exp(right.item() - wrong.item()) == pytest.approx(case["spurious_ratio"], abs=1e-3)


@given(
    seed=st.integers(0, 2**31 - 1),
    rows=st.integers(0, 9),
    size=st.integers(1, 40),
    temperature=st.sampled_from([0.1, 0.6, 1.0, 2.0]),
    scale=st.sampled_from([0.0, 1.0, 30.0, 3000.0]),
)
@settings(max_examples=60, deadline=None)
def test_values_follow_the_definition(seed: int, rows: int, size: int, temperature: float, scale: float) -> None:
    logits, targets = draw(rows, size, seed=seed, scale=scale)
    logprobs, entropy = logprobs_and_entropy(logits, targets, temperature=temperature)
    expected_logprobs, expected_entropy = reference(logits, targets, temperature)
    torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-4, atol=1e-5)


def test_large_common_offsets_cost_no_digits_of_the_entropy() -> None:
    logits, targets = draw(4, 5000)
    offset = 1024.0
    rounded = (logits + offset) - offset
    _, entropy = logprobs_and_entropy(logits + offset, targets, temperature=1.0)
    torch.testing.assert_close(entropy, logprobs_and_entropy(rounded, targets, temperature=1.0)[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype, temperature: float) -> None:
    logits, targets = draw(6, 300)
    logits = logits.to(dtype)
    logprobs, entropy = logprobs_and_entropy(logits, targets, temperature=temperature)
    assert logprobs.dtype == entropy.dtype == torch.float32
    expected = reference(logits, targets, temperature)
    torch.testing.assert_close(logprobs.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=1e-5, atol=1e-5)
    weights = {"by_logprob": torch.linspace(-1, 1, 6), "by_entropy": torch.linspace(1, 2, 6)}
    grad = gradient(logits, targets, **weights, temperature=temperature)
    assert grad.dtype == dtype
    torch.testing.assert_close(
        grad, gradient(logits.float(), targets, **weights, temperature=temperature).to(dtype), rtol=1e-2, atol=1e-6
    )


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_many_small_chunks_equal_one(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    logits, targets = draw(3, 7, 50)
    weights = {"by_logprob": torch.randn(3, 7), "by_entropy": torch.randn(3, 7)}
    whole = logprobs_and_entropy(logits, targets, temperature=temperature)
    grad = gradient(logits, targets, **weights, temperature=temperature)
    monkeypatch.setattr(_logprobs, "_ELEMENTS_PER_THREAD", 1)
    chunked = logprobs_and_entropy(logits, targets, temperature=temperature)
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close(gradient(logits, targets, **weights, temperature=temperature), grad)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :-1],
        lambda x: x[:, 1::2],
        lambda x: x.transpose(0, 1),
        lambda x: x[..., ::2],
        lambda x: x[None, :, :-1],
        lambda x: x.expand(3, *x.shape[1:]) if x.shape[0] == 1 else x[:1].expand(3, *x.shape[1:]),
    ],
)
def test_views_that_are_not_contiguous(view: Any) -> None:
    logits, _ = draw(4, 6, 10)
    targets = torch.randint(0, view(logits).shape[-1], view(logits).shape[:-1])
    leaf, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    logprobs, entropy = logprobs_and_entropy(view(leaf), targets, temperature=0.8)
    expected_logprobs, expected_entropy = reference(view(plain), targets, 0.8)
    torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    (logprobs.sum() + entropy.square().sum()).backward()
    (expected_logprobs.sum() + expected_entropy.square().sum()).backward()
    torch.testing.assert_close(leaf.grad, plain.grad, rtol=1e-4, atol=1e-5)


def test_forbidden_tokens_have_no_part_in_it() -> None:
    logits, targets = draw(5, 12)
    targets %= 6
    leaf = logits.clone()
    leaf[:, 6:] = -math.inf
    leaf.requires_grad_()
    logprobs, entropy = logprobs_and_entropy(leaf, targets, temperature=0.9)
    expected = logprobs_and_entropy(logits[:, :6], targets, temperature=0.9)
    torch.testing.assert_close((logprobs.detach(), entropy.detach()), expected)
    (logprobs + entropy).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()
    assert (leaf.grad[:, 6:] == 0).all()
    impossible, _ = logprobs_and_entropy(leaf.detach(), torch.full((5,), 11), temperature=0.9)
    assert (impossible == -math.inf).all()


@pytest.mark.parametrize("entropy_too", [True, False])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_rows_without_gradient_get_exact_zeros_whatever_they_hold(garbage: float, entropy_too: bool) -> None:
    logits, targets = draw(4, 30)
    logits[1] = garbage
    logits[2, 3] = garbage
    live = torch.tensor([1.0, 0.0, 0.0, 1.0])
    leaf = logits.requires_grad_()
    logprobs, entropy = logprobs_and_entropy(leaf, targets, temperature=1.0)
    keep = live.bool()
    loss = torch.where(keep, logprobs, 0.0).sum()
    if entropy_too:
        loss = loss + torch.where(keep, entropy, 0.0).sum()
    loss.backward()
    assert leaf.grad is not None
    assert (leaf.grad[1:3] == 0).all()
    assert leaf.grad.isfinite().all()
    assert leaf.grad[0].abs().sum() > 0


def test_entropy_as_a_metric_leaves_the_gradient_alone() -> None:
    logits, targets = draw(3, 8)
    leaf = logits.clone().requires_grad_()
    logprobs, entropy = logprobs_and_entropy(leaf, targets, temperature=1.0)
    (grad,) = torch.autograd.grad((logprobs + entropy.detach()).sum(), leaf)
    torch.testing.assert_close(
        grad, gradient(logits, targets, by_logprob=torch.ones(3), by_entropy=torch.zeros(3), temperature=1.0)
    )


def test_no_gradient_is_kept_where_none_is_wanted() -> None:
    logits, targets = draw(3, 8)
    with torch.no_grad():
        assert not logprobs_and_entropy(logits.requires_grad_(), targets, temperature=1.0)[0].requires_grad


def test_changing_the_logits_before_the_backward_pass_is_noticed() -> None:
    logits, targets = draw(3, 8)
    work = logits.requires_grad_() * 1.0
    logprobs, _ = logprobs_and_entropy(work, targets, temperature=1.0)
    work.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def test_memory_beside_the_gradient_is_that_of_a_few_rows() -> None:
    logits, targets = draw(4096, 1024)
    leaf = logits.requires_grad_()
    row_buffers = 4 * torch.get_num_threads() * _logprobs._ELEMENTS_PER_THREAD * 4
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        logprobs, entropy = logprobs_and_entropy(leaf, targets, temperature=0.7)
        (logprobs.sum() + entropy.sum()).backward()
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages() if "empty" in event.key)
    assert allocated < leaf.numel() * 4 + row_buffers + 2**20


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_temperature_must_be_above_zero(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be a number above 0"):
        logprobs_and_entropy(*draw(2, 3), temperature=temperature)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"logits \[2, 3, 5\] and targets \[2, 4\]"):
        logprobs_and_entropy(torch.zeros(2, 3, 5), torch.zeros(2, 4).long(), temperature=1.0)
    with pytest.raises(ValueError, match=r"logits \[5\] and targets \[\]"):
        logprobs_and_entropy(torch.zeros(5), torch.tensor(1), temperature=1.0)
