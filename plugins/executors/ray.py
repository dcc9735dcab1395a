"""Workers in processes of a Ray cluster, on this machine or on many.

For runs that outgrow one process. Each worker is an actor in the bundle of a placement group, arguments and results
pass through Ray's object store, and what a worker logs or prints is in the run's directory, `logs/<role>-<rank>.log`.
Needs Ray (`pip install 'rollstock[ray]'`). Lost workers are started again; what those that train had learned is the
core's to load.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from rollstock import ConfigError, Executor, Run, RunError, WorkerGroup, WorkerSpec, hookimpl, option
from rollstock.plugins.executors._cluster import Cluster, check_address
from rollstock.plugins.executors._group import RayGroup
from rollstock.plugins.executors._host import Surroundings
from rollstock.plugins.executors._places import Places
from rollstock.plugins.executors._process import Process
from rollstock.plugins.executors._revival import Revival

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Of the controller's environment, what its workers must see as well; none of it is a secret.
_VARIABLES = (
    *("ROLLSTOCK_BLOCK_PLUGINS", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS"),
    *("TOKENIZERS_PARALLELISM", "TORCH_DEVICE_BACKEND_AUTOLOAD", "CUBLAS_WORKSPACE_CONFIG"),
)
_JOIN_S = 60.0  # to wait for room for a worker that joins
_STARTS = ("num_cpus", "object_store_memory", "plasma_directory", "temp_directory", "dashboard_port")


@dataclass(kw_only=True)
class RayConfig:
    """Options of the `ray` executor."""

    address: str = option(
        "", "cluster to join, `auto` or host:port; empty: RAY_ADDRESS, or Ray is started on this machine"
    )
    namespace: str | None = option(None, "Ray namespace of the run; none: one of its own")
    runtime_env: dict[str, Any] = option({}, "Ray runtime environment of the workers: env_vars, pip, working_dir ...")
    placement: Literal["pack", "spread", "strict_pack", "strict_spread"] = option(
        "pack", "whether the workers of a role are put onto few machines or many"
    )
    num_cpus: int | None = option(
        None,
        "cores that a Ray started here gives away to workers; none: it does not count, and workers share the cores",
        minimum=1,
        maximum=100_000,
    )
    object_store_memory: int | None = option(
        None,
        "bytes of the object store of a Ray started here; none: as Ray sees fit",
        minimum=78_643_200,
        maximum=1_125_899_906_842_624,
    )
    plasma_directory: str | None = option(
        None, "directory of the object store of a Ray started here; none: shared memory, /dev/shm"
    )
    temp_directory: str | None = option(None, "where a Ray started here keeps its own files; none: /tmp/ray")
    dashboard: bool = option(True, "start the dashboard with a Ray started here, where it is installed")
    dashboard_port: int | None = option(
        None, "port of the dashboard; none: 8265, or the next", minimum=1, maximum=65535
    )
    start_timeout_s: float = option(600.0, "seconds to wait for room for the workers of a role", minimum=1, maximum=1e6)
    warn_after_s: float = option(
        300.0, "seconds after which a call that is waited for is logged", minimum=1, maximum=1e6
    )

    def __post_init__(self) -> None:
        if self.address:
            check_address(self.address)
        if self.temp_directory is not None and not os.path.isabs(self.temp_directory):
            raise ValueError(f"`temp_directory` {self.temp_directory!r} must be an absolute path, for Ray's processes")
        given = [name for name in _STARTS if getattr(self, name) is not None]
        if self.address and given:
            raise ValueError(f"`address` joins a Ray that runs already, so `{given[0]}` is that one's to set")


class Ray(Executor[RayConfig]):
    """Keeps the processes of all roles. Ray is imported and started when the first of them is."""

    resizes = True

    def __init__(self, config: RayConfig | None = None) -> None:
        super().__init__(config)
        self._cluster: Cluster | None = None
        self._connecting: Future[Cluster] | None = None
        self._keeper: ThreadPoolExecutor | None = None
        self._places: Places | None = None
        self._begun: dict[str, WorkerSpec] = {}
        self._processes: list[Process] = []
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._threads, self._ended = _make_threads(), threading.Event()
        self._revival = Revival(self._ended, patience_s=self.config.start_timeout_s)
        self._groups = self._revival.groups
        self._spare: dict[str, list[dict[str, Any]]] = {}

    def validate(self, specs: Sequence[WorkerSpec]) -> list[str]:
        """Refuse a place for the object store that cannot be one, since Ray would wait for its own processes in vain,
        and fewer cores than the workers ask for."""
        problems = []
        store, cores = self.config.plasma_directory, self.config.num_cpus
        if store is not None and not (os.path.isdir(store) and os.access(store, os.W_OK | os.X_OK)):
            problems.append(
                f"executor.plasma_directory: {store!r} is no directory that can be written; make it, or leave it out"
            )
        asked = {spec.role: spec.count * spec.cpus for spec in specs if spec.colocate_with is None}
        if cores is not None and sum(asked.values()) > cores:
            shares = ", ".join(f"{role} {amount:g}" for role, amount in asked.items())
            problems.append(
                f"executor.num_cpus: {cores} is less than the {sum(asked.values()):g} cores that the workers ask for "
                f"({shares}): set it higher, leave it out so that they share what there is, or lower roles.ROLE.cpus"
            )
        return problems

    def prepare(self, specs: Sequence[WorkerSpec]) -> None:
        """Begin with the workers of all roles at once, so that their processes start side by side. Raises as `start`
        does for want of room."""
        for spec in specs:
            self._begin(spec)

    def start(self, spec: WorkerSpec) -> WorkerGroup:
        """Start a process for each worker, unless they share those of another role, and wait until they are built.

        Raises RunError for a count below 1 or when the cluster has no room, ConfigError for a role that is not there to
        share processes with, and what a factory raised.
        """
        if self._begun.get(spec.role) is not spec:
            self._begin(spec)
        del self._begun[spec.role]
        group = self._groups[spec.role]
        self._wait(group.finish)
        if self._cluster is not None:
            self._cluster.watch()
        return group

    def _begin(self, spec: WorkerSpec) -> None:
        """Start processes, and ask them to build the workers."""
        if spec.count < 1:
            raise RunError(f"role {spec.role!r} needs at least one worker, not {spec.count}")
        cluster = self._connect()
        if spec.colocate_with is None:
            processes = self._wait(self._start_processes, cluster, spec)
        else:
            host = self._groups.get(spec.colocate_with)
            found = 0 if host is None else host.size
            if host is None or found < spec.count:
                raise ConfigError(
                    f"roles.{spec.role}.colocate_with: {spec.colocate_with!r} has {found} processes, too few for "
                    f"{spec.count} workers"
                )
            processes = host.processes[: spec.count]
        group = RayGroup(
            *(spec, processes, cluster.ray, self._threads, self._revival),
            ended=self._ended,
            patience=self.config.warn_after_s,
        )
        if spec.may_resize:
            group.change_size = lambda group, count: self._wait(self._change_size, group, count)
        self._wait(group.build)
        self._groups[spec.role], self._begun[spec.role] = group, spec

    def _connect(self) -> Cluster:
        """Join or start Ray, in another thread: there it leaves the signals of this process alone, and a start that
        was broken off can be ended in order. The thread lives as long as Ray, whose processes end with it."""
        if self._cluster is None:
            self._keeper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray-keeper")
            self._connecting = self._keeper.submit(Cluster.connect, self.config, needed_by=self)
            self._cluster = self._connecting.result()
            _take_back_signals()
            self._revival.ray, self._revival.open_log = self._cluster.ray, self._open_log
            self._places = Places(self._cluster, self.config, self._ended)
        return self._cluster

    def _wait(self, function: Callable[..., T], *args: Any) -> T:
        """What a function returns that waits for Ray, in a wait that a signal may end."""
        return self._threads.submit(function, *args).result()

    def _start_processes(self, cluster: Cluster, spec: WorkerSpec) -> list[Process]:
        assert self._places is not None
        processes = []
        for rank, options in enumerate(self._places.reserve(spec)):
            processes.append(Process(f"{spec.role}-{rank}", options, self._surroundings(cluster, spec, rank)))
            processes[-1].start(cluster.ray)
            self._processes.append(processes[-1])
        return processes

    def _change_size(self, group: RayGroup, count: int) -> int:
        """Have workers join or leave a role; what cannot be started within a minute is done without."""
        with self._revival.working():
            while group.size > max(1, count):
                self._let_go(group)
            before = group.size
            try:
                while group.size < count:
                    self._add(group)
                if group.size > before:
                    ranks = range(before, group.size)
                    self._revival.await_start(group.processes[before:])
                    group.build(ranks)
                    group.finish()
                    self._revival.welcome({group.role: ranks})
                    for process in group.processes[before:]:
                        process.is_lost = False
            except RunError as error:
                logger.warning("no more workers of %s: %s", group.role, error)
                while group.size > before and group.processes[-1].is_lost:
                    self._let_go(group)
        return group.size

    def _add(self, group: RayGroup) -> None:
        assert self._places is not None
        assert self._cluster is not None
        spare = self._spare.get(group.role)
        one = dataclasses.replace(group.spec, count=1)
        options = spare.pop() if spare else self._places.reserve(one, min(_JOIN_S, self.config.start_timeout_s))[0]
        rank = group.size
        process = Process(f"{group.role}-{rank}", options, self._surroundings(self._cluster, group.spec, rank))
        process.is_lost = True  # until it is up to date
        process.start(self._cluster.ray)
        self._processes.append(process)
        group.add(process)
        self._name_log(process)

    def _let_go(self, group: RayGroup) -> None:
        assert self._places is not None
        assert self._cluster is not None
        process = group.remove()
        self._processes.remove(process)
        process.end(self._cluster.ray)
        if not self._places.give_back(process.options):
            self._spare.setdefault(group.role, []).append(dict(process.options))

    def _surroundings(self, cluster: Cluster, spec: WorkerSpec, rank: int) -> Surroundings:
        variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        if cluster.is_private:
            import torch

            # As if they worked in this process: those of a role compute at the same time, and threads that wait spin.
            variables["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // spec.count))
        else:
            variables["OMP_NUM_THREADS"] = str(max(1, int(spec.cpus)))
        if spec.devices and spec.visibility_variable is not None:
            variables[spec.visibility_variable] = str(spec.devices[rank])
        return Surroundings(variables, [entry for entry in sys.path if entry], os.getcwd())

    @hookimpl
    def rollstock_run_start(self, run: Run) -> None:
        """Say where the dashboard is, and let every process log to a file of the run."""
        self._revival.run = run
        if self._cluster is None:
            return
        if self._cluster.dashboard:
            run.trackers.message(f"Ray's dashboard: http://{self._cluster.dashboard}")
        self._wait(self._cluster.ray.get, [self._name_log(process) for process in self._processes])

    def _name_log(self, process: Process) -> Any:
        """Let a process log to a file of the run."""
        if self._revival.run is None:
            return None
        process.log = str(Path(self._revival.run.directory).resolve() / "logs" / f"{process.label}.log")
        return self._open_log(process)

    @staticmethod
    def _open_log(process: Process) -> Any:
        return process.actor.open_log.remote(process.log)

    @property
    def recovers(self) -> bool:
        """True: see `recover`."""
        return True

    def recover(self, roles: Collection[str] = ()) -> Mapping[str, Sequence[int]]:
        """See `Executor.recover`. Also finds processes whose loss nobody has noticed yet, as those of a whole machine;
        waits for room as long as at the start."""
        found: Mapping[str, Sequence[int]] = self._wait(self._revival.recover, roles)
        return found

    def shutdown(self) -> None:
        """End every process, and Ray where it was started here. May be called after a start that failed or was broken
        off."""
        connecting, self._connecting, self._cluster = self._connecting, None, None
        keeper, self._keeper = self._keeper, None
        if connecting is None or keeper is None:
            return
        with contextlib.suppress(Exception):  # whoever called `start` was told
            self._end_processes(connecting.result())
            keeper.submit(connecting.result().close).result()
        keeper.shutdown()

    def _end_processes(self, cluster: Cluster) -> None:
        processes, self._processes, self._begun = self._processes, [], {}
        self._ended.set()
        with self._revival.working():  # whoever starts one just now leaves off, and leaves none behind
            for process in processes:
                process.end(cluster.ray)
        if self._places is not None:
            self._places.release()
        self._threads.shutdown(cancel_futures=True)
        self._begin_anew()


def _take_back_signals() -> None:
    """Put the handler of SIGTERM in front of that of Ray's native side, which prints a stack and calls it then."""
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not None:  # None: it was not set from Python
            signal.signal(signal.SIGTERM, handler)


def _make_threads() -> ThreadPoolExecutor:
    """Those in which Ray is waited for; a call in flight takes one."""
    return ThreadPoolExecutor(max_workers=64, thread_name_prefix="ray")


@hookimpl
def rollstock_executor() -> type[Executor[Any]]:
    """Give `Ray`."""
    return Ray
