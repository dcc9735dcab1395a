"""What a checkpoint keeps of a run beside its tensors, and how a run takes it back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

from rollstock.conversion import to_plain
from rollstock.interfaces.backend import BackendState
from rollstock.interfaces.extension import Extension
from rollstock.interfaces.tracker import RunInfo
from rollstock.pipeline import Kept
from rollstock.plugin import distinct_names

if TYPE_CHECKING:
    from torch import Tensor

    from rollstock.checkpoint import Checkpoint
    from rollstock.run import Run

TRAINED_ROLES = ("actor", "critic")
Tensors: TypeAlias = "dict[str, dict[str, Tensor]]"
ROUTER_STATE = "router"
"""Where a role's state keeps its router's, beside the values of its backend."""


def plugin_states(run: Run) -> dict[str, Any]:
    """A copy of what the algorithm and the extensions ask to keep, as it is at this moment."""
    return {
        "algorithm": copy.deepcopy(run.algorithm.state()),
        "extensions": {name: copy.deepcopy(extension.state()) for name, extension in _named(run)},
    }


def controller_state(run: Run, plugins: Mapping[str, Any], backend_values: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON part of a checkpoint: progress, what each plugin asked to keep, and the plain values of the backends."""
    return {
        "progress": asdict(run.progress),
        **plugins,
        "trackers": run.trackers.state(),
        "backends": dict(backend_values),
    }


def trained(run: Run) -> tuple[Tensors, dict[str, Any]]:
    """The state of every role that trains: tensors by part, named as `actor/model`, and plain values by role."""
    states = {role: run.roles[role].call("state") for role in TRAINED_ROLES if role in run.roles}
    tensors = {f"{role}/{part}": found for role, state in states.items() for part, found in state.tensors.items()}
    return tensors, {role: state.values for role, state in states.items()}


def run_info(run: Run, resumed_at: int | None) -> RunInfo:
    """What trackers are told of a run."""
    return RunInfo(
        name=run.config.run.name or run.directory.name,
        directory=run.directory,
        config=to_plain(run.config),
        num_steps=run.config.train.steps,
        resumed_at=resumed_at,
    )


def restore(run: Run, checkpoint: Checkpoint) -> None:
    """Put a run where the checkpoint's was; roles of which it holds nothing are as they were built. Raises UserError if
    a tensor does not fit the config."""
    state = checkpoint.state
    goes_on = state["progress"]["step"] == run.progress.step  # then what was generated ahead still follows
    for name, value in state["progress"].items():
        setattr(run.progress, name, value)
    if not goes_on:
        episodes = checkpoint.tensors.get("pipeline/episodes", {})
        run.pipeline.load_state(run, Kept(state.get("pipeline", {}), episodes))
    run.algorithm.load_state(state["algorithm"])
    for name, extension in _named(run):
        extension.load_state(state["extensions"].get(name, {}))
    for role in TRAINED_ROLES:
        if role in run.roles and role in state["backends"]:
            prefix = f"{role}/"
            tensors = {
                part.removeprefix(prefix): checkpoint.tensors[part]
                for part in checkpoint.tensors
                if part.startswith(prefix)
            }
            run.roles[role].call("load_state", BackendState(tensors, state["backends"][role]))


def _named(run: Run) -> list[tuple[str, Extension[Any]]]:
    names = distinct_names(extension.plugin_name for extension in run.extensions)
    return list(zip(names, run.extensions, strict=True))
