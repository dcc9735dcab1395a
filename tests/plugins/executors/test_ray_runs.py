"""Whole runs: the executor `ray` gives what `local` gives, whatever is killed and however many workers there are."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstock import RunError
from rollstock.config import load_config
from rollstock.launch import resume, train
from rollstock.plugins.executors._group import RayGroup

from .conftest import assert_same, small

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
@pytest.mark.usefixtures("judged")
def test_ppo_on_two_nodes_with_many_workers_equals_one_process(
    tmp_path: Path, cluster: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    sections = {"algorithm": {"name": "ppo", "kl_coef": 0.1}, "extensions": ["judged"]}
    train(small(tmp_path / "local", **sections))
    capfd.readouterr()
    shared = [f"roles.{role}.colocate_with=actor" for role in ("critic", "reference")]
    counts = [f"roles.{role}.count=2" for role in ("rollout", "reward", "judge")]
    ray = {"name": "ray", "address": cluster.address, "placement": "spread"}
    train(small(tmp_path / "ray", *shared, *counts, executor=ray, **sections))
    assert capfd.readouterr() == ("", "")
    assert_same(tmp_path / "ray", tmp_path / "local", other_counts=True)
    logs = {f"{role}-{rank}.log" for role in ("rollout", "reward", "judge") for rank in range(2)}
    assert {path.name for path in (tmp_path / "ray/logs").iterdir()} == {*logs, "actor-0.log", "controller.log"}


@pytest.mark.cluster
@pytest.mark.usefixtures("judged")
@pytest.mark.parametrize(("role", "method"), [("reward", "score"), ("actor", "update")])
def test_without_retries_and_restarts_a_killed_worker_ends_the_run_and_a_resumed_one_equals_an_undisturbed_one(
    tmp_path: Path, cluster: Any, kill: Callable[..., None], monkeypatch: pytest.MonkeyPatch, role: str, method: str
) -> None:
    train(small(tmp_path / "local", extensions=["herald"]))
    ray = {"name": "ray", "address": cluster.address}
    with monkeypatch.context() as patch:
        patch.setattr(RayGroup, "send", RayGroup.send)  # what `kill` puts in its place ends with this block
        kill(role, method, 3 if role == "reward" else 2)  # the first of a reward worker is the evaluation's
        died = rf"^{role} worker 0 \(process \d+ on .*\) died during '{method}': it was killed"
        with pytest.raises(RunError, match=died) as caught:
            none = ["recovery.max_retries=0", "recovery.max_restarts=0"]
            train(small(tmp_path / "ray", *none, executor=ray, extensions=["herald"]))
    assert "the newest checkpoint is of step 1; go on with: rollstock resume" in caught.value.__notes__[-1]
    assert f"its log is {tmp_path / 'ray/logs' / f'{role}-0.log'}" in str(caught.value)
    assert str(caught.value).startswith((tmp_path / "ray/workers.txt").read_text().removeprefix("failed ").strip())
    assert resume(tmp_path / "ray").step == 3
    assert_same(tmp_path / "ray", tmp_path / "local")


CONFIG = """
model:
  config: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}
  tokenizer: {characters: '0123456789+='}
algorithm: grpo
environment: {name: arithmetic, chat: false, prompt: '{a}{op}{b}='}
executor: {name: ray, dashboard: false, object_store_memory: 100000000}
roles: {rollout: {colocate_with: actor}}
sampling: {max_new_tokens: 2}
train: {steps: 100000, prompts_per_step: 2}
evaluation: {at_start: false}
"""


def descendants(pid: int) -> dict[int, str]:
    """The processes below one, by id, with their commands."""
    lines = subprocess.check_output(["ps", "-e", "-o", "pid=,ppid=,args="], text=True).splitlines()
    parents = {int(line.split()[0]): int(line.split()[1]) for line in lines}
    commands = {int(line.split()[0]): line.split(maxsplit=2)[2] for line in lines}
    found: dict[int, str] = {}
    for number in parents:
        above = number
        while above in parents and above != pid:
            above = parents[above]
        if above == pid and number != pid:
            found[number] = commands[number]
    return found


def listening(pids: set[int]) -> set[str]:
    """The addresses on which processes listen, from the kernel's tables of sockets, as it writes them."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(link)
            except OSError:
                continue
            inodes.add(target.removeprefix("socket:[").rstrip("]"))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the kernel's tables are Linux's")
def test_ctrl_c_ends_everything_and_until_then_ray_listens_to_this_machine_alone(tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "rollstock", "train", "demo.yaml"]
    run = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
    )  # fmt: skip
    try:
        assert run.stdout is not None
        assert any("step 2/" in line for line in iter(run.stdout.readline, ""))  # stops there
        everyone = descendants(run.pid)
        assert sum(command.startswith("ray::Host") for command in everyone.values()) == 2
        assert listening({run.pid, *everyone}) <= {"0100007F", "0000000000000000FFFF00000100007F"}
        os.killpg(run.pid, signal.SIGINT)
        output, errors = run.communicate(timeout=120)
        assert run.returncode == 1
        assert errors == ""
        assert "SIGINT: the newest checkpoint is of step" in output
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}/exe").exists() for pid in everyone) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [command for pid, command in everyone.items() if Path(f"/proc/{pid}/exe").exists()]


@pytest.mark.cluster
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the kernel's tables are Linux's")
def test_a_killed_controller_leaves_no_process_behind_and_the_resumed_run_equals_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "demo.yaml").write_text(CONFIG.replace("dashboard: false", "dashboard: true"))
    options = ["train.steps=6", "checkpoint.every_steps=1", f"run.directory={tmp_path / 'run'}"]
    train(
        load_config(tmp_path / "demo.yaml", [*options[:2], f"run.directory={tmp_path / 'straight'}", "executor=local"])
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rollstock"]
    with subprocess.Popen(
        [*command, "train", "demo.yaml", *options],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        try:
            assert run.stdout is not None
            assert any("step 3/" in line for line in iter(run.stdout.readline, ""))
            everyone = descendants(run.pid)
            assert listening({run.pid, *everyone}) <= {"0100007F", "0000000000000000FFFF00000100007F"}
        finally:
            run.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}/exe").exists() for pid in everyone) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [command for pid, command in everyone.items() if Path(f"/proc/{pid}/exe").exists()]
    subprocess.run([*command, "resume", str(tmp_path / "run")], env=environment, check=True, stdout=subprocess.DEVNULL)
    assert_same(tmp_path / "run", tmp_path / "straight")
