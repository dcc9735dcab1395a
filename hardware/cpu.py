"""The device `cpu`: the processor that torch runs on when there is no other chip.

For laptops, tests, and everything on a larger machine that needs no accelerator. Memory is what the process may still
take: the machine's, or less where a container has a limit.
"""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollstock import Device, Memory, hookimpl, option

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of <malloc.h>


@dataclass(kw_only=True)
class CPUConfig:
    """Options of the CPU."""

    threads: int = option(
        0,
        "threads that one operation of torch uses; 0 leaves what OMP_NUM_THREADS or torch decided",
        minimum=0,
        maximum=4_096,
    )
    keep_freed_memory: bool = option(
        True,
        "let the process keep the memory of tensors that are gone for those to come; where the kernel gets it back, it "
        "clears every page anew, which costs a tenth of a training step",
    )


class CPU(Device[CPUConfig]):
    """The processor. There is one, it is always there, and its work is done when a call returns."""

    def unavailable(self) -> str | None:
        """See `Device.unavailable`: never."""
        return None

    def count(self) -> int:
        """See `Device.count`."""
        return 1

    def torch_device(self, index: int = 0) -> torch.device:
        """See `Device.torch_device`."""
        return torch.device("cpu")

    def activate(self, index: int = 0) -> None:
        """See `Device.activate`."""
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        if self.config.keep_freed_memory:
            _keep_freed_memory()

    def seed(self, seed: int) -> None:
        """See `Device.seed`."""
        torch.manual_seed(seed)

    def synchronize(self) -> None:
        """See `Device.synchronize`: there is nothing to wait for."""

    def memory(self, index: int = 0) -> Memory:
        """See `Device.memory`; what the process holds is its resident memory, libraries included."""
        total, free = _machine_memory()
        limit, used = _container_memory()
        if limit is not None:
            total, free = min(total, limit), min(free, max(0, limit - used))
        allocated, peak = _process_memory()
        return Memory(total, free, allocated, peak)

    def reset_peak_memory(self) -> None:
        """See `Device.reset_peak_memory`; the kernel of Linux keeps a peak that a process may reset."""
        with suppress(OSError):
            (_PROC / "self/clear_refs").write_text("5")

    def release_memory(self) -> None:
        """See `Device.release_memory`."""
        gc.collect()
        with suppress(OSError, AttributeError):  # only the GNU C library has it
            ctypes.CDLL(None).malloc_trim(0)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See `Device.is_out_of_memory`."""
        text = str(error)
        return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
            isinstance(error, RuntimeError) and ("can't allocate memory" in text or "not enough memory" in text)
        )

    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        """See `Device.autocast`."""
        return nullcontext() if dtype in (None, torch.float32) else torch.autocast("cpu", dtype=dtype)

    def stream(self) -> AbstractContextManager[Any]:
        """See `Device.stream`: it changes nothing."""
        return nullcontext()

    @property
    def collective_backend(self) -> str:
        """See `Device.collective_backend`."""
        return "gloo"

    @property
    def visibility_variable(self) -> str | None:
        """See `Device.visibility_variable`: there is none."""
        return None

    def statistics(self) -> dict[str, float]:
        """See `Device.statistics`: threads in use, and processes waiting per core over the last minute."""
        numbers = {"threads": float(torch.get_num_threads())}
        if hasattr(os, "getloadavg"):
            numbers["load_per_core"] = os.getloadavg()[0] / (os.cpu_count() or 1)
        return numbers


def _keep_freed_memory() -> None:
    """Let the GNU C library take large blocks from its heap, too, and not give the end of the heap back by itself."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, -1)


def _machine_memory() -> tuple[int, int]:
    """Bytes of the machine, and those that programs can have without swapping."""
    fields = _fields(_PROC / "meminfo")
    if "MemTotal" in fields:
        return fields["MemTotal"], fields.get("MemAvailable", fields.get("MemFree", 0))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # not Linux: nobody says what is free
    return total, max(0, total - _process_memory()[0])


def _container_memory() -> tuple[int | None, int]:
    """The limit of this process's control group (None: no limit), and what the group uses beyond reclaimable caches."""
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),  # version 2
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # version 1
    ):
        limit, used = _number(_CGROUP / limit_file), _number(_CGROUP / usage_file)
        if limit is not None and used is not None:
            cache = _statistic(
                (_CGROUP / limit_file).with_name("memory.stat"), ("inactive_file", "total_inactive_file")
            )
            return limit, max(0, used - cache)
    return None, 0


def _process_memory() -> tuple[int, int]:
    """Resident bytes of this process, and the most there have been."""
    fields = _fields(_PROC / "self/status")
    if "VmRSS" in fields:
        return fields["VmRSS"], max(fields["VmRSS"], fields.get("VmHWM", 0))
    import resource  # not on every system, and only needed where there is no /proc

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak, peak


def _fields(path: Path) -> dict[str, int]:
    """The `Name:  123 kB` lines of a file of the kernel, in bytes; empty where there is no such file."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            parts = line.split()
            if len(parts) == 3 and parts[2] == "kB":
                found[parts[0].rstrip(":")] = int(parts[1]) * 1024
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or the word "max"
        return None


def _statistic(path: Path, names: tuple[str, ...]) -> int:
    """The largest of the named entries of a control group's statistics; 0 if it has none."""
    with suppress(OSError):
        entries = dict(line.split() for line in path.read_text().splitlines())
        return max((int(entries[name]) for name in names if name in entries), default=0)
    return 0


@hookimpl
def rollstock_device() -> type[Device[Any]]:
    """Give the device class."""
    return CPU
