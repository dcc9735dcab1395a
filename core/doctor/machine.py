"""The machine: cores and threads, memory, disk, and the limits of a container."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from rollstock.doctor.finding import Finding
from rollstock.manifest import usable_cores
from rollstock.units import format_bytes

LITTLE_DISK = 5 << 30
LITTLE_SHARED_MEMORY = 256 << 20
FEW_FILES = 1024
_CGROUP = Path("/sys/fs/cgroup")


def examine_machine(folder: Path | None = None) -> Iterator[Finding]:
    """Look at the machine; `folder` (here, by default) is where disk space is measured."""
    yield from _cores()
    yield from _threads()
    yield from _memory()
    yield from _disk(folder or Path.cwd())
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and limit < FEW_FILES:
        yield Finding("warning", "open files", f"this process may open only {limit} files at once", "ulimit -n 4096")


def _cores() -> Iterator[Finding]:
    cores, all_cores = usable_cores(), os.cpu_count() or 1
    text = f"{cores} cores" if cores == all_cores else f"{cores} of {all_cores} cores may be used"
    yield Finding("ok", "processor", text)
    quota = cpu_quota()
    if quota is not None and quota < 0.9 * cores:
        yield Finding(
            "warning",
            "processor",
            f"this container gets the time of {quota:g} cores, but sees {cores}: threads beyond that only wait",
            f"export OMP_NUM_THREADS={max(1, round(quota))}",
        )


def cpu_quota(folder: Path = _CGROUP) -> float | None:
    """Cores' worth of time that the control group allows; None without a limit."""
    for name in ("cpu.max", "cpu/cpu.cfs_quota_us"):
        try:
            words = (folder / name).read_text().split()
            if name != "cpu.max":
                words.append((folder / "cpu/cpu.cfs_period_us").read_text().strip())
            quota, period = words
            return None if quota in ("max", "-1") else int(quota) / int(period)
        except (OSError, ValueError):
            continue  # the file of the other version of control groups, or none at all
    return None


def _threads() -> Iterator[Finding]:
    cores, said = usable_cores(), os.environ.get("OMP_NUM_THREADS", "")
    if said and not said.isdecimal():
        yield Finding(
            "warning", "OMP_NUM_THREADS", f"{said!r} is no number of threads", f"export OMP_NUM_THREADS={cores}"
        )
    elif said and int(said) > cores:
        yield Finding(
            "warning",
            "OMP_NUM_THREADS",
            f"{said} threads would share {cores} cores, which is slower than {cores} threads",
            f"export OMP_NUM_THREADS={cores}",
        )
    elif said and int(said) < cores:
        yield Finding(
            "info",
            "OMP_NUM_THREADS",
            f"one operation of torch uses {said} of {cores} cores",
            "unset OMP_NUM_THREADS to use all, unless several runs share the machine",
        )
    if os.environ.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE":
        yield Finding(
            "warning",
            "OMP_WAIT_POLICY",
            "ACTIVE lets waiting threads spin, which takes the cores from rewards and other processes",
            "unset OMP_WAIT_POLICY",
        )


def _memory() -> Iterator[Finding]:
    fields: dict[str, int] = {}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields[name] = int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # not Linux
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = fields.get("MemAvailable", 0)
    text = format_bytes(total) + (f", {format_bytes(free)} of it free" if free else "")
    yield Finding("ok", "memory", text)


def _disk(folder: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(folder).free
    if free < LITTLE_DISK:
        yield Finding("warning", "disk", f"only {format_bytes(free)} free at {folder}", "checkpoints need room")
    else:
        yield Finding("ok", "disk", f"{format_bytes(free)} free at {folder}")
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).total < LITTLE_SHARED_MEMORY:
        yield Finding(
            "warning",
            "shared memory",
            f"/dev/shm has only {format_bytes(shutil.disk_usage(shared).total)}; processes pass tensors through it",
            "in a container: docker run --shm-size=2g",
        )
