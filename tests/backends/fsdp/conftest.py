"""Real processes for the tests of this folder; see `workers`."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

LIMIT_S = 300


def run_jobs(folder: Path, jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Do jobs, each `{"name", "call", "with", "count"}`; returns what process 0 of each came to, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    program = [sys.executable, str(Path(__file__).with_name("workers.py")), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        program, env=environment, timeout=LIMIT_S, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for path in sorted(folder.glob("*.error*")):
        pytest.fail(f"{path.name}: {path.read_text()}")
    assert done.returncode == 0, done.stdout
    return {job["name"]: torch.load(folder / f"{job['name']}.pt", weights_only=False) for job in jobs}


@pytest.fixture(scope="session")
def do_jobs() -> Callable[..., dict[str, Any]]:
    """See `run_jobs`."""
    return run_jobs
