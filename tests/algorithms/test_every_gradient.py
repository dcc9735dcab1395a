"""The losses of every installed algorithm against finite differences, in float64.

Each is taken with a policy that has moved far from the one that sampled, and with one that has hardly moved, which is
where a narrow clip range does not decide everything; and once more with the terms that its options can add.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from rollstock import Algorithm, Batch, Loss, MicroBatch, Totals
from rollstock.discovery import discover
from rollstock.testing.batches import columns_of
from rollstock.testing.case import AlgorithmCase
from rollstock.testing.subject import Subject
from rollstock.testing.trial import drifted, model_outputs, step

NAMES = [entry.name for entry in discover().values() if entry.kind == "algorithm" and entry.distribution == "rollstock"]
TERMS = {"kl_coef": 0.3, "entropy_coef": 0.2, "aggregation": "seq_mean_token_sum", "dual_clip": 1.1, "fraction": 0.5}
# Losses in which the ratio is a weight without a gradient: the old policy is moved along, so that it stays what it is.
CONSTANT_RATIO = ("cispo",)


def algorithm_case(name: str, options: Mapping[str, Any]) -> AlgorithmCase:
    """An algorithm with those of the options that it has."""
    known = {field.name for field in dataclasses.fields(Subject(Algorithm, name, None).cls.config_class())}
    return AlgorithmCase(Subject(Algorithm, name, {key: options[key] for key in known & options.keys()}), {})


def prepared(case: AlgorithmCase, algorithm: Algorithm[Any]) -> Batch:
    """A batch with advantages and, as after the first of several updates, old log-probs."""
    batch = step(algorithm, case.batch(), case.columns)
    if "old_logprobs" in algorithm.needed_columns():
        batch.set_flat("old_logprobs", columns_of(batch)["old_logprobs"].double())
    return batch


def check(
    loss: Callable[[MicroBatch], Loss], batch: Batch, outputs: Mapping[str, Tensor], *, moves_along: bool = False
) -> None:
    """Compare with central differences, output by output and token by token; something must have a gradient."""
    names = sorted(outputs)
    leaves = [outputs[name].double().clone().requires_grad_() for name in names]
    totals = Totals.of(batch, response_limit=16)
    start = {name: output.double().clone() for name, output in outputs.items()}
    old = batch.flat("old_logprobs") if moves_along else None

    def value(*given: Tensor) -> Tensor:
        if old is not None:
            moved = given[names.index("logprobs")].detach() - start["logprobs"]
            batch.set_flat("old_logprobs", old + moved)
        return loss(MicroBatch(batch, totals, {n: batch.pad(x) for n, x in zip(names, given, strict=True)})).value

    gradients = torch.autograd.grad(value(*leaves), leaves, allow_unused=True)
    assert sum(float(gradient.abs().sum()) for gradient in gradients if gradient is not None) > 1e-3
    assert torch.autograd.gradcheck(value, leaves, eps=1e-6, atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, TERMS], ids=["defaults", "terms"])
@pytest.mark.parametrize("drift", [0.3, 2e-4])
@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_that_of_finite_differences(name: str, drift: float, options: dict[str, Any]) -> None:
    case = algorithm_case(name, options)
    algorithm = case.make()
    batch = prepared(case, algorithm)
    outputs = model_outputs(algorithm, batch, drifted(batch, scale=drift))
    check(algorithm.loss, batch, outputs, moves_along=name in CONSTANT_RATIO)


def test_the_gradient_of_each_critic_is_that_of_finite_differences() -> None:
    cases = {name: algorithm_case(name, {}) for name in NAMES}
    with_critic = [name for name, case in cases.items() if "values" in case.make().needed_columns()]
    assert "ppo" in with_critic
    for name in with_critic:
        algorithm = cases[name].make()
        batch = prepared(cases[name], algorithm)
        noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(5))
        check(algorithm.critic_loss, batch, {"values": batch.flat("values") + 0.3 * noise})


@pytest.mark.parametrize("name", CONSTANT_RATIO)
def test_a_constant_ratio_is_an_exception_that_is_needed(name: str) -> None:
    case = algorithm_case(name, {})
    algorithm = case.make()
    batch = prepared(case, algorithm)
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        check(algorithm.loss, batch, model_outputs(algorithm, batch, drifted(batch, scale=0.3)))
