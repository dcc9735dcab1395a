"""The layers of a model compiled by `torch.compile`, as an option of the torch backend.

Each layer is compiled by itself, so that one compilation serves all of them. The attention of packed streams is left
out: its plan differs from one micro-batch to the next, and each would be a compilation of its own. A layer is then two
graphs, before and after it. `fullgraph` takes it in all the same, for batches whose lengths are always the same.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from torch.utils._triton import has_triton
from transformers import AttentionInterface, AttentionMaskInterface

from rollstock import UserError
from rollstock.backends.torch import attention

if TYPE_CHECKING:
    from rollstock.backends.torch.config import CompileConfig
    from rollstock.backends.torch.network import Network


OPAQUE: Final = f"{attention.NAME}_opaque"
"""The name under which transformers knows the same attention, where the compiler does not look into it."""


def compile_layers(network: Network, config: CompileConfig, device: torch.device) -> None:
    """Have the layers of a network compiled when they first run. Raises UserError where nothing can compile them."""
    reason = missing_compiler(device)
    if reason is not None:
        raise UserError(f"backend.compile: {reason}; install it, or set backend.compile.enabled=false")
    layers = _layers(network)
    if not layers:
        raise UserError("backend.compile: this model has no list of layers, which are what is compiled")
    if not config.fullgraph:
        AttentionInterface.register(OPAQUE, torch.compiler.disable(attention.packed_attention))
        AttentionMaskInterface.register(OPAQUE, attention.position_mask)
        network.model.set_attn_implementation(OPAQUE)
    for layer in layers:
        layer.compile(mode=config.mode, fullgraph=config.fullgraph, dynamic=config.dynamic)


def missing_compiler(device: torch.device) -> str | None:
    """What `torch.compile` needs on a device and does not find; None if it is all there."""
    if device.type == "cpu":
        compiler = os.environ.get("CXX") or "g++"
        return None if shutil.which(compiler) else f"on a CPU it needs the C++ compiler {compiler}, which is not here"
    return None if has_triton() else f"on {device.type} it needs the package triton, which is not here"


def _layers(network: Network) -> list[nn.Module]:
    """The longest list of modules in the transformer."""
    lists = [list(module) for module in network.body.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])
