"""Real processes for the tests of this folder; see `workers`."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

LIMIT_S = 900


@pytest.fixture(scope="session")
def do_jobs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """`do_jobs(name, jobs)`: do jobs, each `{"name", "call", "with", "count"}`; returns what process 0 of each came to,
    by its name. Where the tests themselves run in several processes, the first that asks for `name` does them for
    all."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def do(name: str, jobs: list[dict[str, Any]]) -> dict[str, Any]:
        folder = root / f"fsdp-{name}"
        try:
            folder.mkdir()
        except FileExistsError:
            _wait_for(folder / "done")
        else:
            (folder / "jobs.json").write_text(json.dumps(jobs))
            (folder / "done").write_text(_run(folder))
        for path in sorted(folder.glob("*.error*")):
            pytest.fail(f"{path.name}: {path.read_text()}")
        missing = [job["name"] for job in jobs if not (folder / f"{job['name']}.pt").exists()]
        assert not missing, (folder / "done").read_text()
        return {job["name"]: torch.load(folder / f"{job['name']}.pt", weights_only=False) for job in jobs}

    return do


def _run(folder: Path) -> str:
    """Start the processes; returns what they printed."""
    program = [sys.executable, str(Path(__file__).with_name("workers.py")), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(program, env=environment, timeout=LIMIT_S, capture_output=True, text=True)
    except subprocess.TimeoutExpired as error:
        return f"{error}"
    return f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"


def _wait_for(path: Path) -> None:
    for _ in range(20 * LIMIT_S):
        if path.exists():
            return
        time.sleep(0.05)
    pytest.fail(f"nobody wrote {path}")
