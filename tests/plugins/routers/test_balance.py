"""Balancing: the loss by hand, and biases that even out the load without one."""

import pytest
import torch
from torch import Tensor

from rollstock import RouterLayer, Routing, Scoring
from rollstock.plugins.routers.topk import TopK, TopKConfig
from rollstock.testing import make_router_call

LAYERS = [
    RouterLayer(index=i, name=f"layers.{i}", num_experts=4, top_k=1, scoring=Scoring()) for i in range(2)
]  # fmt: skip


def make(**options: float) -> TopK:
    router = TopK(TopKConfig(**options))
    router.setup(LAYERS, seed=0)
    return router


def routing(experts: list[int], probabilities: Tensor) -> Routing:
    chosen = torch.tensor(experts)[:, None]
    return Routing(experts=chosen, weights=probabilities.gather(1, chosen), probabilities=probabilities)


def test_the_loss_of_one_sequence_by_hand() -> None:
    """f is (2, 1, 0, 1) / 4 * E / k, P the mean of the rows."""
    probabilities = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
    probabilities = torch.cat([probabilities, probabilities])
    found = make(auxiliary_loss=0.1).auxiliary_loss(
        [routing([0, 3, 0, 1], probabilities)] * 2, torch.zeros(4, dtype=torch.int64), 1
    )
    assert found is not None
    assert float(found) == pytest.approx(0.1 * (2 * 0.25 + 1 * 0.25 + 1 * 0.25))
    # Half of the update: the same sequence counts half beside another.
    half = make(auxiliary_loss=0.1).auxiliary_loss(
        [routing([0, 3, 0, 1], probabilities)] * 2, torch.zeros(4, dtype=torch.int64), 2
    )
    assert half is not None
    assert float(half) == pytest.approx(float(found) / 2)


def test_an_even_load_costs_the_coefficient_and_a_full_expert_more() -> None:
    even = torch.full((4, 4), 0.25)
    rows = torch.zeros(4, dtype=torch.int64)
    router = make(auxiliary_loss=0.01)
    assert float(router.auxiliary_loss([routing([0, 1, 2, 3], even)], rows, 1)) == pytest.approx(0.01)  # type: ignore[arg-type]
    sure = torch.eye(4)[torch.zeros(4, dtype=torch.int64)]
    assert float(router.auxiliary_loss([routing([0, 0, 0, 0], sure)], rows, 1)) == pytest.approx(0.04)  # type: ignore[arg-type]


def test_there_is_no_loss_unless_it_is_asked_for() -> None:
    even = torch.full((4, 4), 0.25)
    assert make().auxiliary_loss([routing([0, 1, 2, 3], even)], torch.zeros(4, dtype=torch.int64), 1) is None
    assert make(auxiliary_loss=1.0).auxiliary_loss([], torch.zeros(0, dtype=torch.int64), 1) is None


def test_biases_move_by_the_rate_towards_an_even_load() -> None:
    router = make(bias_rate=0.5)
    router.after_update(torch.tensor([[4.0, 1.0, 2.0, 1.0], [2.0, 2.0, 2.0, 2.0]]))
    assert router.state() == {"biases": [[-0.5, 0.5, 0.0, 0.5], [0.0, 0.0, 0.0, 0.0]]}
    assert make().state() == {}


def test_biases_even_out_the_load_of_a_router_that_favours_one() -> None:
    logits = torch.randn(400, 4, generator=torch.Generator().manual_seed(0)) + torch.tensor([2.0, 0.0, 0.0, 0.0])
    router = make(bias_rate=0.01)
    loads = []
    for _ in range(200):
        experts = router.route(make_router_call(logits, layer=LAYERS[0])).experts
        load = torch.bincount(experts.flatten(), minlength=4).double()
        loads.append(load)
        router.after_update(torch.stack([load, load]))
    assert float(loads[0].max()) > 250
    assert float(loads[-1].max()) < 120


def test_the_state_of_a_run_without_biases_changes_nothing_in_one_with_them() -> None:
    router = make(bias_rate=0.5)
    router.load_state({})
    assert router.state() == {"biases": [[0.0] * 4] * 2}
