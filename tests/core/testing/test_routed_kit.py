"""The checks of both model kits that are about routers can fail, and leave alone what takes none."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollstock import Backend, Metrics, NoOptions, Rollout, Router, RouterCall, RouterLayer, Routing
from rollstock.backends.native import Native
from rollstock.backends.torch.backend import TorchBackend
from rollstock.testing import ConformanceError, check_backend, check_rollout
from rollstock.testing.backend import CHECKS as BACKEND_CHECKS
from rollstock.testing.rollout import CHECKS as ROLLOUT_CHECKS


class Between(Router[NoOptions]):
    """Stands between the kit's router and the model, and hands on all it is told; mistakes are its subclasses."""

    captures = True

    def __init__(self, router: Router[Any]) -> None:
        super().__init__()
        self.router = router

    def setup(self, layers: Sequence[RouterLayer], *, seed: int) -> None:
        self.router.setup(layers, seed=seed)

    def route(self, call: RouterCall) -> Routing:
        return self.router.route(call)

    def auxiliary_loss(self, layers: Sequence[Routing], rows: Tensor, num_sequences: int) -> Tensor | None:
        return self.router.auxiliary_loss(layers, rows, num_sequences)

    def after_update(self, load: Tensor) -> Metrics:
        return self.router.after_update(load)


class NeverSetUp(Between):
    def setup(self, layers: Sequence[RouterLayer], *, seed: int) -> None:
        pass

    def route(self, call: RouterCall) -> Routing:
        return call.own


class OneLayerOnly(Between):
    def setup(self, layers: Sequence[RouterLayer], *, seed: int) -> None:
        super().setup(layers[:1], seed=seed)


class SeedOfItsOwn(Between):
    def setup(self, layers: Sequence[RouterLayer], *, seed: int) -> None:
        super().setup(layers, seed=seed + 1)


class AskedInVain(Between):
    def route(self, call: RouterCall) -> Routing:
        super().route(call)
        return call.own


class WeightsOfItsOwn(Between):
    def route(self, call: RouterCall) -> Routing:
        return replace(super().route(call), weights=torch.full_like(call.own.weights, 0.5))


class KeysOfPlaces(Between):
    def route(self, call: RouterCall) -> Routing:
        return super().route(replace(call, tokens=replace(call.tokens, keys=torch.arange(len(call.logits)))))


class ForgetsWhatWasCaptured(Between):
    def route(self, call: RouterCall) -> Routing:
        return super().route(replace(call, tokens=replace(call.tokens, captured=None)))


class CountsAnotherToken(Between):
    def after_update(self, load: Tensor) -> Metrics:
        return super().after_update(load + 1)


class ForgetsTheLoss(Between):
    def auxiliary_loss(self, layers: Sequence[Routing], rows: Tensor, num_sequences: int) -> Tensor | None:
        return None


class MeanOfTheSlice(Between):
    def auxiliary_loss(self, layers: Sequence[Routing], rows: Tensor, num_sequences: int) -> Tensor | None:
        found = super().auxiliary_loss(layers, rows, num_sequences)
        return None if found is None else found / len(rows)


class AlwaysExplores(Between):
    def route(self, call: RouterCall) -> Routing:
        return super().route(replace(call, tokens=replace(call.tokens, exploring=True)))


class OneVersion(Between):
    def route(self, call: RouterCall) -> Routing:
        versions = torch.full_like(call.tokens.versions, 3)
        return super().route(replace(call, tokens=replace(call.tokens, versions=versions)))


IN_TRAINING: list[tuple[type[Between], str]] = [
    (NeverSetUp, "of no layers"),
    (OneLayerOnly, "the model has"),
    (SeedOfItsOwn, "seed"),
    (AskedInVain, "changes no log-prob"),
    (WeightsOfItsOwn, "from plain transformers"),
    (OneVersion, "from plain transformers"),
    (KeysOfPlaces, "one at a time"),
    (ForgetsWhatWasCaptured, "captured in `routed_experts`"),
    (CountsAnotherToken, "hears the loads"),
    (ForgetsTheLoss, "`auxiliary_loss` changes no gradient"),
    (MeanOfTheSlice, "in single trajectories"),
]
IN_GENERATION: list[tuple[type[Between], str]] = [
    (NeverSetUp, "of no layers"),
    (SeedOfItsOwn, "seed"),
    (AskedInVain, "changes no log-prob"),
    (KeysOfPlaces, "and the router chose"),
    (AlwaysExplores, "with `sampling.exploring` False"),
    (OneVersion, "with weights of another version"),
]


@pytest.mark.parametrize(("between", "said"), IN_TRAINING, ids=[between.__name__ for between, _ in IN_TRAINING])
def test_a_backend_that_tells_a_router_wrongly_is_caught(
    between: type[Between], said: str, all_but: Callable[..., Any]
) -> None:
    class Wrong(TorchBackend):
        def use_router(self, router: Router[Any]) -> None:
            super().use_router(between(router))

    with pytest.raises(ConformanceError) as caught:
        check_backend(Wrong, options={"learning_rate": 1e-3}, skip=all_but(BACKEND_CHECKS, "router"))
    assert caught.value.check == "router"
    assert said in str(caught.value)


@pytest.mark.parametrize(("between", "said"), IN_GENERATION, ids=[between.__name__ for between, _ in IN_GENERATION])
def test_an_engine_that_tells_a_router_wrongly_is_caught(
    between: type[Between], said: str, all_but: Callable[..., Any]
) -> None:
    class Wrong(Native):
        def use_router(self, router: Router[Any]) -> None:
            super().use_router(between(router))

    with pytest.raises(ConformanceError) as caught:
        check_rollout(Wrong, skip=all_but(ROLLOUT_CHECKS, "steering"))
    assert caught.value.check == "steering"
    assert said in str(caught.value)


def test_what_says_that_it_takes_no_router_is_not_checked(all_but: Callable[..., Any]) -> None:
    class Dense(TorchBackend):
        def use_router(self, router: Router[Any]) -> None:
            Backend.use_router(self, router)

    class DenseEngine(Native):
        def use_router(self, router: Router[Any]) -> None:
            Rollout.use_router(self, router)

    options = {"learning_rate": 1e-3}
    trained = check_backend(Dense, options=options, skip=all_but(BACKEND_CHECKS, "router"))
    sampled = check_rollout(DenseEngine, skip=all_but(ROLLOUT_CHECKS, "steering"))
    assert "cannot replace the choice of experts" in trained.skipped["router"]
    assert "cannot replace the choice of experts" in sampled.skipped["steering"]
