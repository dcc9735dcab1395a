"""Every check of the router kit can fail."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rollstock import Metrics, NoOptions, Router, RouterCall, Routing
from rollstock.testing import ConformanceError, check_router


class Softmax(Router[NoOptions]):
    """A right router, with a loss of its own."""

    def route(self, call: RouterCall) -> Routing:
        experts = call.choose()
        return Routing(experts=experts, weights=call.weights(experts), probabilities=call.probabilities())

    def auxiliary_loss(self, layers: Sequence[Routing], rows: Tensor, num_sequences: int) -> Tensor | None:
        return torch.stack([squares(routing).sum() for routing in layers]).sum() / num_sequences


def squares(routing: Routing) -> Tensor:
    assert routing.probabilities is not None
    return routing.probabilities.square()


class Changed(Softmax):
    """What the wrong routers below have in common: they change a right routing."""

    def changed(self, found: Routing, call: RouterCall) -> Routing:
        return found

    def route(self, call: RouterCall) -> Routing:
        return self.changed(super().route(call), call)


class OneExpertTwice(Changed):
    def changed(self, found: Routing, call: RouterCall) -> Routing:
        return dataclasses.replace(found, experts=found.experts[:, :1].expand_as(found.experts))


class ExpertsAreFloats(Changed):
    def changed(self, found: Routing, call: RouterCall) -> Routing:
        return dataclasses.replace(found, experts=found.experts.float())


class ProbabilitiesOfTheChosen(Changed):
    def changed(self, found: Routing, call: RouterCall) -> Routing:
        return dataclasses.replace(found, probabilities=found.weights)


class LogitsAsWeights(Changed):
    def changed(self, found: Routing, call: RouterCall) -> Routing:
        return dataclasses.replace(found, weights=call.logits.gather(1, found.experts))


class ProbabilitiesOfHalf(Changed):
    def changed(self, found: Routing, call: RouterCall) -> Routing:
        return dataclasses.replace(found, probabilities=call.probabilities() / 2)


class NeverNormalises(Changed):
    def changed(self, found: Routing, call: RouterCall) -> Routing:
        return dataclasses.replace(found, weights=call.probabilities().gather(1, found.experts))


class Detached(Changed):
    def changed(self, found: Routing, call: RouterCall) -> Routing:
        return dataclasses.replace(found, weights=found.weights.detach())


class Exponentials(Changed):
    def changed(self, found: Routing, call: RouterCall) -> Routing:
        chosen = call.logits.gather(1, found.experts).exp()
        scale = call.layer.scoring.scale
        return dataclasses.replace(found, weights=scale * chosen / chosen.sum(dim=-1, keepdim=True))


class DrawsFromTorch(Softmax):
    def route(self, call: RouterCall) -> Routing:
        experts = call.choose(call.logits + torch.randn_like(call.logits))
        return Routing(experts=experts, weights=call.weights(experts))


class ComparesTokens(Softmax):
    def route(self, call: RouterCall) -> Routing:
        centred = call.logits - call.logits.mean(dim=0) if len(call.logits) else call.logits
        experts = call.choose(centred)
        return Routing(experts=experts, weights=call.weights(experts))


class ForgetsWhatWasCaptured(Softmax):
    captures = True


class AveragesOverTheSlice(Softmax):
    def auxiliary_loss(self, layers: Sequence[Routing], rows: Tensor, num_sequences: int) -> Tensor | None:
        return torch.stack([squares(routing).mean() for routing in layers]).sum()


class ForgetsItsSchedule(Softmax):
    updates = 0

    def route(self, call: RouterCall) -> Routing:
        experts = call.choose()
        return Routing(experts=experts, weights=call.weights(experts, call.logits / (1 + self.updates)))

    def after_update(self, load: Tensor) -> Metrics:
        self.updates += 1
        return {}


WRONG_ROUTERS: list[tuple[type[Router[Any]], str, str]] = [
    (OneExpertTwice, "shapes", "different experts"),
    (ExpertsAreFloats, "shapes", "int64"),
    (ProbabilitiesOfTheChosen, "shapes", "[n, E]"),
    (LogitsAsWeights, "shapes", "at least 0"),
    (ProbabilitiesOfHalf, "shapes", "sum to 1"),
    (NeverNormalises, "normalisation", "sum"),
    (Detached, "gradient", "no gradient"),
    (Exponentials, "gradient", "not finite"),
    (DrawsFromTorch, "determinism", "call.uniforms"),
    (ComparesTokens, "neighbours", "fewer tokens"),
    (ForgetsWhatWasCaptured, "capture", "captured experts"),
    (AveragesOverTheSlice, "auxiliary_loss", "add up"),
    (ForgetsItsSchedule, "state", "schedules"),
]


@pytest.mark.parametrize(("wrong", "check", "said"), WRONG_ROUTERS, ids=[w.__name__ for w, _, _ in WRONG_ROUTERS])
def test_a_wrong_router_is_caught_by_its_check(wrong: type[Router[Any]], check: str, said: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_router(wrong)
    assert caught.value.check == check
    assert said in str(caught.value)


def test_a_right_router_passes() -> None:
    assert set(check_router(Softmax).skipped) == {"capture"}
