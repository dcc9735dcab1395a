"""AdamW on named parameters: steps against hand-worked numbers, clipping, skipping, a state that comes back."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollstock import UserError
from rollstock.backends.torch.config import TorchConfig
from rollstock.backends.torch.optimizer import Optimizer


def make(
    values: dict[str, Tensor], *, total_updates: int = 100, **options: Any
) -> tuple[Optimizer, dict[str, nn.Parameter]]:
    parameters = {name: nn.Parameter(value.clone()) for name, value in values.items()}
    given = {"learning_rate": 0.1, "weight_decay": 0.0, "max_grad_norm": 0.0, **options}
    return Optimizer(list(parameters.items()), TorchConfig(**given), total_updates), parameters


def test_the_first_step_is_the_learning_rate_against_the_sign_of_the_gradient() -> None:
    optimizer, parameters = make({"w": torch.tensor([1.0, 2.0])}, eps=0.0)
    parameters["w"].grad = torch.tensor([0.5, -3.0])
    optimizer.step()
    torch.testing.assert_close(parameters["w"].detach(), torch.tensor([0.9, 2.1]))
    assert parameters["w"].grad is None


def test_matrices_decay_and_vectors_do_not() -> None:
    optimizer, parameters = make({"matrix": torch.ones(1, 2), "norm": torch.ones(2)}, weight_decay=0.5)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(parameters["matrix"].detach(), torch.full((1, 2), 0.95))  # 1 - 0.1 * 0.5
    assert torch.equal(parameters["norm"].detach(), torch.ones(2))


def test_gradients_are_scaled_to_the_largest_norm_allowed() -> None:
    optimizer, parameters = make({"a": torch.zeros(1), "b": torch.zeros(1)}, max_grad_norm=1.0)
    parameters["a"].grad, parameters["b"].grad = torch.tensor([3.0]), torch.tensor([4.0])
    metrics = optimizer.step()
    assert metrics["grad_norm"].value == pytest.approx(5.0)
    moments = optimizer.tensors()
    assert float(moments["a|exp_avg"]) == pytest.approx(0.1 * 0.6)
    assert float(moments["b|exp_avg"]) == pytest.approx(0.1 * 0.8)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(bad: float) -> None:
    optimizer, parameters = make({"w": torch.ones(2)})
    parameters["w"].grad = torch.ones(2)
    optimizer.step()
    before, moments = parameters["w"].detach().clone(), {k: v.clone() for k, v in optimizer.tensors().items()}
    parameters["w"].grad = torch.tensor([1.0, bad])
    metrics = optimizer.step()
    assert metrics["skipped_updates"].value == 1.0
    assert metrics["grad_norm"].weight == 0.0
    assert torch.equal(parameters["w"].detach(), before)
    assert all(torch.equal(value, moments[name]) for name, value in optimizer.tensors().items())
    assert optimizer.values() == {"updates": 2, "skipped": 1}


def test_the_rate_follows_the_schedule_and_is_reported() -> None:
    optimizer, parameters = make({"w": torch.ones(1)}, total_updates=4, schedule="linear", warmup_ratio=0.5)
    rates = []
    for _ in range(4):
        parameters["w"].grad = torch.ones(1)
        rates.append(optimizer.step()["lr"].value)
    assert rates == pytest.approx([0.05, 0.1, 0.05, 0.0])


def test_small_updates_add_up_in_float32_masters(cases: dict[str, Any]) -> None:
    case = cases["bf16_master"]
    optimizer, parameters = make({"w": torch.tensor([case["start"]])}, learning_rate=-case["each"], eps=0.0)
    for _ in range(case["updates"]):
        parameters["w"].grad = torch.ones(1)
        optimizer.step()
    assert float(parameters["w"].detach()) == pytest.approx(case["right"], abs=1e-7)


def test_a_loaded_optimizer_goes_on_to_the_bit() -> None:
    start = {"w": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), "b": torch.zeros(3)}
    noise = torch.Generator().manual_seed(1)
    steps = [{name: torch.randn(value.shape, generator=noise) for name, value in start.items()} for _ in range(6)]

    def run(optimizer: Optimizer, parameters: dict[str, nn.Parameter], part: list[dict[str, Tensor]]) -> None:
        for gradients in part:
            for name, parameter in parameters.items():
                parameter.grad = gradients[name].clone()
            optimizer.step()

    through, expected = make(start, schedule="cosine", total_updates=6, weight_decay=0.1)
    run(through, expected, steps)
    first, parameters = make(start, schedule="cosine", total_updates=6, weight_decay=0.1)
    run(first, parameters, steps[:3])
    tensors = {name: value.clone() for name, value in first.tensors().items()}
    second, resumed = make(
        {n: p.detach() for n, p in parameters.items()}, schedule="cosine", total_updates=6, weight_decay=0.1
    )
    second.load(tensors, first.values())
    run(second, resumed, steps[3:])
    assert all(torch.equal(resumed[name], expected[name]) for name in start)
    assert all(torch.equal(value, through.tensors()[name]) for name, value in second.tensors().items())
    assert second.values() == through.values()


def test_a_state_that_does_not_fit_is_refused_by_name() -> None:
    optimizer, _ = make({"w": torch.ones(2)})
    with pytest.raises(UserError, match=r"'v\|exp_avg', but the model trains no such weight"):
        optimizer.load({"v|exp_avg": torch.ones(2)}, {"updates": 1, "skipped": 0})
    with pytest.raises(UserError, match=r"'w\|exp_avg' of shape \[3\], the weight has \[2\]"):
        optimizer.load({"w|exp_avg": torch.ones(3)}, {"updates": 1, "skipped": 0})
