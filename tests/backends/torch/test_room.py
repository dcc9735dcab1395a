"""A micro-batch that does not fit is done in halves, and the update is the one that it would have been."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollstock import Batch, Loss, MicroBatch, RunError, Totals
from rollstock.backends.torch import attention
from rollstock.backends.torch.backend import TorchBackend
from rollstock.hardware.cpu import CPU
from rollstock.plugins.routers.topk import TopK

Make = Callable[..., TorchBackend]


def likelihood(micro: MicroBatch) -> Loss:
    return micro.loss(-micro.logprobs, {"seen": micro.mean(micro.logprobs)})


def update(backend: TorchBackend, batch: Batch, cuts: list[list[int]], loss: Any = likelihood) -> dict[str, float]:
    metrics = backend.update(
        batch,
        loss,
        outputs=["logprobs"],
        temperature=1.0,
        micro_batches=cuts,
        totals=Totals.of(batch, response_limit=10),
    )
    return {name: metric.value for name, metric in metrics.items()}


class Refusing:
    """A loss that finds no memory for more than `most` trajectories at once, in the forward or the backward pass.

    In the backward pass it fails at the attention of the last layer, when the gradients of what is behind it have been
    added already.
    """

    def __init__(self, most: int, where: str = "forward") -> None:
        self.most, self.where = most, where
        self.seen: list[int] = []
        self._is_armed = False

    def __call__(self, micro: MicroBatch) -> Loss:
        size = len(micro.batch)
        self.seen.append(size)
        self._is_armed = size > self.most
        if self._is_armed and self.where == "forward":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return likelihood(micro)

    def refuse(self, gradient: Tensor) -> Tensor:
        if self._is_armed and self.where == "backward":
            raise torch.OutOfMemoryError("no memory for this")
        return gradient


@pytest.fixture
def watch_attention(monkeypatch: pytest.MonkeyPatch) -> Callable[[Refusing], None]:
    """Has the backward pass of each attention ask first."""
    attend = attention._attend

    def watch(loss: Refusing) -> None:
        def watched(*given: Any, **options: Any) -> Tensor:
            output = attend(*given, **options)
            output.register_hook(loss.refuse)
            return output

        monkeypatch.setattr(attention, "_attend", watched)

    return watch


def assert_same_update(one: TorchBackend, other: TorchBackend) -> None:
    for (name, mine), (_, theirs) in zip(one.weights(), other.weights(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=name)


WHOLE = [[0, 1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize("layers", ["lean", "modules"])
@pytest.mark.parametrize(
    ("where", "seen"),
    [("forward", [1, 4, 2, 2, 2]), ("backward", [1, 4, 1, 2, 2, 2])],  # backward: what was added before is lost
)
def test_an_update_that_runs_out_of_memory_equals_an_undisturbed_one(
    make_backend: Make, batch: Batch, where: str, seen: list[int], layers: str, watch_attention: Any
) -> None:
    smooth, rough = make_backend(layers=layers), make_backend(layers=layers)
    cuts = [[0], [1, 3, 5, 2], [4, 6]]
    expected = update(smooth, batch, cuts)
    loss = Refusing(2, where)
    watch_attention(loss)
    found = update(rough, batch, cuts, loss)
    assert loss.seen == seen
    assert found.pop("perf/num_allocation_failures") == 1
    assert expected.pop("perf/num_allocation_failures") == 0
    assert found == pytest.approx(expected, rel=1e-5)
    assert_same_update(smooth, rough)


def test_a_size_that_failed_is_not_tried_again(make_backend: Make, batch: Batch) -> None:
    backend = make_backend()
    loss = Refusing(2)
    assert update(backend, batch, WHOLE, loss)["perf/num_allocation_failures"] >= 2
    assert max(loss.seen) > 2
    loss.seen.clear()
    assert update(backend, batch, WHOLE, loss)["perf/num_allocation_failures"] == 0
    assert max(loss.seen) <= 2
    assert sum(loss.seen) == 7


def test_scoring_without_gradients_is_halved_too_and_counted_with_the_next_update(
    make_backend: Make, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend()
    expected = backend.forward(batch, ["logprobs", "entropy"], temperature=1.0, micro_batches=WHOLE)
    outputs, sizes = backend._outputs, []

    def refusing(part: Batch, *rest: Any) -> dict[str, Tensor]:
        sizes.append(len(part))
        if len(part) > 4:
            raise MemoryError
        return outputs(part, *rest)

    monkeypatch.setattr(backend, "_outputs", refusing)
    found = backend.forward(batch, ["logprobs", "entropy"], temperature=1.0, micro_batches=WHOLE)
    monkeypatch.undo()
    assert sizes[0] == 7
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    assert update(backend, batch, WHOLE)["perf/num_allocation_failures"] == 1


def test_groups_that_must_stay_whole_are_not_cut(make_backend: Make, batch: Batch) -> None:
    batch.whole_groups = True
    smooth, rough = make_backend(), make_backend()
    update(smooth, batch, WHOLE)
    seen: list[set[int]] = []
    refuse = Refusing(4)

    def loss(micro: MicroBatch) -> Loss:
        found = refuse(micro)
        seen.append(set(micro.batch.groups.tolist()))
        return found

    update(rough, batch, WHOLE, loss)
    assert sorted(map(sorted, seen)) == [[0], [1, 2]]
    assert_same_update(smooth, rough)
    with pytest.raises(RunError, match=r"a group of 4 sequences, 54 tokens .* does not fit into memory by itself"):
        update(rough, batch, WHOLE, Refusing(2))


def test_one_sequence_that_does_not_fit_ends_with_one_message(make_backend: Make, batch: Batch) -> None:
    backend = make_backend()
    with pytest.raises(
        RunError, match=r"^a sequence of \d+ tokens \(task '.*'\) does not fit .*can't allocate memory.* Ways out: "
    ):
        update(backend, batch, WHOLE, Refusing(0))


def test_other_errors_are_raised_as_they_are(make_backend: Make, batch: Batch) -> None:
    def broken(micro: MicroBatch) -> Loss:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="^a bug$"):
        update(make_backend(), batch, WHOLE, broken)


def test_a_router_counts_every_token_once(make_backend: Make, moe_spec: Any, batch: Batch) -> None:
    found = []
    for most in (9, 2):
        backend = TorchBackend()
        backend.use_router(TopK())
        backend.setup(moe_spec(), CPU(), trainable=True, total_updates=1)
        failing = [most]

        def loss(micro: MicroBatch, failing: list[int] = failing) -> Loss:
            if len(micro.batch) > failing[0]:
                failing[0] = 9  # the second time there is room
                raise MemoryError
            return likelihood(micro)

        found.append(update(backend, batch, [[0, 1], [2, 3, 4], [5, 6]], loss))
    whole, halved = found
    assert halved.pop("perf/num_allocation_failures") == 1
    whole.pop("perf/num_allocation_failures")
    assert halved == pytest.approx(whole, rel=1e-4)


SHORT_OF_MEMORY = """
import json, resource, sys
import torch
from rollstock import Batch, ModelSpec, Totals
from rollstock.backends.torch.backend import TorchBackend
from rollstock.backends.torch.config import TorchConfig
from rollstock.hardware.cpu import CPU
from rollstock.testing import make_trajectory

short = sys.argv[1] == "short"
sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
backend = TorchBackend(TorchConfig(learning_rate=1e-2, logits_memory_mib=100_000))
backend.setup(
    ModelSpec(config=dict(model_type="llama", vocab_size=20_000, **sizes)), CPU(), trainable=True, total_updates=9
)
rows = [make_trajectory(40, group=i, seed=i, vocab_size=20_000) for i in range(64)]
batch = Batch.from_trajectories(rows)

def update(batch, cuts):
    totals = Totals.of(batch, response_limit=40)
    loss = lambda micro: micro.loss(-micro.logprobs)
    return backend.update(batch, loss, outputs=["logprobs"], temperature=1.0, micro_batches=cuts, totals=totals)

update(batch.select([0]), [[0]])  # whatever is only loaded or made once
if short:  # logits of all 2,560 tokens take 195 MiB, and their gradient as much again
    held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + (160 << 20),) * 2)
failures = 0.0
for cuts in ([list(range(8)), list(range(8, 64))], [list(range(64))]):
    failures += update(batch, cuts)["perf/num_allocation_failures"].value
total = {name: tensor.double().abs().sum().item() for name, tensor in backend.weights()}
print(json.dumps([failures, total]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs a Linux process's limits")
def test_a_process_that_really_runs_out_of_memory_trains_as_one_that_does_not() -> None:
    def run(how: str) -> tuple[float, dict[str, float]]:
        done = subprocess.run(
            [sys.executable, "-c", SHORT_OF_MEMORY, how],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        failures, total = json.loads(done.stdout)
        return failures, total

    failures, short = run("short")
    none, ample = run("ample")
    assert failures >= 1
    assert none == 0
    assert short == pytest.approx(ample, rel=1e-6)
