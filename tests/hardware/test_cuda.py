"""CUDA devices, as far as a machine without one can tell."""

import inspect
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rollstock import Memory, UserError
from rollstock.hardware.cuda import CUDA, CUDAConfig

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture
def chip(recorded: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """`torch.cuda` of a machine with two GPUs."""
    api = recorded(set_per_process_memory_fraction=("fraction", "device"))
    monkeypatch.setattr(CUDA, "unavailable", lambda self: None)
    monkeypatch.setattr(CUDA, "api", lambda self: api)
    return api


@no_gpu
def test_without_a_gpu_it_says_why_and_what_to_do() -> None:
    reason = CUDA().unavailable()
    assert reason is not None
    assert reason.startswith("device cuda: ")
    assert "device: cpu" in reason
    assert CUDA().count() == 0
    with pytest.raises(UserError) as refused:
        CUDA().activate()
    assert str(refused.value) == reason


def test_a_torch_without_cuda_a_missing_driver_and_hidden_gpus_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in str(CUDA().unavailable())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES='' hides every GPU" in str(CUDA().unavailable())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    def no_driver() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check")

    monkeypatch.setattr(torch.cuda, "init", no_driver)
    assert "Found no NVIDIA driver on your system.; see `nvidia-smi`" in str(CUDA().unavailable())
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    assert "finds no GPU on this machine" in str(CUDA().unavailable())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert CUDA().unavailable() is None


def test_the_recorded_interface_is_that_of_torch(chip: Any) -> None:
    assert len(chip.parameters) > 10
    for name, parameters in chip.parameters.items():
        assert set(parameters) <= set(inspect.signature(getattr(torch.cuda, name)).parameters)
    assert callable(torch.cuda.Stream.wait_stream)


def test_a_device_is_activated_with_its_options(chip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        CUDA(CUDAConfig(allow_tf32=True, memory_fraction=0.5)).activate(1)
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    assert ("set_device", 1) in chip.calls
    assert fractions == [0.5]
    with pytest.raises(UserError, match="no cuda device 2: this process sees 2"):
        CUDA().activate(2)
    assert CUDA().count() == 2
    assert CUDA().torch_device(1) == torch.device("cuda", 1)


def test_deterministic_is_passed_on(chip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is put back
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    try:
        CUDA(CUDAConfig(deterministic=True)).activate()
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


def test_memory_counts_blocks_that_torch_keeps_as_free(chip: Any) -> None:
    device = CUDA()
    assert device.memory(1) == Memory(total=1000, free=400, allocated=400, peak=450)
    assert all(call[1] == 1 for call in chip.calls)
    device.reset_peak_memory()
    device.release_memory()
    device.synchronize()
    assert chip.calls[-3:] == [("reset_peak_memory_stats",), ("empty_cache",), ("synchronize",)]


def test_a_side_stream_begins_after_the_current_one_which_then_waits_for_it(chip: Any) -> None:
    with CUDA().stream():
        chip.calls.append(("work",))
    assert chip.calls == [
        ("current_stream",),
        ("wait_stream", "side", "current"),
        ("stream", "side"),
        ("work",),
        ("wait_stream", "current", "side"),
    ]


def test_seeding_reaches_the_chip_and_the_cpu(chip: Any) -> None:
    CUDA().seed(5)
    first = torch.rand(2)
    CUDA().seed(5)
    assert torch.equal(torch.rand(2), first)
    assert ("manual_seed_all", 5) in chip.calls


def test_out_of_memory_is_told_from_other_errors() -> None:
    device = CUDA()
    assert device.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert device.is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not device.is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert not device.is_out_of_memory(ValueError("out of memory"))


def test_names_for_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (CUDA().collective_backend, CUDA().visibility_variable) == ("nccl", "CUDA_VISIBLE_DEVICES")


@no_gpu
def test_no_statistics_where_nothing_can_be_asked() -> None:
    assert CUDA().statistics() == {}
