"""The conformance kit of routers: experts chosen for tokens, with weights that carry a gradient.

For authors of routers, who call `check_router(MyRouter)` in a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollstock.interfaces.router import Router, Routing
from rollstock.testing.kit import Report, expect, run_checks
from rollstock.testing.subject import Subject, check_json
from rollstock.testing.subject import check_options as check_plugin_options

NUM_TOKENS = 12


@dataclass(frozen=True)
class RouterCase:
    """The router under test, and the layer that it routes for."""

    subject: Subject[Router[Any]]
    num_experts: int
    top_k: int

    def make(self) -> Router[Any]:
        """A fresh router."""
        return self.subject.make()

    def logits(self, *, seed: int = 0, num_tokens: int = NUM_TOKENS) -> Tensor:
        """Router logits [n, E]."""
        return 2 * torch.randn(num_tokens, self.num_experts, generator=torch.Generator().manual_seed(seed))

    def route(
        self, router: Router[Any], logits: Tensor, *, training: bool, normalise: bool = True, k: int = 0
    ) -> Routing:
        """Route with torch's generator in a known state, as the device's `seed` leaves it."""
        torch.manual_seed(11)
        return router.route(logits, layer=0, top_k=k or self.top_k, training=training, normalise=normalise)


def check_router(
    router: type[Router[Any]] | Router[Any] | str,
    *,
    options: Mapping[str, Any] | None = None,
    num_experts: int = 8,
    top_k: int = 2,
    skip: Mapping[str, str] | None = None,
) -> Report:
    """Check a router, given as a class, an instance or an installed plugin's name.

    options: of the plugin; num_experts and top_k: of the layer; skip: checks that do not hold on purpose, each with
    the reason. Raises ConformanceError.
    """
    case = RouterCase(Subject(Router, router, options), num_experts, top_k)
    return run_checks(case.subject.label, CHECKS, case, skip=skip)


def check_options(case: RouterCase) -> None:
    """Every option has a help text, and the defaults fit their own types and bounds; making a plugin leaves its
    config alone."""
    check_plugin_options(case.subject)


def check_shapes(case: RouterCase) -> None:
    """For n tokens there are k different experts each, weights of at least 0, and probabilities that sum to 1."""
    for training in (False, True):
        for k in (1, case.top_k, case.num_experts):
            for count in (NUM_TOKENS, 1, 0):
                found = case.route(case.make(), case.logits(num_tokens=count), training=training, k=k)
                _check_routing(case, found, count, k)


def _check_routing(case: RouterCase, found: Routing, count: int, k: int) -> None:
    shapes = {"experts": (count, k), "weights": (count, k), "probabilities": (count, case.num_experts)}
    for name, shape in shapes.items():
        value: Tensor = getattr(found, name)
        expect(
            tuple(value.shape) == shape,
            f"{name} has shape {tuple(value.shape)} for {count} tokens and {k} of {case.num_experts} experts",
            mend=f"{name} is {'[n, E]' if name == 'probabilities' else '[n, k]'}",
        )
    expect(found.experts.dtype == torch.int64, f"experts are {found.experts.dtype}", mend="experts are int64 indices")
    chosen = [set(row) for row in found.experts.tolist()]
    expect(
        all(len(row) == k and row <= set(range(case.num_experts)) for row in chosen),
        f"a token gets the experts {next((row for row in found.experts.tolist() if len(set(row)) != k), [])}",
        mend="choose k different experts from 0 to E - 1 for each token",
    )
    for name in ("weights", "probabilities"):
        value = getattr(found, name).detach()
        expect(
            bool(torch.isfinite(value).all()) and bool((value >= 0).all()),
            f"{name} are not all finite and at least 0",
            mend="take a softmax of the logits",
        )
    sums = found.probabilities.sum(dim=-1)
    expect(
        torch.allclose(sums, torch.ones_like(sums), atol=1e-4),
        "probabilities of a token do not sum to 1",
        mend="give the softmax over all E experts, before any is chosen",
    )


def check_normalisation(case: RouterCase) -> None:
    """With `normalise`, the weights of a token sum to 1."""
    for training in (False, True):
        found = case.route(case.make(), case.logits(), training=training)
        sums = found.weights.detach().sum(dim=-1)
        expect(
            torch.allclose(sums, torch.ones_like(sums), atol=1e-4),
            f"with `normalise`, weights sum to {float(sums.min()):.4g} to {float(sums.max()):.4g}",
            mend="divide the chosen weights by their sum",
        )
        case.route(case.make(), case.logits(), training=training, normalise=False)


def check_gradient(case: RouterCase) -> None:
    """A gradient reaches the logits through the weights, and is finite, for extreme logits too."""
    for scale in (1.0, 1e4):
        logits = (scale * case.logits()).requires_grad_()
        found = case.route(case.make(), logits, training=True)
        mend = (
            "compute `weights` from the logits without detaching them; `torch.topk` gives values that carry a gradient"
        )
        expect(found.weights.requires_grad, "the weights carry no gradient", mend=mend)
        target = torch.linspace(-1, 1, found.weights.numel()).view_as(found.weights)
        (found.weights * target).sum().backward()
        gradient = logits.grad
        assert gradient is not None or not found.weights.requires_grad
        expect(
            gradient is not None and bool(torch.isfinite(gradient).all()),
            f"with logits of the order of {scale:g}, the gradient is not finite",
            mend="use torch.softmax or logsumexp, which subtract the largest logit first",
        )
        if scale == 1.0:
            expect(gradient is not None and bool(gradient.any()), "the gradient by the logits is 0", mend=mend)


def check_determinism(case: RouterCase) -> None:
    """With torch's generators in one state, a router chooses the same each time; the logits stay as they were."""
    for training in (False, True):
        logits = case.logits()
        kept = logits.clone()
        first = case.route(case.make(), logits, training=training)
        second = case.route(case.make(), logits, training=training)
        expect(torch.equal(logits, kept), "`route` changes the logits", mend="write into no argument")
        expect(
            torch.equal(first.experts, second.experts) and torch.equal(first.weights, second.weights),
            "two routers choose differently for the same logits",
            mend="draw from torch's generator of the logits' device, or from one that you seed",
        )


def check_neighbours(case: RouterCase) -> None:
    """Outside of training, what a token gets does not depend on the tokens beside it."""
    logits = case.logits()
    whole = case.route(case.make(), logits, training=False)
    part = case.route(case.make(), logits[:5], training=False)
    expect(
        torch.equal(whole.experts[:5], part.experts) and torch.allclose(whole.weights[:5], part.weights, atol=1e-5),
        "outside of training, a token gets other experts when fewer tokens are beside it",
        mend="decide by the token's own logits; capacity limits, and randomness that depends on places, are for "
        "training",
    )


def check_state(case: RouterCase) -> None:
    """State is JSON, and a router that takes it back chooses as the one that gave it."""
    router = case.make()
    for seed in range(3):
        case.route(router, case.logits(seed=seed), training=True)
    state = check_json(router.state(), "the state")
    other = case.make()
    other.load_state(state)
    expect(
        other.state() == state,
        f"after load_state({state}), the state is {other.state()}",
        mend="`load_state` takes all of it",
    )
    ours, theirs = (case.route(each, case.logits(seed=7), training=True) for each in (router, other))
    expect(
        torch.equal(ours.experts, theirs.experts) and torch.equal(ours.weights, theirs.weights),
        "a router that took the state back chooses differently from the one that gave it",
        mend="put schedules, counts and biases into `state`",
    )


CHECKS = (
    check_options,
    check_shapes,
    check_normalisation,
    check_gradient,
    check_determinism,
    check_neighbours,
    check_state,
)
