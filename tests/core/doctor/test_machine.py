"""The machine's findings follow from its cores, its limits and its environment."""

import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from rollstock.doctor import machine
from rollstock.doctor.finding import Finding
from rollstock.doctor.machine import cpu_quota, examine_machine


def by_subject(**_: Any) -> dict[str, Finding]:
    found: dict[str, Finding] = {}
    for finding in examine_machine():
        if finding.subject not in found or finding.severity != "ok":
            found[finding.subject] = finding
    return found


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(machine, "cpu_quota", lambda: None)
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)


def test_a_sound_machine_has_nothing_to_mend() -> None:
    found = by_subject()
    assert found["processor"].message == "8 cores"
    assert found["memory"].severity == "ok"
    assert "OMP_NUM_THREADS" not in found


@pytest.mark.parametrize(
    ("value", "severity", "words"),
    [
        ("16", "warning", "16 threads would share 8 cores"),
        ("1", "info", "uses 1 of 8"),
        ("all", "warning", "no number"),
    ],
)
def test_thread_counts(monkeypatch: pytest.MonkeyPatch, value: str, severity: str, words: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    finding = by_subject()["OMP_NUM_THREADS"]
    assert finding.severity == severity
    assert words in finding.message
    assert finding.advice


def test_spinning_threads_are_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert by_subject()["OMP_WAIT_POLICY"].severity == "warning"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "200000 100000\n"}, 2.0),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "garbled"}, None),
        ({}, None),
    ],
)
def test_the_quota_of_a_container_is_read(tmp_path: Path, files: dict[str, str], expected: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == expected


def test_a_container_with_less_time_than_cores_is_told_how_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_quota", lambda: 2.0)
    finding = by_subject()["processor"]
    assert (finding.severity, finding.advice) == ("warning", "export OMP_NUM_THREADS=2")


def test_a_small_disk_little_shared_memory_and_few_files_hurt(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(total=64 << 20, free=1 << 20))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    found = by_subject()
    assert [found[name].severity for name in ("disk", "shared memory", "open files")] == ["warning"] * 3
    assert "1 MiB free" in found["disk"].message
