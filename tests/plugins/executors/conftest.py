"""Runs that are over in seconds, a cluster of two nodes, and a plugin that brings a role of its own."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from rollstock.extras import extras_of
from rollstock.sources import find_module, parse
from rollstock.testing import tiny_config

from ...conftest import SMALL_RUN
from ...conftest import assert_same as assert_same  # for the tests beside this


def small(directory: Path, *overrides: str, **sections: Any) -> Any:
    """The config of a run of three steps, each with a checkpoint."""
    own = {"train": {"steps": 3, "prompts_per_step": 4}, "checkpoint": {"every_steps": 1}}
    return tiny_config(directory, {**SMALL_RUN, **own, **sections}, overrides)


JUDGE = '''
"""Takes something off the score of each sample, as workers of its own say."""

from dataclasses import dataclass

from rollstock import Extension, WorkerSpec, hookimpl, option
from rollstock.dispatch import register


class Judge:
    def __init__(self, *, cost, rank, world_size):
        self.cost, self.rank = cost, rank

    @register(dispatch="scatter", places=True)
    def judge(self, lengths, places=None):
        return [self.cost * length for length in lengths]

    @register(dispatch="all_gather")
    def ranks(self):
        return self.rank

    @register()
    def close(self):
        pass


@dataclass(kw_only=True)
class JudgedConfig:
    cost: float = option(0.25, "reward that a token costs")


class Judged(Extension[JudgedConfig]):
    def roles(self, config):
        return [WorkerSpec(role="judge", factory=Judge, kwargs={"cost": self.config.cost})]

    @hookimpl
    def rollstock_run_start(self, run):
        assert run.roles["judge"].call("ranks") == list(range(run.config.role("judge").count))

    @hookimpl(wrapper=True)
    def rollstock_score(self, run, batch):
        result = yield
        costs = run.roles["judge"].call("judge", batch.lengths.tolist())
        batch["scores"] = batch.scores - batch.scores.new_tensor(costs)
        return result


@hookimpl
def rollstock_extension():
    return Judged
'''


HERALD = '''
"""Writes down which workers failed and were started."""

from rollstock import Extension, NoOptions, hookimpl


class Herald(Extension[NoOptions]):
    @hookimpl
    def rollstock_worker_failed(self, run, role, rank, error):
        self.write(run, f"failed {error}")

    @hookimpl
    def rollstock_worker_started(self, run, role, rank):
        self.write(run, f"started {role} {rank}")

    def write(self, run, line):
        with (run.directory / "workers.txt").open("a") as file:
            file.write(line + "\\n")


@hookimpl
def rollstock_extension():
    return Herald
'''


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An installed package with two extensions: `judged` brings the role `judge`, `herald` tells of failures."""
    site = tmp_path_factory.mktemp("site")
    info = site / "acme_judge-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-judge\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rollstock.extension]\njudged = acme_judge\nherald = acme_herald\n")
    (site / "acme_judge.py").write_text(dedent(JUDGE))
    (site / "acme_herald.py").write_text(dedent(HERALD))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        for cached in (find_module, parse, extras_of):
            cached.cache_clear()
        yield
    for cached in (find_module, parse, extras_of):
        cached.cache_clear()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Workers of a cluster have a thread for each of their cores, and so must a run in this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`kill(role, method, number)`: the last worker of a role, or the one of `rank`, is killed in its so-and-so-manieth
    call of a method; stopped_s: for so many seconds it does nothing before."""

    def arm(
        role: str,
        method: str,
        number: int,
        *,
        rank: int = -1,
        by: signal.Signals = signal.SIGKILL,
        stopped_s: float = 0.0,
    ) -> None:
        from rollstock.plugins.executors._group import RayGroup

        send, left = RayGroup.send, [number]

        def killing(self: RayGroup, only: int | None, called: str, *rest: Any) -> Any:
            sent = send(self, only, called, *rest)
            if (self.role, called) == (role, method):
                left[0] -= 1
                if left[0] == 0:
                    pid = self.processes[rank].pid
                    os.kill(pid, signal.SIGSTOP if stopped_s else by)
                    if stopped_s:
                        threading.Timer(stopped_s, os.kill, (pid, by)).start()
            return sent

        monkeypatch.setattr(RayGroup, "send", killing)

    return arm


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray cluster of two nodes with four logical cores each, which nobody has joined yet."""
    names = ("RAY_enable_worker_prestart", "RAY_prestart_worker_first_driver", "RAY_worker_niceness")
    with pytest.MonkeyPatch.context() as patch:
        for name in (*names, "RAY_USAGE_STATS_ENABLED"):
            patch.setenv(name, "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        from ray.cluster_utils import Cluster

        node = {"num_cpus": 4, "object_store_memory": 100 << 20, "include_dashboard": False}
        found = Cluster(initialize_head=True, head_node_args=node)
        try:
            second = {name: value for name, value in node.items() if name != "include_dashboard"}
            try:
                found.add_node(**second)
            except Exception:  # Ray gives a node thirty seconds to start, which a busy machine may not have
                found.add_node(**second)
            yield found
        finally:
            found.shutdown()
            os.environ.pop("RAY_ADDRESS", None)
