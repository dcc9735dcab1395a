"""The device `cuda`: NVIDIA GPUs (and AMD's, which torch gives the same name)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollstock import Device, hookimpl, option
from rollstock.hardware.accelerator import Accelerator


@dataclass(kw_only=True)
class CUDAConfig:
    """Options of CUDA devices."""

    allow_tf32: bool = option(
        False, "round the factors of float32 matrix products to 10 bits of mantissa, which is faster"
    )
    deterministic: bool = option(
        False, "use only algorithms that repeat to the bit, and fail where torch has none; slower"
    )
    memory_fraction: float = option(
        1.0, "share of a GPU's memory that this process may take", minimum=0.01, maximum=1.0
    )


class CUDA(Accelerator[CUDAConfig]):
    """CUDA devices, through `torch.cuda`."""

    device_type = "cuda"

    def unavailable(self) -> str | None:
        """See `Device.unavailable`: a torch without CUDA, a machine without driver or GPU, or a hidden GPU."""
        if torch.version.cuda is None and torch.version.hip is None:
            return (
                f"device cuda: the installed torch ({torch.__version__}) is built without CUDA; "
                f"install a CUDA build (https://pytorch.org/get-started), or choose device: cpu"
            )
        if torch.cuda.is_available():
            return None
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None and hidden.strip() in ("", "-1"):
            return f"device cuda: CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU from this process; unset it"
        try:
            self.api().init()
        except (RuntimeError, AssertionError) as error:
            said = str(error).splitlines()[0]
            return f"device cuda: torch finds no usable GPU: {said}; see `nvidia-smi`, or choose device: cpu"
        return "device cuda: torch finds no GPU on this machine; see `nvidia-smi`, or choose device: cpu"

    def api(self) -> Any:
        """See `Accelerator.api`."""
        return torch.cuda

    def apply_options(self) -> None:
        """See `Accelerator.apply_options`."""
        torch.backends.cuda.matmul.allow_tf32 = self.config.allow_tf32
        torch.backends.cudnn.allow_tf32 = self.config.allow_tf32
        if self.config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with this
            torch.use_deterministic_algorithms(True)
        if self.config.memory_fraction < 1:
            torch.cuda.set_per_process_memory_fraction(self.config.memory_fraction)

    @property
    def collective_backend(self) -> str:
        """See `Device.collective_backend`."""
        return "nccl"

    @property
    def visibility_variable(self) -> str | None:
        """See `Device.visibility_variable`."""
        return "CUDA_VISIBLE_DEVICES"

    def profiler_activities(self) -> Sequence[Any]:
        """See `Device.profiler_activities`."""
        return (torch.profiler.ProfilerActivity.CUDA,)

    def statistics(self) -> dict[str, float]:
        """See `Device.statistics`: per cent busy, degrees, MHz and watts; nothing without the package nvidia-ml-py."""
        try:
            return {
                "utilization": float(torch.cuda.utilization()),
                "temperature": float(torch.cuda.temperature()),
                "clock_mhz": float(torch.cuda.clock_rate()),
                "power_watts": torch.cuda.power_draw() / 1000,
            }
        except (ImportError, RuntimeError):
            return {}


@hookimpl
def rollstock_device() -> type[Device[Any]]:
    """Give the device class."""
    return CUDA
