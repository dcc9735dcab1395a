"""The learning rate, and the room that checkpoints take."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rollstock.doctor.finding import Finding
from rollstock.doctor.model import ModelFacts
from rollstock.errors import UserError
from rollstock.rundir import RunDirectory
from rollstock.units import format_bytes, format_count

if TYPE_CHECKING:
    from rollstock.schema import RunConfig

FACTOR = 30.0
"""How far from the usual a learning rate may be, either way, before it is mentioned."""


def usual_learning_rate(num_parameters: int, *, adapters: bool) -> float:
    """The order of magnitude that reinforcement learning with Adam uses: 1e-6 for 7 billion parameters, more for fewer.

    A rule of thumb through published recipes (7B: 1e-6; 0.1B: 1e-5; toy models: 1e-3), ten times that for adapters.
    """
    rate = float(1e-6 * (7e9 / max(num_parameters, 1)) ** 0.65)
    return min(10 * rate if adapters else rate, 1e-2)


def examine_learning_rate(config: RunConfig, model: ModelFacts) -> Iterator[Finding]:
    """Look at the backend's option `learning_rate`, if it has one."""
    rate = config.backend.get("learning_rate")
    if not isinstance(rate, (int, float)):
        return
    lora = config.backend.get("lora")
    adapters = isinstance(lora, Mapping) and bool(lora.get("rank"))
    usual = usual_learning_rate(model.num_parameters, adapters=adapters)
    kind = "adapters on a model" if adapters else "a model"
    text = f"{rate:g} for {kind} of {format_count(model.num_parameters)} parameters, where about {usual:.0e} is usual"
    if rate == 0:
        yield Finding("error", "backend.learning_rate", "0 trains nothing", f"about {usual:.0e} is usual for this size")
    elif rate > FACTOR * usual:
        yield Finding(
            "warning", "backend.learning_rate", text, "so large a rate tends to ruin the policy within a few steps"
        )
    elif rate < usual / FACTOR:
        yield Finding("warning", "backend.learning_rate", text, "so small a rate may show no progress in the whole run")
    else:
        yield Finding("ok", "backend.learning_rate", text)


def examine_disk(config: RunConfig, model: ModelFacts, *, has_critic: bool) -> Iterator[Finding]:
    """Hold the checkpoints that are kept at a time, and the one being written, against the free space."""
    lora = config.backend.get("lora")
    rank = int(lora.get("rank", 0)) if isinstance(lora, Mapping) else 0
    targets = list(lora.get("targets", [])) if isinstance(lora, Mapping) else []
    trained = model.adapter_parameters(rank, targets) if rank else model.num_parameters
    one = 4 * (model.num_parameters + (trained if rank else 0) + 2 * trained) * (2 if has_critic else 1)
    count = config.checkpoint.keep + int(config.checkpoint.keep_best) + 1
    folder = Path(config.run.directory or ".").absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    text = (
        f"{count} checkpoints of about {format_bytes(one)} may lie there at once, {format_bytes(count * one)} in all; "
        f"{format_bytes(free)} are free at {folder}"
    )
    if one > free:
        yield Finding("error", "checkpoint", text, "free some space, or set run.directory elsewhere")
    elif count * one > free:
        yield Finding("warning", "checkpoint.keep", text, "keep fewer, free some space, or set run.directory elsewhere")
    else:
        yield Finding("ok", "checkpoint", text)


def examine_directory(config: RunConfig) -> Iterator[Finding]:
    """Whether the run's directory is free."""
    if not config.run.directory:
        return
    directory = RunDirectory(Path(config.run.directory))
    try:
        directory.check_free()
    except UserError as error:
        yield Finding("warning", "run.directory", str(error))
