"""The conformance kit of routers: experts chosen for tokens, with weights that carry a gradient.

For authors of routers, who call `check_router(MyRouter)` in a test. How a backend puts a router into a model is left to
the tests of backends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rollstock.interfaces.router import Router
from rollstock.routing import RoutedTokens, RouterCall, RouterLayer, Routing, Scoring, captured_dtype, prefix_keys
from rollstock.testing.kit import NotApplicable, Report, expect, run_checks
from rollstock.testing.subject import Subject, check_json
from rollstock.testing.subject import check_options as check_plugin_options

NUM_TOKENS = 12
NUM_LAYERS = 2
SCORINGS = (
    Scoring(normalise=True),
    Scoring(function="softmax_of_chosen"),
    Scoring(function="sigmoid", normalise=True, scale=2.5),
)


@dataclass(frozen=True)
class RouterCase:
    """The router under test, and the layers that it routes for."""

    subject: Subject[Router[Any]]
    num_experts: int
    top_k: int

    def layers(self, scoring: Scoring = SCORINGS[0], k: int = 0) -> list[RouterLayer]:
        """The layers of a model whose own routers score as `scoring` says, and choose `k` experts (0: the case's)."""
        return [
            RouterLayer(
                index=index, name=f"layers.{index}.gate", num_experts=self.num_experts, top_k=k or self.top_k,
                scoring=scoring,
            )
            for index in range(NUM_LAYERS)
        ]  # fmt: skip

    def make(self, layers: list[RouterLayer] | None = None, *, seed: int = 3) -> Router[Any]:
        """A fresh router, told of its layers."""
        router = self.subject.make()
        router.setup(layers or self.layers(), seed=seed)
        return router

    def logits(self, *, seed: int = 0, num_tokens: int = NUM_TOKENS) -> Tensor:
        """Router logits [n, E]."""
        return 2 * torch.randn(num_tokens, self.num_experts, generator=torch.Generator().manual_seed(seed))

    def call(self, logits: Tensor, *, exploring: bool = True, layer: RouterLayer | None = None) -> RouterCall:
        """The question of one layer."""
        return make_router_call(logits, layer=layer or self.layers()[0], exploring=exploring)


def make_router_call(
    logits: Tensor, *, top_k: int = 2, layer: RouterLayer | None = None, exploring: bool = True, version: int = 1
) -> RouterCall:
    """What a router is asked about n tokens of one sequence, read at one version, with `logits` [n, E].

    layer: whose question it is; by default that of a model with a softmax over all experts, whose `top_k` weights are
    normalised. The model's own answer follows from its scoring.
    """
    if layer is None:
        layer = RouterLayer(
            index=0, name="layers.0.gate", num_experts=logits.shape[-1], top_k=top_k, scoring=SCORINGS[0]
        )
    experts = layer.scoring.choice_scores(logits.detach()).topk(layer.top_k, dim=-1).indices
    positions = torch.arange(len(logits))
    return RouterCall(
        logits=logits,
        own=Routing(experts=experts, weights=layer.scoring.weights(logits, experts)),
        layer=layer,
        tokens=RoutedTokens(
            keys=prefix_keys(positions * 7 % 5, positions),
            versions=torch.full_like(positions, version),
            exploring=exploring,
        ),
    )


def first_of(call: RouterCall, count: int) -> RouterCall:
    """The same question about the first `count` tokens alone."""
    tokens = replace(call.tokens, keys=call.tokens.keys[:count], versions=call.tokens.versions[:count])
    own = Routing(experts=call.own.experts[:count], weights=call.own.weights[:count])
    return replace(call, logits=call.logits[:count], own=own, tokens=tokens)


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
    for scoring in SCORINGS:
        for k in (1, case.top_k, case.num_experts):
            layers = case.layers(scoring, k)
            for exploring, count in ((False, NUM_TOKENS), (True, NUM_TOKENS), (True, 1), (True, 0)):
                call = case.call(case.logits(num_tokens=count), exploring=exploring, layer=layers[1])
                _check_routing(case, case.make(layers).route(call), count, k)


def _check_routing(case: RouterCase, found: Routing, count: int, k: int) -> None:
    shapes = {"experts": (count, k), "weights": (count, k), "probabilities": (count, case.num_experts)}
    for name, shape in shapes.items():
        value: Tensor | None = getattr(found, name)
        if value is None and name == "probabilities":
            continue
        expect(
            value is not None and tuple(value.shape) == shape,
            f"{name} has shape {None if value is None else tuple(value.shape)} for {count} tokens and {k} of "
            f"{case.num_experts} experts",
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
        value = getattr(found, name)
        expect(
            value is None or (bool(torch.isfinite(value).all()) and bool((value >= 0).all())),
            f"{name} are not all finite and at least 0",
            mend="take `call.weights(experts)`, or a softmax of the logits",
        )
    if found.probabilities is not None:
        sums = found.probabilities.detach().sum(dim=-1)
        expect(
            torch.allclose(sums, torch.ones_like(sums), atol=1e-4),
            "probabilities of a token do not sum to 1",
            mend="give the softmax over all E experts, before any is chosen",
        )


def check_normalisation(case: RouterCase) -> None:
    """Where the model's own weights of a token sum to a constant, the router's do too."""
    for scoring in SCORINGS:
        layers = case.layers(scoring)
        for exploring in (False, True):
            call = case.call(case.logits(), exploring=exploring, layer=layers[0])
            sums = case.make(layers).route(call).weights.detach().sum(dim=-1)
            expect(
                torch.allclose(sums, torch.full_like(sums, scoring.scale), atol=1e-4),
                f"where the model's weights sum to {scoring.scale:g}, the router's sum to {float(sums.min()):.4g} to "
                f"{float(sums.max()):.4g}",
                mend="weigh the chosen experts by `call.weights(experts)`, which keeps to the model's own rule",
            )


def check_gradient(case: RouterCase) -> None:
    """A gradient reaches the logits through the weights, and is finite, for extreme logits too."""
    for scale in (1.0, 1e4):
        logits = (scale * case.logits()).requires_grad_()
        found = case.make().route(case.call(logits))
        mend = (
            "compute `weights` from the logits without detaching them; `call.weights(experts)` gives some that carry "
            "a gradient"
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
    """Asked again, or by another worker, a router answers the same, wherever torch's generators are; the logits stay as
    they were."""
    for exploring in (False, True):
        logits = case.logits()
        kept = logits.clone()
        router = case.make()
        answers = []
        for number, asked in enumerate((router, router, case.make())):
            torch.manual_seed(11 + number)
            answers.append(asked.route(case.call(logits, exploring=exploring)))
        expect(torch.equal(logits, kept), "`route` changes the logits", mend="write into no argument")
        expect(
            all(_same(answers[0], other) for other in answers[1:]),
            "asked twice about the same tokens, a router chooses differently",
            mend="draw from `call.uniforms(seed)`, with the seed of `setup`: the generator and the trainer must draw "
            "the same numbers",
        )


def _same(one: Routing, other: Routing) -> bool:
    return torch.equal(one.experts, other.experts) and torch.equal(one.weights, other.weights)


def check_neighbours(case: RouterCase) -> None:
    """What a token gets does not depend on the tokens beside it."""
    for exploring in (False, True):
        call = case.call(case.logits(), exploring=exploring)
        whole, part = case.make().route(call), case.make().route(first_of(call, 5))
        expect(
            torch.equal(whole.experts[:5], part.experts) and torch.allclose(whole.weights[:5], part.weights, atol=1e-5),
            "a token gets other experts when fewer tokens are beside it",
            mend="decide by the token's own logits and key: the trainer's batches are not those of the generator",
        )


def check_capture(case: RouterCase) -> None:
    """A router with `captures` takes the experts that generation chose, in their order, where they are known."""
    if not case.make().captures:
        raise NotApplicable("the router does not ask for captured experts")
    call = case.call(case.logits())
    other = case.logits(seed=1).topk(case.top_k, dim=-1).indices
    captured = other[:, None].expand(-1, NUM_LAYERS, -1).to(captured_dtype(case.num_experts)).clone()
    captured[-1] = torch.iinfo(captured.dtype).max
    found = case.make().route(replace(call, tokens=replace(call.tokens, captured=captured)))
    expect(
        torch.equal(found.experts[:-1], other[:-1]),
        "captured experts are not those that are chosen",
        mend="take `call.replayed()` where it is not -1",
    )
    _check_routing(case, found, NUM_TOKENS, case.top_k)


def check_auxiliary_loss(case: RouterCase) -> None:
    """The losses of two slices of a batch add up to that of the whole."""
    router, layers = case.make(), case.layers()
    routings = []
    for layer in layers:
        call = case.call(case.logits(seed=layer.index).requires_grad_(), layer=layer)
        found = router.route(call)
        routings.append(replace(found, probabilities=call.probabilities()))
    rows = torch.tensor([0] * 5 + [1] * (NUM_TOKENS - 5))
    whole = router.auxiliary_loss(routings, rows, 2)
    parts = [router.auxiliary_loss([_slice(r, where) for r in routings], torch.zeros(n, dtype=torch.int64), 2)
             for where, n in ((slice(0, 5), 5), (slice(5, None), NUM_TOKENS - 5))]  # fmt: skip
    if whole is None:
        raise NotApplicable("the router adds no loss")
    total = sum(float(part.detach()) for part in parts if part is not None)
    loss = float(whole.detach())
    expect(
        whole.dim() == 0 and whole.requires_grad and abs(total - loss) <= 1e-5 * max(1.0, abs(loss)),
        f"the loss of a batch is {loss:.6g}, those of its two sequences add up to {total:.6g}",
        mend="sum a loss of each sequence, and divide by `num_sequences`",
    )


def _slice(routing: Routing, where: slice) -> Routing:
    probabilities = routing.probabilities
    assert probabilities is not None
    return Routing(experts=routing.experts[where], weights=routing.weights[where], probabilities=probabilities[where])


def check_state(case: RouterCase) -> None:
    """State is JSON, and a router that takes it back chooses as the one that gave it."""
    router = case.make()
    for seed in range(3):
        found = router.route(case.call(case.logits(seed=seed)))
        load = torch.bincount(found.experts.flatten(), minlength=case.num_experts).double()
        router.after_update(load.expand(NUM_LAYERS, -1))
    state = check_json(router.state(), "the state")
    other = case.make()
    other.load_state(state)
    expect(
        other.state() == state,
        f"after load_state({state}), the state is {other.state()}",
        mend="`load_state` takes all of it",
    )
    ours, theirs = (each.route(case.call(case.logits(seed=7))) for each in (router, other))
    expect(
        _same(ours, theirs),
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
    check_capture,
    check_auxiliary_loss,
    check_state,
)
