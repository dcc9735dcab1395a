"""Workers killed, stopped and cut off in the middle of a run, which goes on and ends as if nothing had happened."""

import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstock.launch import train
from rollstock.plugins.executors._group import RayGroup
from rollstock.testing import read_metrics

from .conftest import assert_same, small

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def undisturbed(judged: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in one process, which nobody disturbs."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("runs") / "undisturbed"
    train(small(path, "checkpoint.every_steps=0", extensions=["herald"]))
    torch.set_num_threads(before)
    return path


def metrics_of(run: Path) -> dict[str, float]:
    """What the steps of a run say of recovery, added up."""
    found: dict[str, float] = {}
    for row in read_metrics(run):
        for name, value in row.get("metrics", {}).items():
            if name.startswith("recovery/"):
                found[name] = found.get(name, 0.0) + value
    return found


def told(run: Path) -> list[str]:
    """What the extension `herald` wrote down, without what a process has of its own."""
    lines = (run / "workers.txt").read_text().splitlines()
    return [re.sub(r" \(process .*", "", line) for line in lines]


@pytest.mark.parametrize(
    ("role", "method", "number"), [("rollout", "generate", 3), ("reward", "score", 3), ("rollout", "load_weights", 2)]
)
def test_a_killed_worker_without_a_state_is_replaced_and_its_part_made_again(
    tmp_path: Path,
    undisturbed: Path,
    cluster: Any,
    kill: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    role: str,
    method: str,
    number: int,
) -> None:
    ray = {"name": "ray", "address": cluster.address}
    kill(role, method, number)
    options = [f"roles.{role}.count=2", "checkpoint.every_steps=0", "recovery.backoff_s=0.01"]
    with caplog.at_level(logging.WARNING, logger="rollstock"):
        train(small(tmp_path / "ray", *options, executor=ray, extensions=["herald"]))
    assert_same(tmp_path / "ray", undisturbed, other_counts=True)
    assert told(tmp_path / "ray") == [f"failed {role} worker 1", f"started {role} 1"]
    assert metrics_of(tmp_path / "ray") == {"recovery/num_retries": 1, "recovery/num_replaced": 1}
    retry = (
        rf"^{role} worker 1 .* died during '{method}': it was killed.*; its part of the call is made again in 0\.0 s"
    )
    assert any(re.search(retry + r" \(retry 1 of 3\)", message) for message in caplog.messages)
    assert any(message.startswith(f"started again: {role}-1, in ") for message in caplog.messages)


@pytest.mark.parametrize("state_gib", [1.0, 0.0])
def test_a_killed_trainer_is_started_again_where_it_was(
    tmp_path: Path, undisturbed: Path, cluster: Any, kill: Callable[..., None], state_gib: float
) -> None:
    ray = {"name": "ray", "address": cluster.address}
    kill("actor", "update", 3)
    options = [f"recovery.state_gib={state_gib}", "checkpoint.every_steps=0"]
    train(small(tmp_path / "ray", *options, executor=ray, extensions=["herald"]))
    assert_same(tmp_path / "ray", undisturbed)
    assert told(tmp_path / "ray") == ["failed actor worker 0", "started actor 0"]
    found = metrics_of(tmp_path / "ray")
    assert found == {
        "recovery/num_restarts": 1,
        "recovery/num_replaced": 1,
        "recovery/num_steps_again": 0 if state_gib else 2,
    }


TOGETHER = {"backend": {"name": "fsdp", "learning_rate": 1e-2}, "extensions": ["herald"]}
HYBRID = {**TOGETHER, "compressor": "hybrid"}  # each rank keeps what it owes


@pytest.fixture(scope="module")
def together(judged: None, cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A run of two ranks that train one model, which nobody disturbs; made once for each set of sections."""
    made: dict[str, Path] = {}

    def run(**sections: Any) -> Path:
        key = str(sections)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("together") / "run"
            ray = {"name": "ray", "address": cluster.address}
            train(small(made[key], "roles.actor.count=2", "checkpoint.every_steps=0", executor=ray, **sections))
        return made[key]

    return run


@pytest.mark.parametrize(
    ("sections", "rank", "state_gib"), [(TOGETHER, 1, 1.0), (TOGETHER, 0, 1.0), (HYBRID, 1, 1.0), (HYBRID, 0, 0.0)]
)
def test_one_of_two_ranks_that_train_together_is_killed_and_both_go_on_from_where_they_were(
    tmp_path: Path,
    together: Callable[..., Path],
    cluster: Any,
    kill: Callable[..., None],
    sections: dict[str, Any],
    rank: int,
    state_gib: float,
) -> None:
    undisturbed = together(**sections)
    ray = {"name": "ray", "address": cluster.address}
    kill("actor", "update", 3, rank=rank)
    options = ["roles.actor.count=2", f"recovery.state_gib={state_gib}", "checkpoint.every_steps=0"]
    train(small(tmp_path / "ray", *options, executor=ray, **sections))
    assert_same(tmp_path / "ray", undisturbed)
    assert told(tmp_path / "ray") == [f"failed actor worker {rank}", "started actor 0", "started actor 1"]
    assert metrics_of(tmp_path / "ray") == {
        "recovery/num_restarts": 1,
        "recovery/num_replaced": 2,
        "recovery/num_steps_again": 0 if state_gib else 2,
    }


def test_a_killed_worker_of_an_extensions_role_is_started_again_and_the_step_played_again(
    judged: None, tmp_path: Path, cluster: Any, kill: Callable[..., None]
) -> None:
    sections = {"extensions": ["judged", "herald"], "train": {"steps": 2, "prompts_per_step": 2}}
    train(small(tmp_path / "local", "checkpoint.every_steps=0", **sections))
    kill("judge", "judge", 2)
    ray = {"name": "ray", "address": cluster.address}
    train(small(tmp_path / "ray", "checkpoint.every_steps=0", executor=ray, **sections))
    assert_same(tmp_path / "ray", tmp_path / "local")
    assert told(tmp_path / "ray") == ["failed judge worker 0", "started judge 0"]
    assert metrics_of(tmp_path / "ray")["recovery/num_restarts"] == 1


def test_a_worker_that_hangs_is_ended_and_replaced(
    tmp_path: Path, undisturbed: Path, cluster: Any, kill: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    ray = {"name": "ray", "address": cluster.address, "warn_after_s": 1}
    kill("rollout", "generate", 3, by=signal.SIGSTOP)
    options = ["roles.rollout.call_timeout_s=5", "checkpoint.every_steps=0", "recovery.backoff_s=0.01"]
    with caplog.at_level(logging.WARNING, logger="rollstock"):
        train(small(tmp_path / "ray", *options, executor=ray, extensions=["herald"]))
    assert_same(tmp_path / "ray", undisturbed)
    assert metrics_of(tmp_path / "ray") == {"recovery/num_retries": 1, "recovery/num_replaced": 1}
    assert any(re.search("rollout worker 0 .* hung: 'generate' had not ended", message) for message in caplog.messages)
    assert any(re.search("^waiting for 'generate' of rollout-0 since", message) for message in caplog.messages)


@pytest.fixture
def large_nodes(cluster: Any) -> Iterator[list[Any]]:
    """Two more machines, either of which is large enough for everything."""
    made = [cluster.add_node(num_cpus=16, object_store_memory=100 << 20) for _ in range(2)]
    yield made
    for node in made:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)


def test_a_machine_that_is_gone_takes_trainer_generator_and_reward_with_it(
    tmp_path: Path, undisturbed: Path, cluster: Any, large_nodes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    send, left = RayGroup.send, [2]

    def killing(self: RayGroup, only: int | None, called: str, *rest: Any) -> Any:
        sent = send(self, only, called, *rest)
        if (self.role, called) == ("actor", "update"):
            left[0] -= 1
            if left[0] == 0:
                host = self.processes[0].node
                for group in self._revival.groups.values():
                    for process in group.processes:
                        if process.node == host:
                            os.kill(process.pid, signal.SIGKILL)
                cluster.remove_node(next(node for node in large_nodes if node.node_id == host), allow_graceful=False)
        return sent

    monkeypatch.setattr(RayGroup, "send", killing)
    ray = {"name": "ray", "address": cluster.address, "placement": "pack"}
    sizes = [f"roles.{role}.cpus=5" for role in ("actor", "rollout", "reward")]
    train(small(tmp_path / "ray", *sizes, "checkpoint.every_steps=0", executor=ray, extensions=["herald"]))
    assert_same(tmp_path / "ray", undisturbed)
    lines = told(tmp_path / "ray")
    assert "failed actor worker 0" in lines
    assert "started actor 0" in lines
    found = metrics_of(tmp_path / "ray")
    assert found["recovery/num_restarts"] >= 1
    assert found["recovery/num_steps_again"] == 0
