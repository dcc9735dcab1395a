"""Gradients averaged over two processes by way of a compressor."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from rollstock import UserError
from rollstock.compression import Traffic, average_gradients
from rollstock.metrics import merge_metrics
from rollstock.plugins.compressors.none import Uncompressed

WORKER = r"""
import json, os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from rollstock import RunError
from rollstock.compression import Traffic, average_gradients
from rollstock.plugins.compressors.hybrid import Hybrid
from rollstock.plugins.compressors.int8 import Int8, Int8Config
from rollstock.plugins.compressors.none import Uncompressed
from rollstock.plugins.compressors.topk import TopK

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=100)
)


def numbers(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(round):
    base = {
        "wide": numbers(80, 50, seed=2 * round + rank),
        "half": numbers(30, 40, seed=2 * round + rank + 100).to(torch.bfloat16),
        "scalar": numbers(seed=2 * round + rank + 200),
        "empty": torch.zeros(0, 3),
    }
    return base | {"turned": numbers(40, 20, seed=2 * round + rank + 300).t()}


found, said = {}, {}
makers = {
    "none": Uncompressed,
    "int8": Int8,
    "stochastic": lambda: Int8(Int8Config(stochastic=True, feedback=False)),
    "topk": TopK,
    "hybrid": Hybrid,
}
for name, make in makers.items():
    compressor, traffic = make(), Traffic()
    compressor.setup(seed=3, rank=rank)
    for round in range(4):
        given = gradients(round)
        places = {key: tensor.data_ptr() for key, tensor in given.items()}
        traffic += average_gradients(compressor, given)
        assert places == {key: tensor.data_ptr() for key, tensor in given.items()}
        found |= {f"{name}/{round}/{key}": tensor.clone() for key, tensor in given.items()}
    said[name] = vars(traffic)
    found |= {f"{name}/{key}": tensor for key, tensor in compressor.state().items()}

given = gradients(0)
if rank == 1:
    given["wide"][3, 4] = torch.nan
average_gradients(Int8(), given)
found |= {f"broken/{key}": tensor for key, tensor in given.items()}

try:
    average_gradients(Uncompressed(), {"a": torch.zeros(2), "b": torch.zeros(3 + rank)})
except RunError as error:
    said["other shape"] = str(error)
try:
    average_gradients(Uncompressed(), {"a": torch.zeros(2)} | ({"b": torch.zeros(2)} if rank else {}))
except RunError as error:
    said["other names"] = str(error)

# Each process has half of the rows of a regression.
inputs, truth = numbers(128, 10, seed=1), numbers(10, 4, seed=2)
targets = inputs @ truth
for name, make in {"none": Uncompressed, "hybrid": Hybrid}.items():
    weights, compressor = torch.zeros(10, 4, requires_grad=True), make()
    rows = slice(64 * rank, 64 * rank + 64)
    for _ in range(60):
        ((inputs[rows] @ weights - targets[rows]) ** 2).mean().backward()
        average_gradients(compressor, {"weights": weights.grad})
        with torch.no_grad():
            weights -= 0.4 * weights.grad
        weights.grad = None
    found[f"trained/{name}"] = weights.detach()
    said[f"loss of {name}"] = ((inputs @ weights - targets) ** 2).mean().item()

torch.save(found, f"{folder}/found{rank}.pt")
open(f"{folder}/said{rank}.json", "w").write(json.dumps(said))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """What each of the two processes found, and what it said."""
    folder = tmp_path_factory.mktemp("gloo")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", WORKER]
    workers = [
        subprocess.Popen([*command, str(rank), str(folder)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [worker.communicate(timeout=200)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(errors)
    return [
        (torch.load(folder / f"found{rank}.pt"), json.loads((folder / f"said{rank}.json").read_text()))
        for rank in range(2)
    ]


def gradient(rank: int, round: int, key: str) -> torch.Tensor:
    shape, offset = {"wide": ((80, 50), 0), "half": ((30, 40), 100), "turned": ((40, 20), 300)}[key]
    made = torch.randn(shape, generator=torch.Generator().manual_seed(2 * round + rank + offset))
    return made.to(torch.bfloat16) if key == "half" else made.t() if key == "turned" else made


def test_without_compression_the_mean_is_exact(results: Any) -> None:
    for key in ("wide", "half", "turned"):
        truth = (gradient(0, 1, key).float() + gradient(1, 1, key).float()) / 2
        assert torch.equal(results[0][0][f"none/1/{key}"], truth.to(gradient(0, 1, key).dtype))


def test_both_processes_have_the_same_to_the_bit(results: Any) -> None:
    (first, _), (second, _) = results
    shared = [name for name in first if "residual:" not in name and "round:" not in name]
    assert len(shared) == 5 * 4 * 5 + 5 + 2
    for name in shared:
        assert torch.equal(first[name].nan_to_num(7.0), second[name].nan_to_num(7.0)), name


@pytest.mark.parametrize("method", ["int8", "topk", "hybrid"])
def test_what_arrived_and_the_residuals_are_the_sum_of_all_gradients(results: Any, method: str) -> None:
    for key in ("wide", "turned"):
        arrived = sum(results[0][0][f"{method}/{round}/{key}"] for round in range(4))
        owed = sum(found[f"{method}/residual:{key}"] for found, _ in results) / 2
        truth = sum((gradient(0, round, key) + gradient(1, round, key)) / 2 for round in range(4))
        assert torch.allclose(arrived + owed.reshape(truth.shape), truth, atol=1e-5)


def test_each_process_rounds_with_noise_of_its_own(results: Any) -> None:
    assert results[0][0]["stochastic/round:wide"] == 4
    errors = []
    for found, _ in results:
        truth = (gradient(0, 0, "wide") + gradient(1, 0, "wide")) / 2
        errors.append((found["stochastic/0/wide"] - truth).norm() / truth.norm())
    assert errors[0] == errors[1] < 0.02


def test_bytes_are_counted_with_and_without_compression(results: Any) -> None:
    raw = 4 * (4 * (80 * 50 + 1 + 40 * 20) + 2 * 30 * 40)
    for (_, said), (_, other) in zip(results, results[::-1], strict=True):
        traffic = {name: Traffic(**said[name]) for name in ("none", "int8", "topk", "hybrid")}
        assert {counted.raw_bytes for counted in traffic.values()} == {raw}
        assert traffic["none"].raw_bytes < traffic["none"].wire_bytes < 1.05 * raw
        assert traffic["int8"].ratio < 0.32
        assert traffic["topk"].ratio < 0.17
        assert traffic["hybrid"].ratio < 0.2
        assert said["hybrid"] == other["hybrid"]


def test_a_gradient_that_is_not_finite_on_one_process_is_so_on_all(results: Any) -> None:
    for found, _ in results:
        assert torch.nonzero(found["broken/wide"].isnan()).tolist() == [[3, 4]]
        assert found["broken/half"].isfinite().all()


def test_other_gradients_on_another_process_stop_both(results: Any) -> None:
    for rank, (_, said) in enumerate(results):
        mine, other = 3 + rank, 4 - rank
        assert said["other shape"].startswith(f"the process of rank {1 - rank} averages ('b', [{other}], 'float32')")
        assert f"and this one ('b', [{mine}], 'float32')" in said["other shape"]
    assert "averages ('b', [2], 'float32'), and this one nothing" in results[0][1]["other names"]
    assert "averages nothing, and this one ('b', [2], 'float32')" in results[1][1]["other names"]


def test_a_regression_is_learned_through_a_compressor(results: Any) -> None:
    for _, said in results:
        assert said["loss of none"] < 1e-3
        assert said["loss of hybrid"] < 0.02


def test_one_process_sends_nothing_and_keeps_its_gradients() -> None:
    gradients = {"w": torch.randn(5)}
    kept = gradients["w"].clone()
    assert average_gradients(Uncompressed(), gradients) == Traffic(0, 0)
    assert torch.equal(gradients["w"], kept)


def test_what_is_no_gradient_is_refused() -> None:
    with pytest.raises(UserError, match="'w' is torch.int64: a gradient is a floating-point tensor"):
        average_gradients(Uncompressed(), {"w": torch.arange(3)})


def test_traffic_adds_up_and_becomes_metrics() -> None:
    first, second = Traffic(1000, 100), Traffic(3000, 900)
    assert first + second == Traffic(4000, 1000)
    assert (first.ratio, Traffic().ratio) == (0.1, 1.0)
    merged = merge_metrics([first.metrics(), second.metrics()])
    assert {name: metric.value for name, metric in merged.items()} == {
        "network/gradient_bytes": 1000,
        "network/gradient_raw_bytes": 4000,
        "network/gradient_ratio": pytest.approx(0.25),
    }
