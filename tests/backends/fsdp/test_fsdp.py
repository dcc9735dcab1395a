"""One model in several processes, which are real ones: what `torch` learns in one, they learn together."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rollstock.defaults import EXAMPLE_EXPERTS
from rollstock.testing import check_backend

GRPO: dict[str, Any] = {}
PPO_ACTOR = {"algorithm": {"name": "ppo"}}
PPO_CRITIC = {"algorithm": {"name": "ppo"}, "role": "critic"}
SHARED = ("lora", "compute_dtype", "max_grad_norm")  # options of both backends that change what is trained
SMALL_CUTS = {"scheduler": {"name": "dynamic_batch", "tokens_per_micro_batch": 16}}
HYBRID = {"compressor": {"name": "hybrid", "share": 0.1}}
EXPERTS = {
    **EXAMPLE_EXPERTS,
    **dict.fromkeys(["hidden_size", "intermediate_size"], 16),
    **dict.fromkeys(["moe_intermediate_size", "head_dim"], 8),
    "num_experts": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
}


def backend(**options: Any) -> dict[str, Any]:
    return {"backend": options}


def in_torch(case: dict[str, Any]) -> dict[str, Any]:
    """The same in the torch backend: what it trains is no other, what each process keeps is left out."""
    kept = {name: value for name, value in case.get("backend", {}).items() if name in SHARED}
    others = {name: value for name, value in case.items() if name not in ("backend", "compressor")}
    return {**others, "backend": {**kept, "name": "torch", "layers": "modules"}}


def assert_same(found: dict[str, Any], expected: dict[str, Any], *, tolerance: float = 2e-5) -> None:
    """Curves, columns, weights and optimizers, to rounding."""
    for ours, theirs in zip(found["curve"], expected["curve"], strict=True):
        # What counts the tokens beyond a bound jumps where one stands on it.
        own = {name: value for name, value in theirs.items() if not name.startswith("perf/") and "clipfrac" not in name}
        assert {name: ours[name] for name in own} == pytest.approx(own, rel=tolerance, abs=tolerance)
    torch.testing.assert_close(found["column"], expected["column"], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found["weights"], expected["weights"], atol=tolerance, rtol=tolerance)
    for part in ("model", "optimizer"):
        torch.testing.assert_close(found["tensors"][part], expected["tensors"][part], atol=tolerance, rtol=tolerance)
    assert found["values"]["optimizer"] == expected["values"]["optimizer"]


@pytest.fixture(scope="module")
def two(do_jobs: Any) -> dict[str, Any]:
    """What one process of `torch` and two of `fsdp` come to."""
    cases = {"grpo": {**GRPO, **SMALL_CUTS}, "critic": PPO_CRITIC, "compressed": {**HYBRID, **backend()}}
    reference = {name: in_torch(case) for name, case in cases.items() if name != "compressed"}
    resumed = {"file": "state.pt", "sections": {**HYBRID, **backend(sharding_strategy="NO_SHARD")}}
    return do_jobs(
        "two",
        [
            {"name": "torch", "call": "learn", "with": {"cases": reference}, "count": 1},
            {"name": "fsdp", "call": "learn", "with": {"cases": cases}, "count": 2},
            {"name": "saved", "call": "save", "with": resumed, "count": 2},
            {"name": "loaded", "call": "load", "with": resumed, "count": 2},
            {"name": "accumulated", "call": "accumulate", "count": 2},
            {"name": "refused", "call": "refuse", "count": 2},
            {"name": "listening", "call": "listen", "count": 2},
        ],
    )


@pytest.mark.parametrize("case", ["grpo", "critic"])
def test_two_processes_learn_what_torch_learns(two: dict[str, Any], case: str) -> None:
    assert_same(two["fsdp"][case], two["torch"][case])


def test_gradients_are_counted_on_the_wire(two: dict[str, Any]) -> None:
    found = two["fsdp"]["grpo"]
    size = 4 * sum(tensor.numel() for tensor in found["tensors"]["model"].values())
    assert {step["network/gradient_bytes"] for step in found["curve"]} == {size}  # each process sends half of its own
    assert {step["network/gradient_ratio"] for step in found["curve"]} == {1.0}


def test_compression_cuts_the_bytes_of_gradients_and_changes_what_is_learned_by_little(two: dict[str, Any]) -> None:
    whole, shrunk = two["fsdp"]["grpo"], two["fsdp"]["compressed"]
    assert max(step["network/gradient_ratio"] for step in shrunk["curve"]) < 0.3
    assert shrunk["curve"][0]["actor/pg_loss"] == pytest.approx(whole["curve"][0]["actor/pg_loss"], rel=1e-4)
    assert shrunk["fingerprint"] != whole["fingerprint"]
    assert set(shrunk["tensors"]) == {"model", "optimizer", "compressor"}
    assert all(rows.shape[0] == 2 and bool(rows.any()) for rows in shrunk["tensors"]["compressor"].values())


def test_a_resumed_backend_equals_one_that_never_stopped_to_the_bit(two: dict[str, Any]) -> None:
    assert two["loaded"] == two["saved"]


def test_gradients_travel_once_an_update_however_it_is_cut(two: dict[str, Any]) -> None:
    found = two["accumulated"]
    assert found["modules"] == 3
    assert found["reduced"] == found["modules"]


def test_a_failed_update_leaves_no_trace(two: dict[str, Any]) -> None:
    plain = two["fsdp"]["grpo"]["curve"][1:]
    for ours, expected in zip(two["accumulated"]["after"], plain, strict=True):
        assert ours == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the kernel does not say who listens")
def test_processes_that_meet_on_loopback_listen_nowhere_else(two: dict[str, Any]) -> None:
    assert two["listening"] == {"0100007F"}


def test_what_cannot_be_is_refused(two: dict[str, Any]) -> None:
    size, strategy = two["refused"]
    assert "cannot be number 0 of 3 as well: give roles that share processes" in size
    assert "roles" not in strategy
    assert "3 copies cannot have equal shares of 2 processes" in strategy


@pytest.fixture
def alone() -> Iterator[None]:
    """Nothing of a process group is left behind in this process."""
    yield
    gc.collect()
    assert not dist.is_initialized()


@pytest.mark.usefixtures("alone")
def test_the_conformance_kit_passes() -> None:
    check_backend("fsdp", options={"learning_rate": 1e-2})


@pytest.mark.cluster
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"sharding_strategy": "NO_SHARD", "offload_params": True}, 1e-4),
        ({"activation_checkpointing": True, "logits_memory_mib": 1, "share_prompts": False}, 1e-4),
        ({"lora": {"rank": 4, "alpha": 8}}, 1e-4),
        ({"compute_dtype": "bfloat16"}, 0.25),
    ],
    ids=["offloaded", "checkpointing", "lora", "bfloat16"],
)
def test_the_conformance_kit_passes_with_other_options(options: dict[str, Any], tolerance: float) -> None:
    check_backend("fsdp", options={"learning_rate": 1e-2, **options}, tolerance=tolerance)


CASES: dict[str, dict[str, Any]] = {
    "grpo": {**GRPO, **SMALL_CUTS},
    "ppo": {**PPO_ACTOR, **SMALL_CUTS},
    "critic": {**PPO_CRITIC, **SMALL_CUTS},
    "shared backbone": {"algorithm": {"name": "ppo", "shared_backbone": True}},
    "reward model": {"algorithm": {"name": "reward_model"}},
    "no shard": backend(sharding_strategy="NO_SHARD"),
    "offload": backend(offload_params=True),
    "checkpointing": backend(activation_checkpointing=True),
    "lora": backend(lora={"rank": 2}),
    "clipped": backend(max_grad_norm=0.01),
    "router": {"model": {"config": EXPERTS, "tokenizer": {"characters": "0123456789+="}}, "router": {"name": "vote"}},
}


ANYWHERE = ("grpo", "ppo", "critic")
COMPRESSED = ("hybrid FULL", "hybrid HYBRID", "hybrid NO_SHARD", "int8 FULL", "topk NO_SHARD")


@pytest.fixture(scope="module")
def many(do_jobs: Any) -> dict[str, Any]:
    """All kinds of training in one process of `torch` and in 1, 2 and 4 of `fsdp`; a state of two read by others."""
    four = {**CASES, "hybrid": backend(sharding_strategy="HYBRID"), "bfloat16": backend(compute_dtype="bfloat16")}
    few = {name: CASES[name] for name in ANYWHERE}
    compressed = {}
    for case in COMPRESSED:
        name, strategy = case.split()
        compressed[case] = {"compressor": {"name": name}, **backend(sharding_strategy=strategy)}
    saved = {"file": "state.pt", "sections": {}}
    torch_backend = {"file": "state.pt", "sections": backend(name="torch", layers="modules")}
    return do_jobs(
        "many",
        [
            {
                "name": "torch",
                "call": "learn",
                "count": 1,
                "with": {"cases": {k: in_torch(v) for k, v in four.items()}},
            },
            {"name": "1", "call": "learn", "count": 1, "with": {"cases": few}},
            {"name": "2", "call": "learn", "count": 2, "with": {"cases": few}},
            {"name": "4", "call": "learn", "count": 4, "with": {"cases": four}},
            {"name": "compressed", "call": "learn", "count": 4, "with": {"cases": compressed}},
            {"name": "saved", "call": "save", "count": 2, "with": saved},
            {"name": "loaded by torch", "call": "load", "count": 1, "with": torch_backend},
            *({"name": f"loaded by {n}", "call": "load", "count": n, "with": saved} for n in (1, 2, 4)),
        ],
    )


@pytest.mark.cluster
@pytest.mark.parametrize("count", ["1", "2"])
@pytest.mark.parametrize("case", ANYWHERE)
def test_any_number_of_processes_learns_what_torch_learns(many: dict[str, Any], count: str, case: str) -> None:
    assert_same(many[count][case], many["torch"][case])


@pytest.mark.cluster
@pytest.mark.parametrize("case", [*CASES, "hybrid"])
def test_however_a_model_is_spread_and_trained_it_learns_what_torch_learns(many: dict[str, Any], case: str) -> None:
    assert_same(many["4"][case], many["torch"][case])


@pytest.mark.cluster
def test_lower_precision_is_that_of_torch_to_its_own_rounding_and_keeps_float32(many: dict[str, Any]) -> None:
    found, expected = many["4"]["bfloat16"], many["torch"]["bfloat16"]
    assert {tensor.dtype for part in found["tensors"].values() for tensor in part.values()} == {torch.float32}
    assert found["curve"][0]["actor/grad_norm"] == pytest.approx(expected["curve"][0]["actor/grad_norm"], rel=0.05)
    torch.testing.assert_close(found["column"], expected["column"], atol=0.2, rtol=0.05)


@pytest.mark.cluster
@pytest.mark.parametrize("case", COMPRESSED)
def test_every_strategy_sends_compressed_gradients(many: dict[str, Any], case: str) -> None:
    found, plain = many["compressed"][case], many["4"]["grpo"]
    name, strategy = case.split()
    ratio = max(step["network/gradient_ratio"] for step in found["curve"])
    # Four processes send (p - 1) times what is left, where a ring sends 2 (p - 1) / p; within a copy nothing is shrunk.
    assert 0 < ratio < (0.9 if strategy == "HYBRID" or name == "int8" else 0.5)
    assert found["curve"][0]["actor/pg_loss"] == pytest.approx(plain["curve"][0]["actor/pg_loss"], rel=1e-4)
    if name == "int8":
        torch.testing.assert_close(found["column"], plain["column"], atol=0.3, rtol=0.3)


@pytest.mark.cluster
@pytest.mark.parametrize("by", ["torch", "1", "4"])
def test_what_two_processes_saved_others_go_on_with(many: dict[str, Any], by: str) -> None:
    *curve, _ = many[f"loaded by {by}"]
    *expected, _ = many["saved"]
    for ours, theirs in zip(curve, expected, strict=True):
        names = set(ours) & set(theirs) - {"network/gradient_bytes", "network/gradient_raw_bytes"}
        assert len(names) > 5
        assert {n: ours[n] for n in names} == pytest.approx({n: theirs[n] for n in names}, rel=1e-4, abs=1e-5)
    assert many["loaded by 2"] == many["saved"]
