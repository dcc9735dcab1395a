"""A compressor at work in the gradients of a sharded network, by the hooks that `fully_shard` has for its collectives.

For the fsdp backend, in runs that name one. Where there are copies of the model, gradients are shrunk on their way from
copy to copy, and within one they travel as they are (HYBRID keeps a copy where the network is fast). With a single copy
that is spread over all processes, the parts of the gradient are shrunk on their way to whoever keeps them. Weights
travel as they are.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from rollstock import Compressor
from rollstock.backends.fsdp.sharding import REPLICATE
from rollstock.compression import Traffic, average_gradients, scatter_gradients

logger = logging.getLogger(__name__)


class GradientCompression:
    """The compressor of one model, which it knows by the names of the modules that are sharded, and its traffic."""

    def __init__(self, compressor: Compressor[Any], mesh: DeviceMesh) -> None:
        self._compressor = compressor
        self._mesh = mesh
        self._traffic = Traffic()

    def attach(self, sharded: Mapping[str, FSDPModule]) -> None:
        """Put the hooks in place; where there are copies, the modules must have been sharded within a copy alone."""
        copies = REPLICATE in (self._mesh.mesh_dim_names or ())
        for name, module in sharded.items():
            if copies:
                module.set_all_reduce_hook(functools.partial(self._add_copies, name))
            else:
                module.set_custom_reduce_scatter(_CompressedReduceScatter(self, name))

    def take_traffic(self) -> Traffic:
        """What was sent since this was last asked."""
        traffic, self._traffic = self._traffic, Traffic()
        return traffic

    def _add_copies(self, name: str, gradient: Tensor) -> None:
        group = self._mesh.get_group(REPLICATE)
        self._traffic += average_gradients(self._compressor, {name: gradient}, group=group)
        gradient.mul_(dist.get_world_size(group))

    def add_parts(self, name: str, gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
        """This process's part of the sum of a gradient [p * n] over p processes, [n]."""
        part, traffic = scatter_gradients(self._compressor, gradient, key=name, group=group)
        self._traffic += traffic
        return part

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What the compressors of all processes keep, `[processes, ...]` by name, in that of rank 0; which have none of
        a name; and how many there are of what."""
        own = {name: tensor.detach().cpu() for name, tensor in self._compressor.state().items()}
        described: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = [{} for _ in range(self._size)]
        dist.all_gather_object(described, {name: (tuple(t.shape), t.dtype) for name, t in own.items()})
        kinds = {name: kind for each in described for name, kind in each.items()}
        tensors = {}
        for name in sorted(kinds):
            shape, dtype = kinds[name]
            rows = self._rows(own.get(name, torch.zeros(shape, dtype=dtype)))
            if rows:
                tensors[name] = torch.stack(rows)
        missing = {name: absent for name in kinds if (absent := _without(name, described))}
        return tensors, {"mesh": list(self._mesh.shape), "missing": missing}

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any], rank: int) -> None:
        """Take back what `state` gave. Residuals are of a process's own gradients: among other processes they mean
        nothing, and are dropped with a word."""
        if values["mesh"] != list(self._mesh.shape):
            if rank == 0:
                logger.warning(
                    "the compressor begins anew: its checkpoint is of %s processes, and these are %s",
                    " x ".join(map(str, values["mesh"])),
                    " x ".join(map(str, self._mesh.shape)),
                )
            return
        missing = values["missing"]
        self._compressor.load_state(
            {name: rows[rank].clone() for name, rows in tensors.items() if rank not in missing.get(name, ())}
        )

    def _rows(self, own: Tensor) -> list[Tensor]:
        """Every process's tensor, in that of rank 0; nothing in the others."""
        sent = own.to(self._mesh.device_type)
        rows = [torch.empty_like(sent) for _ in range(self._size)] if dist.get_rank() == 0 else None
        dist.gather(sent, rows, dst=0)
        return [row.cpu() for row in rows or ()]

    @property
    def _size(self) -> int:
        return dist.get_world_size()


class _CompressedReduceScatter(ReduceScatter):
    """The reduce-scatter of one module's gradients."""

    def __init__(self, compression: GradientCompression, name: str) -> None:
        self._compression = compression
        self._name = name

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Comm.allocate`."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Fill `output_tensor` with this process's part of the sum. It is the sum whatever `op` says, as it is for all
        gradients here."""
        output_tensor.copy_(self._compression.add_parts(self._name, input_tensor, group))


def _without(name: str, described: Sequence[Mapping[str, Any]]) -> list[int]:
    return [rank for rank, each in enumerate(described) if name not in each]
