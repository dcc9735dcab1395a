"""A profile of a run whose workers are in processes of Ray: each records its own, and the tables name them."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rollstock.launch import train
from rollstock.profile import ProfileSettings

from .conftest import small

pytestmark = pytest.mark.cluster


def test_workers_in_other_processes_record_themselves(tmp_path: Path, cluster: Any) -> None:
    ray = {"name": "ray", "address": cluster.address}
    config = small(tmp_path / "run", "roles.rollout.count=2", executor=ray)
    said = train(config, profile=ProfileSettings(steps=(1, 1))).profile
    processes = {row["process"]: row for row in said["processes"]}
    assert {"controller", "actor-0", "rollout-0", "rollout-1"} <= processes.keys()
    assert len({row["where"] for row in processes.values()}) == len(processes)
    assert all(processes[name]["peak_gib"] > 0 for name in ("actor-0", "rollout-0", "rollout-1"))
    where = {(row["process"], row["stage"]) for row in said["operators"]}
    assert {("actor-0", "update"), ("rollout-0", "generate"), ("rollout-1", "generate")} <= where
    assert ("controller", "update") in where
    assert all(row["peak_gib"] is None for row in said["stages"]), "the controller knows nothing of their memory"
    assert any("other processes were recorded too" in note for note in said["notes"])
    assert any("cannot: " in note and "reward" in note for note in said["notes"])
    for row in processes.values():
        trace = json.loads(gzip.decompress((tmp_path / "run" / "profile" / row["trace"]).read_bytes()))
        assert trace["traceEvents"]
