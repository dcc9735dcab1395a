"""The commands of the page on clusters, word for word, with two nodes of Ray on this machine as its two machines."""

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import run_blocks

pytestmark = pytest.mark.cluster
PAGE = run_blocks.REPOSITORY / "docs" / "how-to" / "cluster.md"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a machine on which nobody has used Ray before."""
    pytest.importorskip("ray")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "COV_", "PYTEST_"))}
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # paths of Ray's sockets have to be short
        yield {**variables, "HOME": str(tmp_path), "RAY_TMPDIR": short, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def test_two_machines_train_one_model(tmp_path: Path, machine: dict[str, str]) -> None:
    from ray.util import get_node_ip_address

    folder = run_blocks.Folder(tmp_path)
    blocks = [block.text for block in run_blocks.read_blocks(PAGE) if "test_cluster_page.py" in (block.reason or "")]
    assert len(blocks) == 3, "start on the first, start on the second, train"
    script = "\n".join(blocks).replace("FIRST_MACHINE", get_node_ip_address()).replace("6379", str(free_port()))
    assert script.count("ray start") == 2
    machine["PATH"] = folder.environment["PATH"]
    log = (tmp_path / "script.log").open("w")
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, env=machine, stdin=subprocess.DEVNULL,
        stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        code = process.wait(600)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the nodes of Ray are among them
        log.close()
    assert code == 0, (tmp_path / "script.log").read_text()[-4000:]
    logs = tmp_path / "runs" / "two-machines" / "logs"
    workers = {"actor-0.log", "actor-1.log", "rollout-0.log", "rollout-1.log", "controller.log"}
    assert workers <= {path.name for path in logs.iterdir()}, "rewards share the log of a generator"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
