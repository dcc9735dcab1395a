"""What a run was made with: versions, plugins, hardware, data, seed, command; enough to repeat it, and no secrets.

For the run, which writes `manifest.json` at its start and adds to it when resumed, and for `report`. Reading the config
is the caller's part; it hands in the plugins that were loaded and the fingerprint of the data.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollstock.secrets import mask_arguments, mask_secrets

FORMAT = 1
_VARIABLE_PREFIXES = (
    "ROLLSTOCK_",
    "OMP_",
    "MKL_",
    "KMP_",
    "CUDA_",
    "ASCEND_",
    "NCCL_",
    "HCCL_",
    "GLOO_",
    "TORCH_",
    "HF_",
)
_VARIABLES = ("TOKENIZERS_PARALLELISM", "PYTHONHASHSEED", "WORLD_SIZE", "RANK", "LOCAL_RANK")


def build_manifest(
    *,
    plugins: Sequence[Mapping[str, Any]],
    seed: int,
    data: Mapping[str, str],
    command: Sequence[str] | None = None,
    accelerators: Sequence[Mapping[str, Any]] = (),
    known: Collection[str] = (),
) -> dict[str, Any]:
    """The manifest of a run that starts now, as plain data with secrets masked.

    plugins: one mapping a plugin in use, with `kind`, `name`, `distribution`, `version`. data: fingerprints by split or
    source. command: `sys.argv` by default. accelerators: what the device plugin says of its devices. known: secrets
    that are masked wherever they are.
    """
    return {
        "format": FORMAT,
        "created": _now(),
        "command": mask_arguments(sys.argv if command is None else command, known),
        "working_directory": os.getcwd(),
        "seed": seed,
        "rollstock": _own_version(),
        "plugins": [mask_secrets(dict(plugin)) for plugin in plugins],
        "data": dict(data),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": installed_packages(),
        "hardware": {**describe_hardware(), "accelerators": [dict(accelerator) for accelerator in accelerators]},
        "environment": relevant_environment(),
        "git": describe_git(Path.cwd()),
        "resumed": [],
    }


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Write atomically: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def record_resume(
    path: Path, step: int, *, command: Sequence[str] | None = None, known: Collection[str] = ()
) -> list[str]:
    """Add to the manifest at `path` that the run goes on from `step`; returns what is different from when it started.

    A different version of Python, of a package or another processor may change results to the last bit, so a user
    should be told. A manifest that is missing or damaged is replaced by one that says so.
    """
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        differences = changes_since(manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        manifest = {"format": FORMAT, "created": None, "note": f"the manifest of the start was lost: {error}"}
        differences = []
    entry = {"at": _now(), "step": step, "command": mask_arguments(sys.argv if command is None else command, known)}
    manifest.setdefault("resumed", []).append({**entry, "changed": differences})
    write_manifest(path, manifest)
    return differences


def changes_since(manifest: Mapping[str, Any]) -> list[str]:
    """How this process differs from the one that wrote `manifest`: "torch 2.12.0, was 2.11.0"."""
    python = f"{platform.python_implementation()} {platform.python_version()}"
    found = [] if manifest["python"] == python else [f"{python}, was {manifest['python']}"]
    now, then = installed_packages(), manifest["packages"]
    for name in sorted(now.keys() | then.keys()):
        if now.get(name) != then.get(name):
            found.append(f"{name} {now.get(name, 'not installed')}, was {then.get(name, 'not installed')}")
    processor = describe_hardware()["processor"]
    if processor != manifest["hardware"]["processor"]:
        found.append(f"processor {processor}, was {manifest['hardware']['processor']}")
    return found


def installed_packages() -> dict[str, str]:
    """Versions of all installed distributions, by name."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:  # a half-removed package has no name
            found.setdefault(name, distribution.version)
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def describe_hardware() -> dict[str, Any]:
    """The machine: host system, processor, cores that this process may use, bytes of memory."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "num_cores": usable_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def usable_cores() -> int:
    """Cores that this process may run on, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def relevant_environment() -> dict[str, str]:
    """Environment variables that change how a run computes, secrets masked."""
    chosen = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLE_PREFIXES) or name in _VARIABLES
    }
    masked: dict[str, str] = mask_secrets(chosen)
    return masked


def describe_git(folder: Path) -> dict[str, Any] | None:
    """Commit and cleanness of the git working tree around `folder`; None outside one or without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return {"commit": commit, "clean": not git("status", "--porcelain", "--untracked-files=no")}
    except (OSError, subprocess.SubprocessError):
        return None


def _own_version() -> str:
    try:
        return importlib.metadata.version("rollstock")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
