"""Generation under a router: the same numbers as in training, and the experts that come back."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rollstock import (
    Batch,
    Completion,
    GenerationRequest,
    ModelSpec,
    NoOptions,
    Router,
    RouterCall,
    Routing,
    Sampling,
    Trajectory,
)
from rollstock.backends.native import Native, NativeConfig
from rollstock.backends.torch.backend import TorchBackend
from rollstock.backends.torch.config import TorchConfig
from rollstock.hardware.cpu import CPU
from rollstock.manager import make_manager
from rollstock.routing import filled

PROMPTS = ((4, 8, 15), (16, 23), (4, 8, 15, 16, 23))
REQUESTS = [GenerationRequest(prompt=prompt, seed=10 * i + k) for i, prompt in enumerate(PROMPTS) for k in range(3)]
SAMPLING = Sampling(max_new_tokens=9)


def router_of(name: str, **options: Any) -> Router[Any]:
    return make_manager().create_as(Router, {"name": name, **options})


def engine_of(spec: ModelSpec, router: Router[Any] | None, *, version: int = 1, **options: Any) -> Native:
    engine = Native(NativeConfig(**options))
    if router is not None:
        engine.use_router(router)
    engine.setup(spec, CPU(), None)
    engine.load_weights(list(engine._model.named_parameters()), version)
    return engine


def backend_of(spec: ModelSpec, router: Router[Any] | None, **options: Any) -> TorchBackend:
    backend = TorchBackend(TorchConfig(**options))
    if router is not None:
        backend.use_router(router)
    backend.setup(spec, CPU(), trainable=False, total_updates=0)
    return backend


def batch_of(requests: Sequence[GenerationRequest], completions: Sequence[Completion]) -> Batch:
    def trajectory(request: GenerationRequest, done: Completion) -> Trajectory:
        length = len(request.prompt) + len(done.tokens)
        return Trajectory(
            prompt=torch.tensor(request.prompt),
            response=torch.tensor(done.tokens),
            action_mask=torch.ones(len(done.tokens), dtype=torch.bool),
            rollout_logprobs=torch.tensor(done.logprobs),
            versions=torch.tensor(done.versions),
            group=PROMPTS.index(request.prompt),
            routed_experts=None if done.routed_experts is None else filled(done.routed_experts, length),
        )

    return Batch.from_trajectories([trajectory(r, c) for r, c in zip(requests, completions, strict=True)])


def gap(backend: TorchBackend, batch: Batch) -> float:
    """The largest difference between the trainer's log-probs and the sampler's."""
    cuts = [list(range(0, len(batch), 2)), list(range(1, len(batch), 2))]
    found = backend.forward(batch, ["logprobs"], temperature=1.0, micro_batches=cuts)["logprobs"]
    return float((found - batch.flat("rollout_logprobs")).abs().max())


@pytest.mark.parametrize("decoder", ["shared", "plain"])
@pytest.mark.parametrize("name", ["", "topk", "gumbel", "vote", "replay"])
def test_log_probs_of_the_sampler_are_those_of_the_trainer(
    name: str, decoder: str, moe_spec: Callable[..., ModelSpec]
) -> None:
    """Invariant: on policy, ratio 1, with noise in the routers too."""
    spec = moe_spec()
    make: Callable[[], Router[Any] | None] = (lambda: router_of(name)) if name else (lambda: None)
    engine = engine_of(spec, make(), version=7, decoder=decoder, max_batch=4, min_batch=1)
    batch = batch_of(REQUESTS, engine.generate(REQUESTS, SAMPLING).completions)
    assert gap(backend_of(spec, make()), batch) < 1e-5


@pytest.mark.parametrize("architecture", ["olmoe", "mixtral", "deepseek_v3"])
def test_other_architectures_agree_too(architecture: str, moe_spec: Callable[..., ModelSpec]) -> None:
    spec = moe_spec(architecture)
    batch = batch_of(REQUESTS, engine_of(spec, router_of("gumbel")).generate(REQUESTS, SAMPLING).completions)
    assert gap(backend_of(spec, router_of("gumbel")), batch) < 1e-5


def test_noise_depends_on_version_and_seed_and_is_off_in_evaluation(moe_spec: Callable[..., ModelSpec]) -> None:
    spec = moe_spec()
    own = engine_of(spec, None).generate(REQUESTS, SAMPLING).completions
    noisy = {
        version: engine_of(spec, router_of("gumbel"), version=version).generate(REQUESTS, SAMPLING).completions
        for version in (1, 2)
    }
    again = engine_of(spec, router_of("gumbel"), version=1).generate(REQUESTS, SAMPLING).completions
    evaluated = engine_of(spec, router_of("gumbel")).generate(REQUESTS, dataclasses.replace(SAMPLING, exploring=False))
    assert [c.logprobs for c in noisy[1]] == [c.logprobs for c in again]
    assert [c.logprobs for c in noisy[1]] != [c.logprobs for c in noisy[2]]
    assert [c.tokens for c in evaluated.completions] == [c.tokens for c in own] != [c.tokens for c in noisy[1]]
    wrong = dataclasses.replace(spec, seed=spec.seed)
    batch = batch_of(REQUESTS, noisy[1])
    assert gap(backend_of(wrong, router_of("topk")), batch) > 0.01


def test_a_response_with_its_noise_does_not_depend_on_its_neighbours(moe_spec: Callable[..., ModelSpec]) -> None:
    engine = engine_of(moe_spec(), router_of("gumbel"))
    together = engine.generate(REQUESTS, SAMPLING).completions
    alone = [engine.generate([request], SAMPLING).completions[0] for request in REQUESTS]
    assert [c.tokens for c in alone] == [c.tokens for c in together]


def chosen_by(model: Any, tokens: Sequence[int]) -> Tensor:
    """[n, layers, k]: what a model's own routers choose in one plain forward pass."""
    seen: list[Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers]
    hooks = [gate.register_forward_hook(lambda _module, _inputs, output: seen.append(output[2])) for gate in gates]
    model.set_attn_implementation("sdpa")
    model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1)


@pytest.mark.parametrize("decoder", ["shared", "plain"])
def test_every_token_that_was_read_comes_back_with_its_experts(
    decoder: str, moe_spec: Callable[..., ModelSpec]
) -> None:
    spec = moe_spec()
    engine = engine_of(spec, router_of("replay"), decoder=decoder)
    for request, done in zip(REQUESTS, engine.generate(REQUESTS, SAMPLING).completions, strict=True):
        assert done.routed_experts is not None
        assert done.routed_experts.shape == (len(request.prompt) + len(done.tokens) - 1, 2, 2)
        assert done.routed_experts.dtype == torch.uint8
        expected = chosen_by(engine._model, [*request.prompt, *done.tokens[:-1]])
        assert torch.equal(done.routed_experts.long().sort(-1).values, expected.sort(-1).values)


def test_no_experts_come_back_where_the_router_does_not_ask(moe_spec: Callable[..., ModelSpec]) -> None:
    done = engine_of(moe_spec(), router_of("topk")).generate(REQUESTS[:2], SAMPLING).completions
    assert all(completion.routed_experts is None for completion in done)


def test_a_request_without_room_comes_back_with_experts_that_are_missing(moe_spec: Callable[..., ModelSpec]) -> None:
    empty = dataclasses.replace(REQUESTS[0], max_new_tokens=0)
    done = engine_of(moe_spec(), router_of("replay")).generate([empty, REQUESTS[1]], SAMPLING).completions
    assert done[0].tokens == []
    assert done[0].routed_experts is not None
    assert done[0].routed_experts.tolist() == [[[255, 255]] * 2] * 3


def test_replayed_experts_close_the_gap_of_another_precision(moe_spec: Callable[..., ModelSpec]) -> None:
    """A trainer that rounds to bfloat16 chooses other experts here and there, which moves a log-prob by far more than
    its rounding does."""
    spec = moe_spec(num_hidden_layers=4, num_experts=16)
    requests = [dataclasses.replace(r, seed=r.seed + 100 * k) for r in REQUESTS for k in range(4)]
    sampling = Sampling(max_new_tokens=24)
    batch = batch_of(requests, engine_of(spec, router_of("replay")).generate(requests, sampling).completions)
    with_replay = gap(backend_of(spec, router_of("replay"), compute_dtype="bfloat16"), batch)
    without = gap(backend_of(spec, router_of("replay"), compute_dtype="bfloat16"), batch.without("routed_experts"))
    assert without > 3 * with_replay


class Perturbed(Router[NoOptions]):
    """An engine whose router logits are a little off."""

    captures = True

    def route(self, call: RouterCall) -> Routing:
        logits = call.logits + 0.05 * (call.uniforms(1).float() - 0.5)
        experts = call.choose(logits)
        return Routing(experts=experts, weights=call.weights(experts))


def test_replayed_experts_close_the_gap_of_a_router_that_was_off(moe_spec: Callable[..., ModelSpec]) -> None:
    spec = moe_spec(num_hidden_layers=4, num_experts=16)
    sampling = Sampling(max_new_tokens=24)
    batch = batch_of(REQUESTS, engine_of(spec, Perturbed()).generate(REQUESTS, sampling).completions)
    assert gap(backend_of(spec, router_of("replay")), batch) < 1e-5
    assert gap(backend_of(spec, router_of("replay")), batch.without("routed_experts")) > 0.01
