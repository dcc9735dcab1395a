"""Low-rank adapters (LoRA, arXiv:2106.09685) through peft: put in place, named, and merged for generators and exports.

For the torch backend. Inside the model peft renames what it wraps (`q_proj.base_layer.weight`,
`q_proj.lora_A.default.weight`); outside, weights keep their transformers names and the adapters are called
`lora.q_proj.A` and `lora.q_proj.B`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rollstock import UserError, import_optional
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
            peft.get_peft_model(model, settings, adapter_name=_ADAPTER)
        except ValueError as error:
            raise UserError(f"backend.lora.targets: {error}") from error


def public_name(name: str) -> str:
    """The name outside of a weight that is called `name` inside a model with adapters."""
    for part in ("A", "B"):
        inner = f".lora_{part}.{_ADAPTER}.weight"
        if name.endswith(inner):
            return f"{PREFIX}{name.removesuffix(inner)}.{part}"
    return name.replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    """Whether a public name is one of an adapter."""
    return name.startswith(PREFIX)


def merged(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """`weights` by public names, with each adapter added to the weight beside it and left out itself."""
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    for name, tensor in weights:
        if is_adapter(name):
            continue
        layer = layers.get(name.removesuffix(".weight"))
        yield name, tensor if layer is None else tensor.detach() + _delta(layer)


def _delta(layer: Any) -> Tensor:
    with torch.no_grad():
        delta: Tensor = layer.get_delta_weight(_ADAPTER)
    return delta


def merge_saved(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Saved tensors by public names, with the saved adapters merged the way the model's own layers would."""
    result = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
    for module_name, module in model.named_modules():
        if not hasattr(module, "get_delta_weight"):
            continue
        layer: Any = module
        down, up = tensors[f"{PREFIX}{module_name}.A"], tensors[f"{PREFIX}{module_name}.B"]
        delta = (up.float() @ down.float()) * layer.scaling[_ADAPTER]
        name = f"{module_name}.weight"
        result[name] = result[name] + (delta.T if layer.fan_in_fan_out else delta).to(result[name])
    return result
