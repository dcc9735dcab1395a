"""Making the transformers models that a backend trains and the native rollout generates with.

For the backends and rollouts of this folder. A model is read from a local directory as data (safetensors and JSON,
never pickles, never code) or drawn at random from a config block; either way it comes in float32, without dropout, on
the CPU. Tokenizers are left to the core, devices and attention to the caller.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rollstock import HEAD_OUTPUTS, ModelSpec, UserError, suggest

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_CACHE_LINE = 64  # bytes
_NOISE = ("router_jitter_noise", "jitter_noise", "input_jitter_noise")


def build_model(spec: ModelSpec) -> PreTrainedModel:
    """The causal language model of `spec`: float32, on the CPU, in training mode, no dropout.

    Random weights depend on `spec.seed` and the config alone, and drawing them leaves torch's generators as they were.
    Raises UserError, naming what is wrong, for a path that is no model and for a config block that makes none.
    """
    if spec.path is not None and spec.config:
        raise UserError("model: give either `path` or `config`, not both")
    if spec.path is not None:
        model = _from_path(Path(spec.path).expanduser(), spec)
    elif spec.config:
        model = _from_config(model_config(spec), spec.seed)
    else:
        raise UserError(
            "model: give `path` (a directory in Hugging Face format) or `config` (a block with `model_type`)"
        )
    _make_deterministic(model)
    _align(model)
    model.train()
    return model


def model_config(spec: ModelSpec) -> PretrainedConfig:
    """The transformers config that `spec.config` describes, with the tokenizer's ids where the block names none.

    Raises UserError for an unknown `model_type`, an unknown key (with the nearest valid one) and a value that the
    type refuses.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    block = dict(spec.config)
    model_type = block.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        said = "it has no `model_type`" if model_type is None else f"unknown model_type {model_type!r}"
        raise UserError(f"model.config: {said}. {suggest(str(model_type), list(CONFIG_MAPPING.keys()))[:300]}")
    known = _config_keys(CONFIG_MAPPING[model_type])
    for key in block:
        if key not in known and not _read_by_layers(CONFIG_MAPPING[model_type], key):
            raise UserError(f"model.config: a {model_type} model has no {key!r}. {suggest(key, known)}")
    _fill_token_ids(block, spec)
    try:
        return AutoConfig.for_model(model_type, **block)
    except Exception as error:  # transformers has many exception classes for a value that does not fit
        raise UserError(f"model.config: transformers refuses this {model_type} config: {error}") from error


def _config_keys(config_class: type[PretrainedConfig]) -> set[str]:
    keys = {field.name for field in dataclasses.fields(config_class) if not field.name.startswith("_")}
    return keys | set(config_class.attribute_map) - {"transformers_version"}


def _read_by_layers(config_class: type[PretrainedConfig], key: str) -> bool:
    """Whether the model's code mentions a key that its config class does not declare (Qwen3-MoE's `head_dim`)."""
    module = config_class.__module__.replace(".configuration_", ".modeling_")
    try:
        code = inspect.getsource(importlib.import_module(module))
    except (ImportError, OSError):
        return False
    return re.search(rf"\b{re.escape(key)}\b", code) is not None


def _fill_token_ids(block: dict[str, Any], spec: ModelSpec) -> None:
    if spec.vocab_size is not None:
        given = block.setdefault("vocab_size", spec.vocab_size)
        if isinstance(given, int) and given < spec.vocab_size:
            raise UserError(f"model.config: vocab_size {given} is less than the tokenizer's {spec.vocab_size} tokens")
    eos = list(spec.eos_token_ids)
    ids = {
        "pad_token_id": spec.pad_token_id,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
    }
    for key, value in ids.items():
        if value is not None:
            block.setdefault(key, value)


def _from_config(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False
            )
        except Exception as error:  # not a causal model, or sizes that only the layers refuse
            raise UserError(
                f"model.config: no causal model can be made of this {config.model_type} config: {error}"
            ) from error
    return model


def _from_path(path: Path, spec: ModelSpec) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    _check_directory(path)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except Exception as error:  # broken files, unknown types and remote code all arrive as different classes
        raise UserError(f"model.path: transformers cannot load {path} as a causal language model: {error}") from error
    model: PreTrainedModel = loaded[0]
    mismatched = sorted(loaded[1]["mismatched_keys"])
    if mismatched:
        name, found, expected = mismatched[0]
        raise UserError(
            f"model.path: {path} has {len(mismatched)} weights of another shape than its config.json says, first "
            f"{name!r}: {list(found)}, not {list(expected)}"
        )
    missing = sorted(loaded[1]["missing_keys"])
    if "logprobs" not in HEAD_OUTPUTS[spec.head]:
        # The language-model head is thrown away, so a reward model without one is welcome.
        missing = [name for name in missing if not name.startswith("lm_head.")]
    if missing:
        raise UserError(f"model.path: {path} lacks {len(missing)} of the model's weights, the first is {missing[0]!r}")
    return model


def _check_directory(path: Path) -> None:
    if path.suffix == ".gguf" and path.is_file():
        raise UserError(
            f"model.path: {path} is a GGUF file; make a directory of it once with "
            f"`python -m rollstock.backends.gguf {path} DIRECTORY` and give that"
        )
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise UserError(
            f"model.path: {path} {what}; expected a local directory in Hugging Face format (nothing is downloaded)"
        )
    if not (path / "config.json").is_file():
        raise UserError(f"model.path: {path} has no config.json, so it is no model in Hugging Face format")
    if not any(path.glob("*.safetensors")):
        pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in path.glob(pattern))
        hint = f"; {pickles[0]} is a pickle, which can run code and is never loaded: convert it" if pickles else ""
        raise UserError(f"model.path: {path} has no *.safetensors file{hint}")


def _align(model: nn.Module) -> None:
    """Give weights memory of their own that begins where a cache line does. Read from a file they begin anywhere, and
    every product with them would pay for it."""
    for parameter in model.parameters():
        if parameter.data_ptr() % _CACHE_LINE:
            parameter.data = parameter.data.clone()


def _make_deterministic(model: nn.Module) -> None:
    """Take out what makes the trainer's log-probs differ from the sampler's: dropout, router noise, special padding
    rows.

    An embedding's `padding_idx` would withhold gradient from every token with the padding id, although pad == eos is
    normal.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.Embedding):
            module.padding_idx = None
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("dropout" in name or name in _NOISE):
                setattr(module, name, 0.0)


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers by their transformers names, in the model's order; tied ones once, by the first."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def checkpoint_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`weights` as a directory in Hugging Face format names and shapes them, which may differ from the model in memory.

    (Some mixture-of-experts models keep one tensor for all experts in memory and one a piece on disk.)
    """
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Tensor] = revert_weight_conversion(model, dict(weights))
    return {name: _alone(tensor) for name, tensor in converted.items()}


def _alone(tensor: Tensor) -> Tensor:
    """A tensor with storage of its own: files are not written from parts of larger ones (that of all experts, say)."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
