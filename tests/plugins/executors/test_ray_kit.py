"""The `ray` executor passes its kit, and explains workers that die, clusters that are full and what is not there."""

import http.server
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstock import ConfigError, PluginError, RunError, WorkerSpec
from rollstock.manager import make_manager
from rollstock.metrics import metric_values
from rollstock.testing import check_executor, make_batch
from rollstock.testing.executor import spec


def make(**options: Any) -> Any:
    return make_manager().create("executor", {"name": "ray", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": "ray://host:10001"}, r"`address` 'ray://host:10001' is one of Ray's client"),
        ({"address": "head"}, r"`address` 'head' is neither `auto` nor host:port"),
        ({"address": "head:ray"}, r"`address` 'head:ray' is neither `auto` nor host:port"),
        ({"temp_directory": "ray"}, r"`temp_directory` 'ray' must be an absolute path"),
        ({"address": "auto", "num_cpus": 2}, r"`address` joins a Ray that runs already, so `num_cpus` is that one's"),
        ({"placement": "near"}, r"executor.placement must be one of 'pack', 'spread'"),
        ({"object_store_memory": 1}, r"executor.object_store_memory must be at least 78643200"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_a_place_for_the_object_store_that_is_none_is_refused_before_ray_starts(tmp_path: Path) -> None:
    (problem,) = make(plasma_directory=str(tmp_path / "none")).validate([])
    assert "executor.plasma_directory" in problem
    assert make(plasma_directory=str(tmp_path)).validate([]) == []


def test_fewer_cores_than_workers_ask_for_are_refused_before_ray_starts() -> None:
    asked = [
        WorkerSpec(role="actor", factory=dict, cpus=2),
        WorkerSpec(role="rollout", factory=dict, count=2, cpus=0.5),
        WorkerSpec(role="reward", factory=dict, colocate_with="actor"),
    ]
    (problem,) = make(num_cpus=2).validate(asked)
    assert "executor.num_cpus: 2 is less than the 3 cores that the workers ask for (actor 2, rollout 1)" in problem
    assert make(num_cpus=3).validate(asked) == make().validate(asked) == []


def test_an_address_at_which_nobody_listens_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        executor = make(address=f"127.0.0.1:{port}")
        with pytest.raises(ConfigError, match=rf"executor.address: no Ray cluster answers at '127.0.0.1:{port}'"):
            executor.start(WorkerSpec(role="probe", factory=dict))
        executor.shutdown()
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        executor = make()
        with pytest.raises(ConfigError, match=r"RAY_ADDRESS: no Ray cluster answers"):
            executor.start(WorkerSpec(role="probe", factory=dict))
        executor.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", "head")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS: 'head' is neither `auto` nor host:port"):
        make().start(WorkerSpec(role="probe", factory=dict))


def refused_at(port: int) -> str:
    """What a run says whose `executor.address` is that of this port."""
    executor = make(address=f"127.0.0.1:{port}")
    with pytest.raises(ConfigError, match=rf"^executor.address: no Ray cluster answers at '127.0.0.1:{port}'") as found:
        executor.start(WorkerSpec(role="probe", factory=dict))
    executor.shutdown()
    return str(found.value)


def test_an_address_at_which_somebody_listens_and_says_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr("rollstock.plugins.executors._cluster._KNOCK_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts
        said = refused_at(silent.getsockname()[1])
    assert "what listens there did not say within 0.3 s what it is" in said


def answering(server: socket.socket, pieces: Sequence[bytes]) -> threading.Thread:
    """Answer one client with some bytes, one after the other, and hang up."""

    def answer() -> None:
        client, _ = server.accept()
        with client:
            client.recv(4096)
            for piece in pieces:
                client.sendall(piece)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([], "it answers b''"),
        ([b"220 ", b"ready\r\n"], "it answers b'220 ready'"),
        ([b"\0\0\0\4"], r"it answers b'\x00\x00\x00\x04'"),
    ],
)
def test_an_address_at_which_something_else_answers_is_refused(pieces: list[bytes], said: str) -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = answering(server, pieces)
        assert f"what listens there is not Ray: {said}" in refused_at(server.getsockname()[1])
        thread.join(10)


def test_an_address_at_which_http_is_spoken_is_refused() -> None:
    pytest.importorskip("ray")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        said = refused_at(server.server_port)
        server.shutdown()
    assert "what listens there is not Ray: it answers b'" in said


def test_an_address_at_which_another_service_speaks_grpc_is_refused() -> None:
    pytest.importorskip("ray")
    grpc = pytest.importorskip("grpc")
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert "what listens there is no head of a cluster" in refused_at(port)
    finally:
        server.stop(None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temp_directory": f"{__file__}/ray"}, r"executor.temp_directory: Ray cannot keep its files in"),
        ({"runtime_env": {"env_var": {}}}, r"runtime_env has no part 'env_var'. Did you mean 'env_vars'"),
        ({"object_store_memory": 900_000_000_000_000}, r"executor: Ray refuses these options: .*memory"),
    ],
)
def test_what_ray_refuses_is_the_users_to_mend(options: dict[str, Any], message: str) -> None:
    pytest.importorskip("ray")
    executor = make(dashboard=False, **options)
    with pytest.raises(ConfigError, match=message):
        executor.start(WorkerSpec(role="probe", factory=dict))
    executor.shutdown()


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PluginError, match=r"'ray', which is not installed: pip install 'rollstock\[ray\]'"):
        executor.start(WorkerSpec(role="probe", factory=dict))
    executor.shutdown()


def test_choosing_it_does_not_import_ray() -> None:
    import subprocess

    script = (
        "import sys; from rollstock.manager import make_manager; "
        "make_manager().create('executor', {'name': 'ray'}); print('ray' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "False"


@pytest.fixture(scope="module")
def joined(cluster: Any) -> Iterator[str]:
    """The address of a cluster that this process has joined already, as all its executors then do."""
    import ray

    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster.address
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("joined")
def test_it_passes_the_kit() -> None:
    assert check_executor("ray").skipped == {}


@pytest.fixture
def executor() -> Iterator[Any]:
    found = make(placement="spread")
    yield found
    found.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("joined")
def test_a_killed_worker_is_one_clear_error_and_the_others_go_on(executor: Any) -> None:
    group, other = executor.start(spec()), executor.start(spec("other", count=1))
    assert group.processes[0].pid != group.processes[1].pid
    os.kill(group.processes[1].pid, signal.SIGKILL)
    with pytest.raises(
        RunError, match=rf"^probe worker 1 \(process {group.processes[1].pid} on .*\) died during 'add'"
    ):
        group.call("add", 1)
    assert metric_values(other.call("add", 1)) == {"count": 1.0, "rank": 0.0}
    handed_on = other.submit("process")
    os.kill(other.call("process"), signal.SIGKILL)
    handed_on.result()
    lost = other.submit("double", make_batch(2))
    with pytest.raises(RunError, match="^other worker 0 "):
        group.call("who", lost)


@pytest.mark.slow
@pytest.mark.usefixtures("joined")
def test_results_go_from_worker_to_worker_and_roles_may_share_processes(executor: Any) -> None:
    one = executor.start(spec("one"))
    shared = executor.start(WorkerSpec(**{**vars(spec("shared", count=1)), "colocate_with": "one"}))
    assert shared.call("process") == one.call("process")
    batch = make_batch(2)
    found = one.call("who", shared.submit("double", batch))
    assert found["label"].startswith("{'doubled': tensor(")
    assert torch.equal(one.call("double", batch)["doubled"], 2 * batch.flat("response"))


@pytest.mark.slow
@pytest.mark.usefixtures("joined")
def test_a_cluster_that_is_too_small_or_full_says_so(executor: Any) -> None:
    with pytest.raises(RunError, match="3 workers of probe ask for 30 CPU, and the whole Ray cluster has 8: see roles"):
        executor.start(WorkerSpec(role="probe", factory=dict, count=3, cpus=10))
    with pytest.raises(RunError, match="ask for 2 GPU, and the whole Ray cluster has 0"):
        executor.start(WorkerSpec(role="p", factory=dict, count=2, visibility_variable="CUDA_VISIBLE_DEVICES"))
    executor.config.start_timeout_s = 1.0
    with pytest.raises(RunError, match="no room in the Ray cluster for 1 workers of probe with 5 CPU each"):
        executor.start(WorkerSpec(role="probe", factory=dict, cpus=5))
    executor.start(spec("one", count=2))
    with pytest.raises(RunError, match="ask for 8 CPU beside the 0.2 of the run's other roles, and the whole .* has 8"):
        executor.start(WorkerSpec(role="probe", factory=dict, count=2, cpus=4))
    with pytest.raises(ConfigError, match="'nobody' has 0 processes, too few for 1 workers"):
        executor.start(WorkerSpec(role="probe", factory=dict, colocate_with="nobody"))
