"""Weights reach generators in other processes by every way, with the numbers of a run in one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstock.launch import train
from rollstock.testing import read_metrics

from .conftest import assert_same, small

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("one_thread")]

LORA = {"name": "torch", "learning_rate": 1e-2, "lora": {"rank": 2}}
TWO = ["roles.rollout.count=2", "checkpoint.every_steps=0", "recovery.backoff_s=0.01"]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The same run in one process, made once for each set of sections."""
    made: dict[str, Path] = {}

    def run(**sections: Any) -> Path:
        key = str(sections)
        if key not in made:
            before = torch.get_num_threads()
            torch.set_num_threads(1)
            made[key] = tmp_path_factory.mktemp("local") / "run"
            train(small(made[key], "checkpoint.every_steps=0", **sections))
            torch.set_num_threads(before)
        return made[key]

    return run


def sums(run: Path) -> dict[str, float]:
    """What the steps of a run say of weights on their way, added up."""
    found: dict[str, float] = {}
    for row in read_metrics(run):
        for name, value in row.get("metrics", {}).items():
            if name.startswith(("sync/", "recovery/")):
                found[name] = found.get(name, 0.0) + value
    return found


@pytest.mark.parametrize("transport", [None, "shm", "zmq"])
def test_every_way_gives_the_numbers_of_one_process(
    tmp_path: Path, local: Any, cluster: Any, transport: str | None
) -> None:
    if transport == "zmq":
        pytest.importorskip("zmq")
    ray = {"name": "ray", "address": cluster.address}
    train(small(tmp_path / "ray", *TWO, executor=ray, transport=transport))
    assert_same(tmp_path / "ray", local(), other_counts=True)
    found = sums(tmp_path / "ray")
    assert found["sync/changed"] == 3
    assert found["sync/num_resent"] == 0
    assert found["sync/bytes"] > 3 * 4 * 1000  # three syncs of some thousand float32


def test_adapters_alone_give_the_same_numbers(tmp_path: Path, local: Any, cluster: Any) -> None:
    pytest.importorskip("peft")
    ray = {"name": "ray", "address": cluster.address}
    train(small(tmp_path / "ray", *TWO, "weight_sync.content=adapters", executor=ray, transport="shm", backend=LORA))
    assert_same(tmp_path / "ray", local(backend=LORA), other_counts=True)


SEVERAL_CHUNKS = {
    "tokenizer": {"characters": "0123456789+="},
    "config": {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    },
}
"""A model of 7 MB: more chunks than are on their way to a generator at once."""


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_generator_that_is_killed_while_weights_arrive_is_replaced_and_holds_up_nobody(
    tmp_path: Path, local: Any, cluster: Any, kill: Callable[..., None], transport: str
) -> None:
    if transport == "zmq":
        pytest.importorskip("zmq")
    ray = {"name": "ray", "address": cluster.address}
    kill("rollout", "take_weights", 2, stopped_s=0.5)  # with chunks that it has not taken
    options = [*TWO, "weight_sync.chunk_mib=1"]
    train(small(tmp_path / "ray", *options, executor=ray, transport=transport, model=SEVERAL_CHUNKS))
    assert_same(tmp_path / "ray", local(model=SEVERAL_CHUNKS), other_counts=True)
    assert sums(tmp_path / "ray")["recovery/num_replaced"] == 1


@pytest.mark.parametrize("method", ["weights_inbox", "take_weights", "fingerprint"])
def test_a_generator_that_is_killed_anywhere_in_a_sync_of_adapters_is_replaced(
    tmp_path: Path, local: Any, cluster: Any, kill: Callable[..., None], method: str
) -> None:
    pytest.importorskip("peft")
    ray = {"name": "ray", "address": cluster.address}
    kill("rollout", method, 2)
    train(small(tmp_path / "ray", *TWO, "weight_sync.content=adapters", executor=ray, transport="shm", backend=LORA))
    assert_same(tmp_path / "ray", local(backend=LORA), other_counts=True)
    assert sums(tmp_path / "ray")["recovery/num_replaced"] == 1
