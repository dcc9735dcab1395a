"""A network spread over processes: which modules are sharded, what becomes of a gradient, weights put together again.

For the fsdp backend. Gradients are summed over processes, not averaged, because losses are shares of one whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from rollstock.backends.torch.network import Network

REPLICATE, SHARD = "replicate", "shard"


def make_mesh(device: torch.device, world_size: int, replicas: int) -> DeviceMesh:
    """The processes as `replicas` rows, each of which holds the model once."""
    if replicas == 1:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=(SHARD,))
    return init_device_mesh(device.type, (replicas, world_size // replicas), mesh_dim_names=(REPLICATE, SHARD))


def shard_network(
    network: Network, mesh: DeviceMesh, *, compute_dtype: torch.dtype, offload: bool
) -> dict[str, FSDPModule]:
    """Spread a network over a mesh, each layer by itself, and what is left together; returns what was spread, by name.

    mesh: one whose first dimension, if there are two, is that of whole copies. compute_dtype: the type in which the
    weights of layers travel and are multiplied; those that are kept stay float32, and gradients are added up in it.
    """
    policy: OffloadPolicy = OffloadPolicy()
    if offload:
        policy = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    lower = MixedPrecisionPolicy()
    if compute_dtype != torch.float32:
        # Inputs stay as they are: the sums between layers are better in float32, and autocast sees to the products.
        lower = MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False)
    sharded: dict[str, FSDPModule] = {}
    for name, layer in _layers(network):
        sharded[name] = fully_shard(layer, mesh=mesh, mp_policy=lower, offload_policy=policy)
    # `fully_shard` warns of outputs that are views, in case somebody should write into them.
    network.register_forward_hook(
        lambda _module, _inputs, found: {name: value.clone() for name, value in found.items()}
    )
    # Embeddings and heads, which autocast casts where that is right: a scalar head must be exact.
    sharded["rest"] = fully_shard(network, mesh=mesh, offload_policy=policy)
    for module in sharded.values():
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    # Experts that none of a process's tokens chose have no gradient there, and one in another process.
    sharded["rest"].set_reduce_scatter_unused_params(True)
    return sharded


def full_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """The whole of a sharded weight, on `device`, without a gradient; every process that has a part must ask for it."""
    tensor = tensor.detach().to(device) if isinstance(tensor, DTensor) else tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(full: Tensor, like: Tensor) -> Tensor:
    """What this process holds of a whole tensor, spread as `like` is."""
    if not isinstance(like, DTensor):
        return full
    part = distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
    return part.to(like.to_local().device)


def _layers(network: Network) -> Iterator[tuple[str, nn.Module]]:
    """The model's layers, which transformers names as what must not be split."""
    names = set(network.model._no_split_modules or ())
    for name, module in network.named_modules():
        if type(module).__name__ in names:
            yield name, module
