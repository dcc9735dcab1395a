"""What becomes of a run when something dies: for each fault the seconds until the step that it broke off is finished.

Every fault is real: processes are killed or stopped by a signal, machines are Ray nodes that are killed, servers answer
500. Each run is a small one on a cluster of local Ray nodes (or, for faults of the controller, a command of its own),
and its end is compared with that of an undisturbed run: weights and optimizer, to the bit.

    python benchmarks/faults.py [FAULT ...] [--steps N]

Prints a table. `seconds` counts from the fault to the end of the step that it broke off, and `step` is how long a step
takes when nothing happens.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
import yaml
from ray.cluster_utils import Cluster

from rollstock import Extension, NoOptions, hookimpl
from rollstock.checkpoint import CheckpointStore
from rollstock.launch import train
from rollstock.plugins.executors._group import RayGroup
from rollstock.testing import installed, tiny_config

MODEL = {
    "config": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
    },
    "tokenizer": {"characters": "0123456789+="},
}
BASE: dict[str, Any] = {
    "model": MODEL,
    "algorithm": {"name": "grpo", "group_size": 4},
    "backend": {"name": "torch", "learning_rate": 1e-3},
    "sampling": {"max_new_tokens": 4},
    "train": {"prompts_per_step": 4},
    "evaluation": {"at_start": False, "at_end": False},
    "checkpoint": {"every_steps": 1},
    "reward_limits": {"workers": 1},
    "trackers": ["jsonl"],
}
STRUCK_STEP = 4


class Clock(Extension[NoOptions]):
    """Notes when each step was finished."""

    ends: dict[int, float] = {}  # noqa: RUF012  # a run makes the instance, and this is read from outside

    @hookimpl
    def rollstock_step_end(self, run: Any, step: int) -> None:
        """Note the time."""
        self.ends.setdefault(step, time.monotonic())


@dataclass
class Strike:
    """Something that happens once, in the middle of the call of a method in the step that is struck."""

    role: str
    method: str
    how: Callable[[RayGroup], None]
    at: float = 0.0
    calls: int = field(default=0)

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """While it may happen."""
        send = RayGroup.send

        def watching(group: RayGroup, only: int | None, method: str, *rest: Any) -> Any:
            sent = send(group, only, method, *rest)
            if (group.role, method) == (self.role, self.method):
                self.calls += 1
                if self.calls == STRUCK_STEP:
                    self.at = time.monotonic()
                    self.how(group)
            return sent

        RayGroup.send = watching  # type: ignore[method-assign]  # nothing else knows when a call is under way
        try:
            yield
        finally:
            RayGroup.send = send  # type: ignore[method-assign]


@dataclass
class Result:
    """seconds: from the fault to the end of the step that it broke off; step: of one that nothing happens to."""

    seconds: float
    step: float
    is_equal: bool


def by(number: signal.Signals) -> Callable[[RayGroup], None]:
    """Send a signal to the last worker of a role."""
    return lambda group: os.kill(group.processes[-1].pid, number)


class Bench:
    """Runs in a folder, on one cluster."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
        self.cluster.add_node(num_cpus=4)

    def config(self, name: str, sections: dict[str, Any]) -> dict[str, Any]:
        """The sections of a run, with the parts of each kind put together."""
        merged = {key: dict(value) if isinstance(value, dict) else value for key, value in BASE.items()}
        merged["executor"] = {"name": "ray", "address": self.cluster.address}
        for key, value in sections.items():
            merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
        merged["train"]["steps"] = self.steps
        return merged

    def play(self, name: str, sections: dict[str, Any], strike: Strike | None = None) -> Path:
        """One run in this process; what its clock said is in `Clock.ends`."""
        run = self.folder / name
        Clock.ends.clear()
        with contextlib.ExitStack() as stack:
            stack.enter_context(installed("extension", "clock", Clock))
            if strike is not None:
                stack.enter_context(strike.armed())
            train(tiny_config(run, {**self.config(name, sections), "extensions": ["clock"]}))
        return run

    def struck(self, name: str, strike: Strike, sections: dict[str, Any] | None = None) -> Result:
        """An undisturbed run, and one that is struck."""
        undisturbed = self.play(f"{name}-undisturbed", sections or {})
        usual = self.usual_step()
        run = self.play(name, sections or {}, strike)
        return Result(Clock.ends[STRUCK_STEP] - strike.at, usual, equal(run, undisturbed))

    @staticmethod
    def usual_step() -> float:
        """The median time between the ends of two steps."""
        ends = [Clock.ends[step] for step in sorted(Clock.ends)]
        return statistics.median(after - before for before, after in itertools.pairwise(ends))

    def rollout_worker(self) -> Result:
        """kill -9 of a rollout worker, in the middle of generation"""
        return self.struck("rollout", Strike("rollout", "generate", by(signal.SIGKILL)), {"roles": two("rollout")})

    def reward_worker(self) -> Result:
        """kill -9 of a reward worker"""
        return self.struck("reward", Strike("reward", "score", by(signal.SIGKILL)), {"roles": two("reward")})

    def trainer(self) -> Result:
        """kill -9 of the trainer, in the middle of an update"""
        return self.struck("trainer", Strike("actor", "update", by(signal.SIGKILL)))

    def trainer_from_disk(self) -> Result:
        """the same, without a copy of its state in the controller"""
        sections = {"recovery": {"state_gib": 0.0}}
        return self.struck("trainer-from-disk", Strike("actor", "update", by(signal.SIGKILL)), sections)

    def trainer_rank(self) -> Result:
        """kill -9 of one of two ranks that train together (fsdp)"""
        sections = {"backend": {"name": "fsdp"}, "roles": two("actor")}
        return self.struck("rank", Strike("actor", "update", by(signal.SIGKILL)), sections)

    def hung_worker(self) -> Result:
        """a rollout worker that hangs, with call_timeout_s: 5"""
        sections = {"roles": {"rollout": {"count": 2, "call_timeout_s": 5.0}}}
        return self.struck("hung", Strike("rollout", "generate", by(signal.SIGSTOP)), sections)

    def node(self) -> Result:
        """kill -9 of a machine with trainer, rollout and reward workers"""
        large = [self.cluster.add_node(num_cpus=16) for _ in range(2)]

        def strike(group: RayGroup) -> None:
            host = group.processes[0].node
            for other in group._revival.groups.values():
                for process in other.processes:
                    if process.node == host:
                        os.kill(process.pid, signal.SIGKILL)
            lost = next(node for node in large if node.node_id == host)
            self.cluster.remove_node(lost, allow_graceful=False)

        roles = {role: {"cpus": 5.0} for role in ("actor", "rollout", "reward")}
        return self.struck("node", Strike("actor", "update", strike), {"roles": roles})

    def reward_server(self) -> Result:
        """a reward server that answers 500 twice, and then nothing for once"""
        server = Server()
        sections = {"rewards": [{"name": "remote", "url": server.url, "timeout_s": 2.0, "max_retries": 4}]}
        strike = Strike("reward", "score", lambda group: server.fail())
        try:
            return self.struck("server", strike, sections)
        finally:
            server.close()

    def controller(self) -> Result:
        """kill -9 of the controller, then `rollstock resume`"""
        return self.commanded("controller", signal.SIGKILL)

    def sigterm(self) -> Result:
        """SIGTERM to the controller, then `rollstock resume`"""
        return self.commanded("sigterm", signal.SIGTERM)

    def corrupt_checkpoint(self) -> Result:
        """kill -9 of the controller and a newest checkpoint that is damaged, then `rollstock resume`"""

        def damage(run: Path) -> None:
            newest = sorted((run / "checkpoints").glob("step-*"))[-1]
            os.truncate(next(newest.glob("actor.model*")), 100)

        return self.commanded("corrupt", signal.SIGKILL, damage)

    def commanded(self, name: str, number: signal.Signals, then: Callable[[Path], None] | None = None) -> Result:
        """A command that gets a signal when the step before the struck one is recorded, and another that goes on."""
        undisturbed = self.play(f"{name}-undisturbed", {"train": {"prompts_per_step": 4}})
        usual = self.usual_step()
        run = self.folder / name
        config = self.config(name, {"executor": {"name": "ray", "dashboard": False}})
        config["executor"].pop("address")
        path = self.folder / f"{name}.yaml"
        made = tiny_config(run, config)
        path.write_text(yaml.safe_dump(made.to_dict()))
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        command = [sys.executable, "-m", "rollstock"]
        program = subprocess.Popen([*command, "train", str(path)], env=environment, stdout=subprocess.DEVNULL)
        wait_for(lambda: recorded(run) >= STRUCK_STEP - 1)
        program.send_signal(number)
        struck = time.monotonic()
        program.wait()
        last = recorded(run)
        if then is not None:
            then(run)
        going_on = subprocess.Popen([*command, "resume", str(run)], env=environment, stdout=subprocess.DEVNULL)
        wait_for(lambda: recorded(run) > last or going_on.poll() is not None)
        seconds = time.monotonic() - struck
        assert going_on.wait() == 0
        return Result(seconds, usual, equal(run, undisturbed))


class Server:
    """Gives a point for each digit that is even; fails three times once it is told to."""

    def __init__(self) -> None:
        self._left = 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["response"]
                outer._left, left = max(0, outer._left - 1), outer._left
                if left == 1:
                    time.sleep(3)
                body = json.dumps({"score": float(sum(letter in "02468" for letter in text))}).encode()
                with contextlib.suppress(OSError):
                    self.send_response(500 if left > 1 else 200)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                return

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}/"

    def fail(self) -> None:
        """Answer the next two requests by 500, and the third too late."""
        self._left = 3

    def close(self) -> None:
        """Stop."""
        self._http.shutdown()
        self._http.server_close()


def two(role: str) -> dict[str, Any]:
    """Two workers of a role."""
    return {role: {"count": 2}}


def recorded(run: Path) -> int:
    """The newest step in a run's metrics."""
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return max([row["step"] for row in rows if "metrics" in row], default=0)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    while not condition():
        time.sleep(0.02)


def equal(run: Path, other: Path) -> bool:
    """Whether the last checkpoints have the same tensors, to the bit."""
    mine, theirs = (CheckpointStore(path / "checkpoints").load() for path in (run, other))
    return mine.step == theirs.step and all(
        torch.equal(tensor, theirs.tensors[part][name])
        for part in theirs.tensors
        for name, tensor in mine.tensors[part].items()
    )


FAULTS = {
    method.__name__: method
    for method in (
        *(Bench.rollout_worker, Bench.reward_worker, Bench.trainer, Bench.trainer_from_disk, Bench.trainer_rank),
        *(
            Bench.node,
            Bench.controller,
            Bench.hung_worker,
            Bench.reward_server,
            Bench.corrupt_checkpoint,
            Bench.sigterm,
        ),
    )
}


def main() -> None:
    """Play the faults and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("faults", nargs="*", choices=[[], *FAULTS], metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument("--steps", type=int, default=6)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(OMP_NUM_THREADS="1", RAY_worker_niceness="0", RAY_USAGE_STATS_ENABLED="0")
    folder = Path(tempfile.mkdtemp())
    bench = Bench(folder, chosen.steps)
    print("| fault | seconds | step | equal |\n|---|---|---|---|", flush=True)
    try:
        for name in chosen.faults or FAULTS:
            found = FAULTS[name](bench)
            what = (FAULTS[name].__doc__ or name).strip()
            print(
                f"| {what} | {found.seconds:.1f} | {found.step:.2f} | {'yes' if found.is_equal else 'no'} |", flush=True
            )
    finally:
        if ray.is_initialized():
            ray.shutdown()
        bench.cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
