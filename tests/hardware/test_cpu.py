"""The CPU as a device."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollstock.hardware import cpu
from rollstock.hardware.cpu import CPU, CPUConfig


def test_it_is_one_device_that_is_always_there() -> None:
    device = CPU()
    assert (device.unavailable(), device.count(), device.collective_backend) == (None, 1, "gloo")
    assert device.torch_device() == torch.device("cpu")
    assert device.visibility_variable is None


def test_activating_sets_the_threads_that_were_asked_for_and_no_others() -> None:
    before = torch.get_num_threads()
    try:
        CPU().activate()
        assert torch.get_num_threads() == before
        CPU(CPUConfig(threads=before + 1)).activate()
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_a_seed_repeats_torch_s_numbers() -> None:
    device = CPU()
    device.seed(2**62)
    first = torch.rand(3)
    device.seed(2**62)
    assert torch.equal(torch.rand(3), first)


def test_memory_follows_what_the_process_holds() -> None:
    device = CPU()
    device.release_memory()
    device.reset_peak_memory()
    before = device.memory()
    block = torch.ones(64 << 20, dtype=torch.uint8)
    during = device.memory()
    del block
    device.release_memory()
    after = device.memory()
    assert during.allocated - before.allocated > 48 << 20
    assert during.allocated - after.allocated > 48 << 20
    assert after.peak > during.allocated - (4 << 20)  # the kernel counts a little late
    assert 0 < after.free <= after.total


_KEEPING = """
import torch
from rollstock.hardware.cpu import CPU, CPUConfig

def held_after(keep):
    device = CPU(CPUConfig(keep_freed_memory=keep))
    device.activate()
    before = device.memory().allocated
    block = torch.ones(64 << 20, dtype=torch.uint8)
    del block
    held = device.memory().allocated - before
    device.release_memory()
    return held, device.memory().allocated - before

print(*held_after(False), *held_after(True))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such settings")
def test_freed_memory_is_kept_for_what_comes_next_until_it_is_released() -> None:
    """In a process of its own, because the setting is the process's."""
    done = subprocess.run([sys.executable, "-c", _KEEPING], capture_output=True, text=True, check=True)
    given_back, released, kept, released_too = (int(number) >> 20 for number in done.stdout.split())
    assert given_back < 16
    assert released < 16
    assert kept >= 60
    assert released_too < 16


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system keeps no peak that can be reset")
def test_the_peak_can_begin_anew() -> None:
    device = CPU()
    block = torch.ones(64 << 20, dtype=torch.uint8)
    high = device.memory().peak
    del block
    device.release_memory()
    device.reset_peak_memory()
    assert device.memory().peak < high - (32 << 20)


def test_a_container_s_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_CGROUP", tmp_path)
    whole = CPU().memory()
    (tmp_path / "memory.max").write_text("104857600\n")
    (tmp_path / "memory.current").write_text("62914560\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 20971520\n")
    limited = CPU().memory()
    assert (limited.total, limited.free) == (100 << 20, 60 << 20)
    (tmp_path / "memory.max").write_text("max\n")
    assert CPU().memory().total == whole.total


def test_an_older_container_s_limit_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_CGROUP", tmp_path)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("1000000")
    (tmp_path / "memory/memory.usage_in_bytes").write_text("900000")
    (tmp_path / "memory/memory.stat").write_text("total_inactive_file 100000\n")
    assert (CPU().memory().total, CPU().memory().free) == (1000000, 200000)


def test_a_failed_allocation_is_told_from_other_errors() -> None:
    device = CPU()
    with pytest.raises(RuntimeError) as failed:
        torch.empty(10**16)
    assert device.is_out_of_memory(failed.value)
    assert device.is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as other:
        torch.ones(2) @ torch.ones(3)
    assert not device.is_out_of_memory(other.value)


def test_autocast_lowers_matrix_products_if_asked() -> None:
    device, square = CPU(), torch.ones(2, 2)
    with device.autocast(torch.bfloat16):
        assert (square @ square).dtype == torch.bfloat16
    for dtype in (None, torch.float32):
        with device.autocast(dtype):
            assert (square @ square).dtype == torch.float32


def test_streams_and_waiting_change_nothing() -> None:
    device = CPU()
    with device.stream():
        total = torch.ones(3).sum()
    device.synchronize()
    assert total == 3


def test_statistics_are_plain_numbers() -> None:
    statistics = CPU().statistics()
    assert statistics["threads"] == torch.get_num_threads()
    assert hasattr(os, "getloadavg") == ("load_per_core" in statistics)
    assert all(isinstance(value, float) for value in statistics.values())
