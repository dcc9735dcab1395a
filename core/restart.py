"""What a checkpoint keeps of a run beside its tensors, and how a run takes it back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rollstock.interfaces.backend import BackendState

if TYPE_CHECKING:
    from rollstock.checkpoint import Checkpoint
    from rollstock.run import Run

TRAINED_ROLES = ("actor", "critic")


def controller_state(run: Run, backend_values: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON part of a checkpoint: progress, and what each plugin asked to keep."""
    return {
        "progress": asdict(run.progress),
        "algorithm": run.algorithm.state(),
        "extensions": {extension.plugin_name: extension.state() for extension in run.extensions},
        "trackers": run.trackers.state(),
        "backends": dict(backend_values),
    }


def backend_states(run: Run) -> dict[str, BackendState]:
    """The state of every role that trains."""
    return {role: run.roles[role].call("state") for role in TRAINED_ROLES if role in run.roles}


def restore(run: Run, checkpoint: Checkpoint) -> None:
    """Put a run that was just built where the checkpoint's was. Raises UserError if a tensor does not fit the config."""
    state = checkpoint.state
    for name, value in state["progress"].items():
        setattr(run.progress, name, value)
    run.algorithm.load_state(state["algorithm"])
    for extension in run.extensions:
        extension.load_state(state["extensions"].get(extension.plugin_name, {}))
    for role in TRAINED_ROLES:
        if role in run.roles:
            prefix = f"{role}/"
            tensors = {
                part.removeprefix(prefix): checkpoint.tensors[part]
                for part in checkpoint.tensors
                if part.startswith(prefix)
            }
            run.roles[role].call("load_state", BackendState(tensors, state["backends"][role]))
