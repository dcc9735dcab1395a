"""Low-rank adapters (LoRA, arXiv:2106.09685) through peft: put in place, named, and merged for generators and exports.

For the torch backend. Inside the model peft renames what it wraps (`q_proj.base_layer.weight`,
`q_proj.lora_A.default.weight`); outside, weights keep their transformers names and the adapters are called
`lora.q_proj.A` and `lora.q_proj.B`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rollstock import LowRank, UserError, import_optional
from rollstock.backends.torch.config import LoRAConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFIX = "lora."
_ADAPTER = "default"


def add_adapters(model: PreTrainedModel, config: LoRAConfig, seed: int) -> None:
    """Freeze the model and put adapters beside its linear layers; their product starts at 0.

    Raises UserError if peft is not installed, or no layer has one of the names in `config.targets`.
    """
    peft = import_optional("peft", needed_by="backend:torch")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(config.targets) or "all-linear",
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            # get_peft_model resolves "all-linear"; the wrapper around the model that it returns is not needed.
            with warnings.catch_warnings():  # peft asks transformers for what has another name in newer ones
                warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
                peft.get_peft_model(model, settings, adapter_name=_ADAPTER)
        except ValueError as error:
            raise UserError(f"backend.lora.targets: {error}") from error


def public_name(name: str) -> str:
    """The name outside of a weight that is called `name` inside a model with adapters."""
    for part in ("A", "B"):
        inner = f".lora_{part}.{_ADAPTER}.weight"
        if name.endswith(inner):
            return f"{PREFIX}{name.removesuffix(inner)}.{part}"
    return name.replace(".base_layer", "")  # more than once, where experts keep two matrices in one module


def is_adapter(name: str) -> bool:
    """Whether a public name is one of an adapter."""
    return name.startswith(PREFIX)


def merged(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]], *, full: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """`weights` by public names, with each adapter added to the weight beside it and left out itself; `full`: the whole
    of an adapter's weight, of which the model may hold a part."""
    layers = {target: layer for _, target, layer in _layers(model)}
    for name, tensor in weights:
        if is_adapter(name):
            continue
        layer = layers.get(name)
        yield name, tensor if layer is None else tensor + _delta(layer, *(full(part.weight) for part in _parts(layer)))


def additions(model: nn.Module, *, full: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, LowRank]]:
    """The adapters by the names of the weights that they are added to; `full`: as for `merged`.

    Raises UserError for adapters of experts, which are no plain products.
    """
    for name, target, layer in _layers(model):
        if not target.endswith(".weight") or not hasattr(layer, "fan_in_fan_out"):
            raise UserError(f"the adapters of {name!r} cannot be sent alone: set weight_sync.content to full")
        first, second = (full(part.weight) for part in _parts(layer))
        yield target, LowRank(first, second, float(layer.scaling[_ADAPTER]), bool(layer.fan_in_fan_out))


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """The shapes of the adapters among tensors with public names."""
    return {name: tensor.shape for name, tensor in tensors.items() if is_adapter(name)}


def mismatch(saved: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> str:
    """How the adapters of a checkpoint differ from those that the config makes, and what to do."""
    theirs, ours = shapes(saved), shapes(mine)
    first = min(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
    return (
        f"the checkpoint has {_told(theirs)}, and backend.lora gives this model {_told(ours)}, which differ in "
        f"{first!r}: set it to what the run was trained with"
    )


def _told(found: Mapping[str, torch.Size]) -> str:
    ranks = sorted({shape[0] for name, shape in found.items() if name.endswith(".A")})
    return f"{len(found) // 2} adapters of rank {', '.join(map(str, ranks))}" if found else "no adapters"


def merge_saved(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Saved tensors by public names, with the saved adapters merged the way the model's own layers would. Raises
    UserError where the model has others."""
    mine = {
        f"{PREFIX}{name}.{half}": part.weight
        for name, _, layer in _layers(model)
        for half, part in zip("AB", _parts(layer), strict=True)
    }
    if shapes(tensors) != shapes(mine):
        raise UserError(mismatch(tensors, mine))
    result = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
    for name, target, layer in _layers(model):
        saved = (tensors[f"{PREFIX}{name}.{part}"] for part in "AB")
        result[target] = result[target] + _delta(layer, *saved).to(result[target])
    return result


def _layers(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Each layer that has an adapter: its name, the public name of the weight that the adapter is for, and itself."""
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            parameter = getattr(module, "parameter_name", "weight")  # one of several in a module of experts
            yield name, public_name(f"{name}.{parameter}"), module


def _parts(layer: Any) -> tuple[Any, Any]:
    """The two modules of an adapter."""
    return layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER]


@torch.no_grad()
def _delta(layer: Any, first: Tensor, second: Tensor) -> Tensor:
    """What an adapter with these weights adds to its layer's."""
    modules = _parts(layer)
    own = [module._parameters["weight"] for module in modules]
    try:
        for module, weight in zip(modules, (first, second), strict=True):
            module._parameters["weight"] = weight  # get_delta_weight only reads it
        delta: Tensor = layer.get_delta_weight(_ADAPTER)
    finally:
        for module, parameter in zip(modules, own, strict=True):
            module._parameters["weight"] = parameter
    return delta
