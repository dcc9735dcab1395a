"""The device `ascend`: Huawei's NPUs, through torch-npu, which adds `torch.npu` and the collectives `hccl` to torch.

Nothing here imports torch while this module is imported: with torch-npu installed and its driver stack CANN missing,
`import torch` itself fails, because torch loads its device packages; then this is the module that has to explain it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from rollstock import Device, hookimpl, option
from rollstock.hardware.accelerator import Accelerator

if TYPE_CHECKING:
    import torch

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


@dataclass(kw_only=True)
class AscendConfig:
    """Options of Ascend devices."""

    mix_precision: bool = option(
        True,
        "let matrix products run in the lower type that a backend asks for, float32 ones in HF32; false: full float32",
    )
    graph_mode: bool = option(
        False,
        "compile operators for the shapes they meet, which pays where shapes repeat; false uses the ready-made ones",
    )
    max_call_depth: int = option(
        1000, "how deep Python calls may nest, for tracing deep models", minimum=100, maximum=1_000_000
    )


class Ascend(Accelerator[AscendConfig]):
    """Ascend NPUs."""

    device_type = "npu"

    def unavailable(self) -> str | None:
        """See `Device.unavailable`: tells a missing package from a broken one, and both from a missing device."""
        if importlib.util.find_spec("torch_npu") is None:
            return (
                "device ascend: the package torch-npu is not installed: pip install 'rollstock[npu]' "
                "on a machine with an Ascend NPU and Huawei's CANN toolkit"
            )
        reason = _import("torch")
        if reason is not None:
            return (
                f"device ascend: with torch-npu installed, `import torch` itself fails ({reason}). {_cann_hint()} "
                f"To use torch without the NPU, set {_AUTOLOAD}=0 or uninstall torch-npu"
            )
        reason = _import("torch_npu")
        if reason is not None:
            version = _version("torch-npu")
            return f"device ascend: torch-npu {version} is installed but cannot be loaded ({reason}). {_cann_hint()}"
        if not self.api().is_available():
            hidden = os.environ.get(_VISIBLE)
            if hidden is not None and not hidden.strip():
                return f"device ascend: {_VISIBLE} is empty, which hides every NPU from this process; unset it"
            return (
                "device ascend: torch-npu works, but there is no NPU that this process can see; look at `npu-smi info`"
            )
        return None

    def api(self) -> Any:
        """See `Accelerator.api`."""
        return importlib.import_module("torch").npu

    def apply_options(self) -> None:
        """See `Accelerator.apply_options`."""
        npu = self.api()
        npu.set_compile_mode(jit_compile=self.config.graph_mode)
        npu.matmul.allow_hf32 = self.config.mix_precision
        npu.conv.allow_hf32 = self.config.mix_precision
        sys.setrecursionlimit(max(sys.getrecursionlimit(), self.config.max_call_depth))

    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        """See `Device.autocast`; changes nothing without `mix_precision`."""
        return super().autocast(dtype) if self.config.mix_precision else nullcontext()

    @property
    def collective_backend(self) -> str:
        """See `Device.collective_backend`."""
        return "hccl"

    @property
    def visibility_variable(self) -> str | None:
        """See `Device.visibility_variable`."""
        return _VISIBLE

    def statistics(self) -> dict[str, float]:
        """See `Device.statistics`: per cent busy."""
        try:
            return {"utilization": float(self.api().utilization())}
        except (ImportError, RuntimeError, AttributeError):
            return {}


def _import(name: str) -> str | None:
    """Import a package; returns the first line of what went wrong, or None."""
    try:
        importlib.import_module(name)
    except SystemExit:  # some versions of torch-npu leave the interpreter when a library of CANN is missing
        return "it gave up while loading CANN's libraries"
    except Exception as error:  # a broken binary package raises anything
        cause = error.__cause__ or error
        return (str(cause).strip() or type(cause).__name__).splitlines()[0]
    return None


def _cann_hint() -> str:
    """What to do about CANN, by what this process's environment says of it."""
    if "ASCEND_TOOLKIT_HOME" in os.environ or "ASCEND_HOME_PATH" in os.environ:
        return (
            f"CANN's environment is set, so look for versions that do not fit: torch {_version('torch')}, "
            f"torch-npu {_version('torch-npu')}, which must agree in their first two numbers."
        )
    return (
        "CANN is missing, or its environment is not set: install the CANN toolkit and run "
        "`source /usr/local/Ascend/ascend-toolkit/set_env.sh` in this shell."
    )


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "of unknown version"


@hookimpl
def rollstock_device() -> type[Device[Any]]:
    """Give the device class."""
    return Ascend
