"""`rollstock export`: the policy of a checkpoint as a directory that plain transformers loads, with a model card.

For whoever keeps, serves or publishes what a run has trained. Turning a backend's state into Hugging Face weights
(adapters merged, heads of ours dropped) is the backend's part.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from rollstock.errors import RunError, UserError
from rollstock.folders import folder_for, path_error
from rollstock.model_card import model_card
from rollstock.report.reading import read_run
from rollstock.restart import ROUTER_STATE
from rollstock.rundir import RunDirectory

if TYPE_CHECKING:
    from torch import Tensor

    from rollstock.checkpoint import Checkpoint
    from rollstock.interfaces.device import Device
    from rollstock.manager import PluginManager
    from rollstock.schema import RunConfig

Dtype = Literal["float32", "bfloat16", "float16"]
PART = "actor/model"
ROUTER_FILE = "router.json"

logger = logging.getLogger(__name__)


def export(
    run_dir: Path, to: Path, *, step: int | Literal["best", "last"] | None = None, dtype: Dtype = "float32"
) -> Path:
    """Write the model of a run's checkpoint to the directory `to` and return it.

    step: of the checkpoint; `last` (or None) is the newest sound one, `best` the one with the highest score. dtype: of
    the floating-point weights; training keeps float32. Raises UserError if `to` has anything in it, or there is no such
    checkpoint, and RunError if the checkpoint is damaged or holds no policy.
    """
    if dtype not in get_args(Dtype):
        raise UserError(f"dtype {dtype!r} is none of {', '.join(get_args(Dtype))}")
    directory = RunDirectory.open(run_dir)
    if not (directory.model / "config.json").is_file():
        raise UserError(
            f"{directory.model} has no config.json; it is written when training starts: was this run only begun?"
        )
    _refuse_occupied(to)
    checkpoint = _choose(directory, step)
    if PART not in checkpoint.tensors:
        raise RunError(f"{checkpoint.path} holds no policy: its parts are {', '.join(checkpoint.tensors)}")
    weights = _cast(_plain_weights(directory, checkpoint), dtype)
    temporary = to.with_name(f".{to.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with folder_for(to.parent), ExitStack() as ends:
            ends.callback(shutil.rmtree, temporary, ignore_errors=True)  # before the folder around it
            shutil.copytree(directory.model, temporary)
            _write_weights(weights, temporary, dtype)
            _write_router(checkpoint, temporary)
            (temporary / "README.md").write_text(model_card(read_run(run_dir), checkpoint), encoding="utf-8")
            if to.exists():
                to.rmdir()  # it is empty: that was checked
            temporary.rename(to)
    except OSError as error:
        message = f"the export to {to} failed, and nothing of it is left"
        raise path_error(error, message, "choose another --to") from error
    return to


def _write_router(checkpoint: Checkpoint, folder: Path) -> None:
    """Keep a router's balancing biases beside the weights, and say that a Hugging Face model knows nothing of them."""
    state = checkpoint.state.get("backends", {}).get("actor", {}).get(ROUTER_STATE)
    if state:
        (folder / ROUTER_FILE).write_text(json.dumps(state), encoding="utf-8")
        logger.warning(
            "the run's router has a state (%s), for which a Hugging Face model has no place: "
            "plain transformers chooses experts without it; it is kept in %s",
            ", ".join(state),
            ROUTER_FILE,
        )


def _refuse_occupied(to: Path) -> None:
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"{to} exists and is not an empty directory; nothing is overwritten: choose another --to")


def _choose(directory: RunDirectory, step: int | str | None) -> Checkpoint:
    from rollstock.checkpoint import CheckpointStore

    store = CheckpointStore(directory.checkpoints)
    if step == "best":
        best = store.best()
        if best is None:
            raise UserError(
                f"no checkpoint in {directory.checkpoints} has a score: the run was not evaluated; take `last`"
            )
        return store.load(best)
    if step is None or step == "last":
        return store.load()
    if isinstance(step, str):
        raise UserError(f"the step {step!r} is neither a number nor best nor last")
    return store.load(step)


def _plain_weights(directory: RunDirectory, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """What the backend makes of its saved state."""
    from rollstock.build import model_spec
    from rollstock.config import load_run_config
    from rollstock.interfaces.algorithm import Algorithm
    from rollstock.interfaces.backend import Backend
    from rollstock.manager import make_manager
    from rollstock.tokens import load_tokenizer

    config = load_run_config(directory.config)
    _use_own_model(config, directory)
    manager = make_manager(config.plugins.block)
    backend = manager.create_as(Backend, config.engine_of("actor"))
    head = manager.create_as(Algorithm, config.algorithm).actor_head()
    spec = dataclasses.replace(model_spec(config, load_tokenizer(config.model)), head=head)
    try:
        backend.setup(spec, _device(config, manager), trainable=True, total_updates=1)
        return backend.export_weights(checkpoint.tensors[PART])
    finally:
        backend.close()


def _use_own_model(config: RunConfig, directory: RunDirectory) -> None:
    """Where the base model is gone (another machine), its config and tokenizer in the run are enough."""
    if config.model.path is None or Path(config.model.path).expanduser().is_dir():
        return
    block = json.loads((directory.model / "config.json").read_text(encoding="utf-8"))
    block.pop("transformers_version", None)
    config.model.path, config.model.config = None, block
    config.model.tokenizer = str(directory.model)


def _device(config: RunConfig, manager: PluginManager) -> Device[Any]:
    """The run's device, or the default one where this machine has no such chip: an export computes next to nothing."""
    from rollstock.defaults import DEFAULT_PLUGINS
    from rollstock.interfaces.device import Device

    device = manager.create_as(Device, config.device)
    if device.unavailable() is not None:
        device = manager.create_as(Device, {"name": DEFAULT_PLUGINS["device"]})
    device.activate(0)
    return device


def _cast(weights: dict[str, Tensor], dtype: Dtype) -> dict[str, Tensor]:
    import torch

    target = getattr(torch, dtype)
    return {name: tensor.to(target) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


def _write_weights(weights: dict[str, Tensor], folder: Path, dtype: Dtype) -> None:
    """As safetensors, in shards where the model is large, with the data type in the config."""
    from huggingface_hub import save_torch_state_dict
    from safetensors import SafetensorError

    _remove(folder.glob("*.safetensors"))
    try:
        save_torch_state_dict({name: tensor.cpu() for name, tensor in weights.items()}, folder)
    except SafetensorError as error:  # it has what the system said in its text alone
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    path.write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n", encoding="utf-8")


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink()
