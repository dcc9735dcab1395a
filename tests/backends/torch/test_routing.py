"""Routers in the torch backend: packed streams, slices, shared prompts, and what is counted."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rollstock import Batch, Loss, Metrics, MicroBatch, ModelSpec, NoOptions, Router, RouterCall, Routing, Totals
from rollstock.backends.torch.backend import TorchBackend
from rollstock.backends.torch.config import TorchConfig
from rollstock.backends.torch.layout import make_layout
from rollstock.backends.torch.routing import packed_keys, token_versions
from rollstock.hardware.cpu import CPU
from rollstock.manager import make_manager
from rollstock.routing import captured_dtype, missing, prefix_keys
from rollstock.testing import make_trajectory

PROMPTS = ([4, 8, 15], [4, 8, 15], [16, 23], [4, 8, 15])
LENGTHS = (5, 2, 4, 6)
ALL = [0, 1, 2, 3]


def batch(*, routed: Sequence[Tensor] | None = None, versions: Sequence[int] = (1, 1, 1, 1)) -> Batch:
    """Four trajectories, three with one prompt; one token of the third is an observation."""
    made = []
    for i, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        trajectory = make_trajectory(
            length, prompt=prompt, group=int(i == 2), observations=[1] if i == 2 else [], seed=i, vocab_size=31
        )
        trajectory = dataclasses.replace(
            trajectory,
            versions=torch.where(trajectory.action_mask, versions[i], -1),
            routed_experts=None if routed is None else routed[i],
        )
        made.append(trajectory)
    return Batch.from_trajectories(made)


def router_of(name: str, **options: Any) -> Router[Any]:
    return make_manager().create_as(Router, {"name": name, **options})


def backend_of(spec: ModelSpec, router: Router[Any] | None, **options: Any) -> TorchBackend:
    backend = TorchBackend(TorchConfig(**{"learning_rate": 1e-2, **options}))
    if router is not None:
        backend.use_router(router)
    backend.setup(spec, CPU(), trainable=True, total_updates=10)
    return backend


def loss(micro: MicroBatch) -> Loss:
    return micro.loss(-micro.logprobs, mode="token_mean")


def updated(backend: TorchBackend, whole: Batch, cuts: Sequence[Sequence[int]]) -> tuple[Metrics, dict[str, Tensor]]:
    """One update: metrics, and the weights afterwards."""
    totals = Totals.of(whole, response_limit=8)
    metrics = backend.update(whole, loss, outputs=["logprobs"], temperature=1.0, micro_batches=cuts, totals=totals)
    return metrics, {name: tensor.clone() for name, tensor in backend.weights()}


def logprobs(backend: TorchBackend, whole: Batch, cuts: Sequence[Sequence[int]]) -> Tensor:
    return backend.forward(whole, ["logprobs"], temperature=1.0, micro_batches=cuts)["logprobs"]


def chosen_at_random(seed: int, num_experts: int = 8) -> list[Tensor]:
    """Captured experts for `batch`: what no router would choose by itself. Prompts that are equal have the same."""
    generator = torch.Generator().manual_seed(seed)
    by_prompt: dict[tuple[int, ...], Tensor] = {}
    found = []

    def draw(count: int) -> Tensor:
        return torch.rand(count, 2, num_experts, generator=generator).topk(2).indices.to(captured_dtype(num_experts))

    for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
        own = by_prompt.setdefault(tuple(prompt), draw(len(prompt)))
        found.append(torch.cat([own, draw(length)]))
    return found


def test_keys_are_those_of_each_sequence_alone() -> None:
    whole = batch()
    packed = whole.packed()
    keys = packed_keys(packed).split(packed.lengths.tolist())
    for i, prompt in enumerate(whole.prompts):
        tokens = torch.cat([prompt, whole.response(i)])
        assert torch.equal(keys[i], prefix_keys(tokens, torch.arange(len(tokens))))
    assert torch.equal(keys[0][:3], keys[1][:3])
    assert len(torch.cat([keys[0], keys[1][3:], keys[2], keys[3][3:]]).unique()) == 3 + 5 + 2 + 2 + 4 + 6


def test_a_token_has_the_version_that_read_it() -> None:
    whole = batch(versions=(3, 4, 5, 6))
    whole.set_flat("versions", torch.tensor([3, 3, 4, 4, 4, 4, 4, 5, -1, 7, 7, 6, 6, 6, 6, 6, 6]))
    assert token_versions(whole).split(whole.packed().lengths.tolist())[0].tolist() == [3, 3, 3, 3, 3, 4, 4, 4]
    # The observation behind the first token is read when the policy, by then version 7, goes on.
    assert token_versions(whole).split(whole.packed().lengths.tolist())[2].tolist() == [5, 5, 5, 7, 7, 7]


def test_tokens_of_a_trajectory_that_the_policy_has_no_part_in_have_version_0() -> None:
    whole = batch()
    whole.set_flat("action_mask", torch.zeros(17, dtype=torch.bool))
    assert token_versions(whole).tolist() == [0] * 28


@pytest.mark.parametrize("name", ["topk", "gumbel", "vote", "replay"])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "olmoe", "mixtral"])
def test_any_slices_give_the_same_update_and_metrics(
    name: str, architecture: str, moe_spec: Callable[..., ModelSpec]
) -> None:
    """Invariant: slicing. Load and balance loss add up, and noise goes with the token."""
    options = {"auxiliary_loss": 0.5, "bias_rate": 0.1}
    routed = chosen_at_random(1) if name == "replay" else None
    results = []
    for cuts, share in (([ALL], True), ([[2, 0], [3, 1]], True), ([[3], [2], [1], [0]], False)):
        router = router_of(name, **options)
        # With a large eps the step is all but linear in the gradient; else Adam would make much of rounding.
        backend = backend_of(moe_spec(architecture), router, share_prompts=share, eps=1.0, learning_rate=1.0)
        metrics, weights = updated(backend, batch(routed=routed), cuts)
        results.append((metrics, weights, router.state()))
    metrics, weights, state = results[0]
    assert metrics["moe/auxiliary_loss"].value > 0
    for other_metrics, other_weights, other_state in results[1:]:
        assert other_state == state
        assert other_metrics.keys() == metrics.keys()
        for key in metrics:
            assert other_metrics[key].value == pytest.approx(metrics[key].value, rel=1e-4, abs=1e-6), key
        for key in weights:
            torch.testing.assert_close(other_weights[key], weights[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["topk", "gumbel"])
def test_layers_that_are_computed_again_choose_again_what_they_chose(
    name: str, moe_spec: Callable[..., ModelSpec]
) -> None:
    options = {"auxiliary_loss": 0.5}
    plain = updated(backend_of(moe_spec(), router_of(name, **options)), batch(), [ALL])
    again = updated(backend_of(moe_spec(), router_of(name, **options), activation_checkpointing=True), batch(), [ALL])
    assert {k: m.value for k, m in plain[0].items()} == {k: m.value for k, m in again[0].items()}
    assert all(torch.equal(plain[1][key], again[1][key]) for key in plain[1])


def test_a_router_that_changes_nothing_changes_no_number(moe_spec: Callable[..., ModelSpec]) -> None:
    bare, routed = backend_of(moe_spec(), None), backend_of(moe_spec(), router_of("topk"))
    assert torch.equal(logprobs(bare, batch(), [ALL]), logprobs(routed, batch(), [ALL]))
    (metrics, weights), (counted, others) = updated(bare, batch(), [ALL]), updated(routed, batch(), [ALL])
    assert all(torch.equal(weights[key], others[key]) for key in weights)
    assert {name for name in counted if not name.startswith("moe/")} == set(metrics)
    assert not any(name.startswith("moe/") for name in metrics)


def test_captured_experts_are_used_again_wherever_they_stand(moe_spec: Callable[..., ModelSpec]) -> None:
    """Packed and cut in any way, a token gets the experts that were captured for it, prompts included."""
    spec = moe_spec()
    backend = backend_of(spec, router_of("replay"))
    one, other = batch(routed=chosen_at_random(1)), batch(routed=chosen_at_random(2))
    whole = logprobs(backend, one, [ALL])
    torch.testing.assert_close(logprobs(backend, one, [[3], [0, 2], [1]]), whole)
    unshared = backend_of(spec, router_of("replay"), share_prompts=False)
    torch.testing.assert_close(logprobs(unshared, one, [ALL]), whole)
    assert float((logprobs(backend, other, [ALL]) - whole).abs().max()) > 0.05
    prompts_differ = [tensor.clone() for tensor in chosen_at_random(1)]
    for tensor, prompt in zip(prompts_differ, PROMPTS, strict=True):
        tensor[: len(prompt)] = tensor[: len(prompt)].flip(1)
    assert float((logprobs(backend, batch(routed=prompts_differ), [ALL]) - whole).abs().max()) > 0.01


def test_prompts_are_shared_only_by_those_that_read_them_alike(moe_spec: Callable[..., ModelSpec]) -> None:
    backend = backend_of(moe_spec(), router_of("replay"))
    assert backend._routing is not None
    routed = chosen_at_random(1)
    routed[1] = routed[1].flip(0)
    marks = backend._routing.marks(batch(routed=routed))
    assert marks[0] == marks[3]
    assert len(set(marks)) == 3
    assert make_layout(batch(), share_prompts=True).tokens.numel() == 28 - 6
    assert make_layout(batch(), share_prompts=True, marks=marks).tokens.numel() == 28 - 3
    whole = logprobs(backend, batch(routed=routed), [ALL])
    torch.testing.assert_close(logprobs(backend, batch(routed=routed), [[0], [1], [2], [3]]), whole)
    versions = backend._routing.marks(batch(versions=(1, 2, 1, 1)))
    assert versions[0] == versions[3] != versions[1]


def test_what_was_not_captured_is_the_models_own_choice_and_counted(moe_spec: Callable[..., ModelSpec]) -> None:
    routed = chosen_at_random(1)
    nothing = [torch.full_like(tensor, missing(tensor.dtype)) for tensor in routed]
    bare, backend = backend_of(moe_spec(), None), backend_of(moe_spec(), router_of("replay"))
    torch.testing.assert_close(logprobs(backend, batch(routed=nothing), [ALL]), logprobs(bare, batch(), [ALL]))
    for tensor in routed:
        tensor[-1] = missing(tensor.dtype)
    metrics, _ = updated(backend, batch(routed=routed), [ALL])
    assert metrics["moe/replayed_share"].value == pytest.approx(13 / 17)


class Forgetful(Router[NoOptions]):
    """Chooses the first experts, and gives every third token nothing from its first one."""

    def route(self, call: RouterCall) -> Routing:
        experts = torch.arange(call.layer.top_k).expand(len(call.logits), -1).contiguous()
        dropped = torch.zeros_like(experts, dtype=torch.bool)
        dropped[call.tokens.keys % 3 == 0, 0] = True
        return Routing(experts=experts, weights=call.weights(experts).masked_fill(dropped, 0.0))


def test_load_entropy_and_dropped_tokens_are_counted_over_response_tokens(moe_spec: Callable[..., ModelSpec]) -> None:
    whole = batch()
    metrics, _ = updated(backend_of(moe_spec(), Forgetful()), whole, [[0, 2], [1, 3]])
    keys = packed_keys(whole.packed())[whole.packed().predicts + 1]
    assert metrics["moe/dropped_tokens"].value == 2 * int((keys % 3 == 0).sum()) > 0
    loads = {name: metric.value for name, metric in metrics.items() if name.startswith("moe/load/")}
    assert len(loads) == 16
    assert loads["moe/load/layer_00/expert_001"] == 0.5
    assert loads["moe/load/layer_01/expert_002"] == 0.0
    assert metrics["moe/num_idle_experts"].value == 12
    assert metrics["moe/max_violation"].value == pytest.approx(3.0)  # two experts of eight have it all
    assert metrics["moe/max_violation_worst"].value == pytest.approx(3.0)
    assert 0 < metrics["moe/entropy"].value < torch.log(torch.tensor(8.0))


@pytest.mark.parametrize("cuts", [[ALL], [[0], [1, 2, 3]], [[3, 0], [2], [1]]])
def test_a_trajectory_without_any_action_counts_nothing_wherever_it_stands(
    cuts: list[list[int]], moe_spec: Callable[..., ModelSpec]
) -> None:
    """Nor does it cost anything: the same as if it were not there."""
    whole = batch()
    mask = whole.flat("action_mask").clone()
    mask[:5] = False
    whole.set_flat("action_mask", mask)
    router = router_of("topk", auxiliary_loss=0.5, bias_rate=0.1)
    metrics, _ = updated(backend_of(moe_spec(), router), whole, cuts)
    alone = router_of("topk", auxiliary_loss=0.5, bias_rate=0.1)
    expected, _ = updated(backend_of(moe_spec(), alone), whole.select([1, 2, 3]), [[0, 1, 2]])
    assert sum(m.weight for name, m in metrics.items() if name.startswith("moe/load/layer_00")) / 8 == 2 * 12
    assert metrics["moe/auxiliary_loss"].value == pytest.approx(expected["moe/auxiliary_loss"].value, rel=1e-4)
    assert metrics["grad_norm"].value == pytest.approx(expected["grad_norm"].value, rel=1e-4)
    assert router.state() == alone.state()


def test_a_model_in_lower_precision_is_routed_too(moe_spec: Callable[..., ModelSpec]) -> None:
    backend = backend_of(moe_spec("mixtral"), router_of("gumbel", auxiliary_loss=0.1), compute_dtype="bfloat16")
    metrics, _ = updated(backend, batch(), [ALL])
    assert metrics["skipped_updates"].value == 0
    assert metrics["moe/auxiliary_loss"].value > 0
