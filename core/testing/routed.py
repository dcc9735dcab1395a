"""What those who run a model owe to a router: checks of the backend kit and of the rollout kit.

Both are done on a tiny mixture-of-experts model, under routers whose answers show whether they were told the right
things. A backend or an engine that says that it cannot replace the choice of experts is not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rollstock.batch import Batch, Trajectory
from rollstock.errors import UserError
from rollstock.interfaces.backend import Backend
from rollstock.interfaces.model import ModelSpec
from rollstock.interfaces.rollout import Completion, Rollout, Sampling
from rollstock.interfaces.router import Router
from rollstock.metrics import Metrics, metric_values
from rollstock.plugin import NoOptions
from rollstock.routing import RouterCall, RouterLayer, Routing, captured_dtype, prefix_keys
from rollstock.seeding import derive_seed
from rollstock.testing import models
from rollstock.testing.backend_case import TEMPERATURE, BackendCase, forward, small_batch, update, whole
from rollstock.testing.engine import MAX_NEW_TOKENS, VERSION, RolloutCase, requests
from rollstock.testing.kit import NotApplicable, expect

_LAYERS, _EXPERTS, _TOP_K = 2, 4, 2
_MOVES = 1e-2  # nats by which other experts change some log-prob at least
_MEND_TOLD = (
    "give each token the key of its sequence so far (`rollstock.routing.prefix_keys`), the version that it "
    "was read at, and whether it is one to train on"
)


class ByKey(Router[NoOptions]):
    """Chooses by the token's key alone where it explores and the token is of version 3, and else as the model does;
    keeps what it is told."""

    captures = True

    def setup(self, layers: Sequence[RouterLayer], *, seed: int) -> None:
        """See `Router.setup`."""
        self.layers, self.seed = list(layers), seed
        self.loads: list[Tensor] = []

    def route(self, call: RouterCall) -> Routing:
        """See `Router.route`."""
        own = call.own.experts
        steers = (call.tokens.versions == VERSION)[:, None] & call.tokens.exploring
        experts = torch.where(steers, experts_of(call.tokens.keys)[:, call.layer.index], own)
        return Routing(experts=experts, weights=call.weights(experts))

    def after_update(self, load: Tensor) -> Metrics:
        """See `Router.after_update`."""
        self.loads.append(load.cpu())
        return {}


class Replays(ByKey):
    """Takes the captured experts where there are some."""

    def route(self, call: RouterCall) -> Routing:
        """See `Router.route`."""
        replayed = call.replayed()
        experts = call.own.experts if replayed is None else torch.where(replayed >= 0, replayed, call.own.experts)
        return Routing(experts=experts, weights=call.weights(experts))


class Costs(ByKey):
    """Adds a loss that pulls the first expert down."""

    def auxiliary_loss(self, layers: Sequence[Routing], rows: Tensor, num_sequences: int) -> Tensor | None:
        """See `Router.auxiliary_loss`."""
        probabilities = [routing.probabilities for routing in layers]
        assert all(found is not None for found in probabilities)
        return 10 * sum((found[:, 0].sum() for found in probabilities if found is not None), torch.zeros(()))


def experts_of(keys: Tensor) -> Tensor:
    """[n, layers, k] int64: two different experts of four for each key [n] and layer."""
    layers = torch.arange(_LAYERS, device=keys.device)
    first = (keys[:, None] + layers) % _EXPERTS
    second = (first + 1 + (keys[:, None] // _EXPERTS) % (_EXPERTS - 1)) % _EXPERTS
    return torch.stack([first, second], dim=-1)


def experts_model() -> ModelSpec:
    """A tiny random mixture-of-experts model, of the tokens that `tiny_model` has."""
    tiny = models.tiny_model()
    block = {
        **tiny.config, "model_type": "qwen3_moe", "moe_intermediate_size": 32, "head_dim": 8, "norm_topk_prob": True,
        "num_experts": _EXPERTS, "num_experts_per_tok": _TOP_K, "num_hidden_layers": _LAYERS,
    }  # fmt: skip
    return replace(tiny, config=block)


def check_router(case: BackendCase) -> None:
    """A router that the backend takes is told of layers and tokens, chooses the experts, and hears of their load; any
    packing and slicing, and captured experts, give the same."""
    case = replace(case, model=experts_model())
    batch = _batch(VERSION)
    backend, router = _backend(case, ByKey())
    _check_setup(router, case.model)
    plain = models.plain_model(case.model, [(name, tensor.cpu()) for name, tensor in backend.weights()])
    expected = torch.cat(
        [
            models.plain_logprobs(plain, batch.prompts[i].tolist(), batch.response(i).tolist(), TEMPERATURE)["logprobs"]
            for i in range(len(batch))
        ]
    )
    mask, steered = batch.flat("action_mask"), forward(backend, batch, whole(batch))["logprobs"]

    def gap(found: Tensor, other: Tensor) -> float:
        return float((found - other)[mask].abs().max())

    own = forward(backend, _batch(VERSION + 1), whole(batch))["logprobs"]
    expect(
        gap(own, expected) <= case.tolerance,
        f"under a router that chooses as the model does, log-probs differ by up to {gap(own, expected):.3g} nats from "
        "plain transformers'",
        mend="take the router's weights as they are; " + _MEND_TOLD,
    )
    expect(
        gap(steered, expected) > _MOVES,
        "a router that chooses other experts changes no log-prob",
        mend="let the answer of `Router.route` stand in for the model's own choice; " + _MEND_TOLD,
    )
    apart = forward(backend, batch, [[i] for i in reversed(range(len(batch)))])["logprobs"]
    expect(
        gap(steered, apart) <= case.tolerance,
        "a router that chooses by the keys of tokens chooses otherwise where trajectories are read one at a time",
        mend=_MEND_TOLD,
    )
    replaying, _ = _backend(case, Replays())
    replayed = forward(replaying, _batch(VERSION + 1, captured=True), whole(batch))["logprobs"]
    expect(
        gap(steered, replayed) <= case.tolerance,
        f"with those very experts captured in `routed_experts`, log-probs differ by up to {gap(steered, replayed):.3g}",
        mend="give each token its row of the column, prompts included (`Batch.packed_column`)",
    )
    _check_update(case, batch)


def _check_update(case: BackendCase, batch: Batch) -> None:
    keys = torch.cat([_keys(batch, i)[len(batch.prompts[i]) :] for i in range(len(batch))])
    counts = torch.nn.functional.one_hot(experts_of(keys), _EXPERTS).sum(dim=(0, 2)).double()  # [layers, E]
    norms = []
    for cuts, router in (
        (whole(batch), ByKey()),
        ([[i] for i in range(len(batch))], Costs()),
        (whole(batch), Costs()),
    ):
        backend, _ = _backend(case, router)
        metrics = update(backend, batch, cuts)
        expect(
            len(router.loads) == 1 and torch.equal(router.loads[0].double(), counts),
            f"of an update the router hears the loads {[load.tolist() for load in router.loads]}, and the response "
            f"tokens chose {counts.tolist()}",
            mend="call `after_update` once an update, with what the response tokens of all micro-batches chose",
        )
        expect(
            any(name.startswith("moe/") for name in metrics),
            f"an update under a router gives the metrics {sorted(metrics)}, none of them `moe/...`",
            mend="measure load and entropy of routing",
        )
        norms.append(metric_values(metrics)["grad_norm"])
    expect(
        abs(norms[0] - norms[2]) > 1e-3 * norms[0],
        "the router's `auxiliary_loss` changes no gradient",
        mend="add it to the loss of the micro-batch before `backward`, with `probabilities` that carry gradients",
    )
    expect(
        abs(norms[1] - norms[2]) <= 1e-3 * norms[2],
        f"with an `auxiliary_loss` that adds up, the gradient's norm is {norms[2]:.6g} for the whole batch and "
        f"{norms[1]:.6g} in single trajectories",
        mend="ask for it in each micro-batch, and add the results up as they are",
    )


def check_steering(case: RolloutCase) -> None:
    """A router that the engine takes is told of layers and tokens, and chooses the experts; those come back, of every
    token that was read, where it asks for them."""
    case = replace(case, model=experts_model())
    engine, router = case.subject.make(), ByKey()
    _use(engine, router)
    engine.setup(case.model, case.device, case.tokenizer)
    _check_setup(router, case.model)
    engine.load_weights(case.weights(), VERSION)
    asked, sampling = requests(), Sampling(max_new_tokens=MAX_NEW_TOKENS)
    plain = case.plain()

    def gap(completions: Sequence[Completion]) -> float:
        """How far log-probs are from those of the model's own choice."""
        gaps = [0.0]
        for request, found in zip(asked, completions, strict=True):
            if found.tokens:
                expected = models.plain_logprobs(plain, request.prompt, found.tokens, 1.0)["logprobs"]
                gaps.append(float((expected - torch.tensor(found.logprobs)).abs().max()))
        return max(gaps)

    steered = engine.generate(asked, sampling).completions
    expect(
        gap(steered) > _MOVES,
        "a router that chooses other experts changes no log-prob",
        mend="let the answer of `Router.route` stand in for the model's own choice; " + _MEND_TOLD,
    )
    for request, found in zip(asked, steered, strict=True):
        read = torch.tensor([*request.prompt, *found.tokens[:-1]])
        expected = experts_of(prefix_keys(read, torch.arange(len(read)))).to(captured_dtype(_EXPERTS))
        back = found.routed_experts
        expect(
            back is not None and back.dtype == expected.dtype and torch.equal(back.cpu(), expected),
            f"after a prompt of {len(request.prompt)} tokens and a response of {len(found.tokens)}, the completion has "
            f"the experts {None if back is None else back.tolist()}, and the router chose {expected.tolist()}",
            mend="return `routed_experts` [P + T - 1, layers, k] in the type of `captured_dtype`; " + _MEND_TOLD,
        )
    evaluated = gap(engine.generate(asked, replace(sampling, exploring=False)).completions)
    engine.load_weights(case.weights(), VERSION + 1)
    later = gap(engine.generate(asked, sampling).completions)
    for what, distance in (("with `sampling.exploring` False", evaluated), ("with weights of another version", later)):
        expect(
            distance <= case.tolerance,
            f"{what} this router chooses as the model does, and log-probs differ by up to {distance:.3g} nats from "
            "plain transformers'",
            mend=_MEND_TOLD,
        )


def _backend(case: BackendCase, router: ByKey) -> tuple[Backend[Any], ByKey]:
    backend = case.subject.make()
    _use(backend, router)
    backend.setup(case.model, case.device, trainable=True, total_updates=100)
    return backend, router


def _use(plugin: Backend[Any] | Rollout[Any], router: Router[Any]) -> None:
    try:
        plugin.use_router(router)
    except UserError as refusal:
        raise NotApplicable(f"it takes no router: {refusal}") from refusal


def _check_setup(router: ByKey, model: ModelSpec) -> None:
    expect(
        hasattr(router, "layers"), "`setup` tells the router of no layers", mend="call `router.setup(layers, seed=)`"
    )
    found = [(layer.index, layer.num_experts, layer.top_k) for layer in router.layers]
    expected = [(index, _EXPERTS, _TOP_K) for index in range(_LAYERS)]
    expect(
        found == expected,
        f"the router is told of layers with (index, experts, choices) {found}, and the model has {expected}",
        mend="name every mixture-of-experts layer in order, as `rollstock.backends.moe.find_routers` does",
    )
    expect(
        router.seed == derive_seed(model.seed, "router"),
        f"the router's seed is {router.seed}",
        mend='give it `derive_seed(model.seed, "router")`, so that generation and training draw alike',
    )


def _batch(version: int, *, captured: bool = False) -> Batch:
    """The small batch, as if that version of a policy had made it, if asked with the experts that `ByKey` chooses."""
    batch = small_batch()
    masks = batch.flat("action_mask").split(batch.lengths.tolist())
    return Batch.from_trajectories(
        [
            Trajectory(
                prompt=batch.prompts[i],
                response=batch.response(i),
                action_mask=mask,
                rollout_logprobs=torch.zeros(len(mask)),
                versions=torch.where(mask, version, -1),
                group=int(batch.groups[i]),
                routed_experts=experts_of(_keys(batch, i)).to(captured_dtype(_EXPERTS)) if captured else None,
            )
            for i, mask in enumerate(masks)
        ]
    )


def _keys(batch: Batch, index: int) -> Tensor:
    tokens = torch.cat([batch.prompts[index], batch.response(index)])
    return prefix_keys(tokens, torch.arange(len(tokens)))
