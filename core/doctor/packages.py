"""The packages: the versions that rollstock asks for, its extras, and device packages that break torch's own import."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterator

from rollstock.doctor.finding import Finding
from rollstock.extras import extras_of

OWN_DISTRIBUTION = "rollstock"
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_HIDDEN_EXTRAS = ("dev",)
_IMPORT_SECONDS = 180


def examine_packages(distribution: str = OWN_DISTRIBUTION) -> Iterator[Finding]:
    """Look at what `distribution` needs."""
    yield Finding("ok", "python", f"{platform.python_version()} at {sys.executable}")
    yield from _requirements(distribution)
    yield from _extras(distribution)
    yield from _torch()


def _requirements(distribution: str) -> Iterator[Finding]:
    from packaging.requirements import Requirement

    try:
        stated = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "error", distribution, "is not installed as a package, so its plugins are not found", "pip install -e ."
        )
        return
    fine = []
    for requirement in map(Requirement, stated):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        if version is None:
            yield Finding("error", requirement.name, "is not installed", f"pip install '{requirement}'")
        elif not requirement.specifier.contains(version, prereleases=True):
            yield Finding(
                "error",
                requirement.name,
                f"is {version}; needed: {requirement.specifier}",
                f"pip install '{requirement}'",
            )
        else:
            fine.append(f"{requirement.name} {version}")
    if fine:
        yield Finding("ok", "packages", ", ".join(fine))


def _extras(distribution: str) -> Iterator[Finding]:
    absent = []
    for extra, packages in sorted(extras_of(distribution).items()):
        missing = sorted(name for name in packages if _version(name) is None)
        if missing and extra not in _HIDDEN_EXTRAS:
            absent.append(f"{extra} ({', '.join(missing)})")
    if absent:
        advice = f"only for plugins that need them: pip install '{distribution}[NAME]'"
        yield Finding("info", "extras", f"not installed: {', '.join(absent)}", advice)


def _torch() -> Iterator[Finding]:
    """Whether `import torch` works as users' programs do it; torch itself imports whatever registers a chip with it."""
    chips = sorted({point.dist.name if point.dist else point.name for point in _chip_packages()})
    if not chips:
        return
    failure = _import_torch(autoload=True)
    if failure is None:
        yield Finding("ok", "torch", f"imports together with {', '.join(chips)}")
    elif _import_torch(autoload=False) is None:
        yield Finding(
            "warning",
            "torch",
            f"`import torch` fails because it loads {', '.join(chips)} on its own, and that fails: {failure}",
            f"install the driver software that the package needs, or set {AUTOLOAD}=0: torch then leaves it alone. "
            "The commands of rollstock set that for themselves; a program of yours must do so before it imports torch",
        )
    else:
        yield Finding("error", "torch", f"does not import: {failure}", "install torch anew")


def _chip_packages() -> list[importlib.metadata.EntryPoint]:
    return list(importlib.metadata.entry_points(group="torch.backends"))


def _import_torch(*, autoload: bool) -> str | None:
    """The last line of what went wrong in a process of its own, or None."""
    environment = {**os.environ, AUTOLOAD: "1" if autoload else "0"}
    command = [sys.executable, "-c", "import torch"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"it had not finished after {_IMPORT_SECONDS} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"the process ended with {done.returncode}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
