"""The options of the fsdp backend: those of the torch backend, and how a model is spread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rollstock import option
from rollstock.backends.torch.config import TorchConfig

_REPLICAS = 2


@dataclass(kw_only=True)
class FSDPConfig(TorchConfig):
    """Options of `backend: {name: fsdp}`."""

    sharding_strategy: Literal["FULL", "HYBRID", "NO_SHARD"] = option(
        "FULL",
        "what each process keeps of weights, gradients and optimizer: FULL a part; HYBRID a part of one of `replicas` "
        "copies; NO_SHARD all",
    )
    replicas: int | None = option(
        None,
        "copies of the model under HYBRID, each spread over an equal share of the processes; none: 2. For HYBRID alone",
        minimum=2,
        maximum=100_000,
    )
    offload_params: bool = option(
        False, "keep weights, gradients and optimizer in the CPU's memory, and update them there"
    )
    timeout_s: float = option(
        1800.0, "seconds that a process waits for the others before it gives up", minimum=1, maximum=1e6
    )

    def num_replicas(self, world_size: int) -> int:
        """How many copies of the model so many processes keep."""
        if self.sharding_strategy == "HYBRID":
            return min(self.replicas or _REPLICAS, world_size)
        return world_size if self.sharding_strategy == "NO_SHARD" else 1

    def problems(self, world_size: int) -> Iterator[str]:
        """Why so many processes cannot train in this way, by the option that must change."""
        if self.layers == "lean":
            yield "backend.layers: lean leaves out the modules that are sharded; choose auto or modules"
        if self.compile.enabled:
            yield "backend.compile.enabled: layers whose weights are shared out are not compiled; set it to false"
        if self.sharding_strategy != "HYBRID":
            if self.replicas is not None:
                kept = "a copy in each process" if self.sharding_strategy == "NO_SHARD" else "one copy"
                yield (
                    f"backend.replicas: {self.replicas} would change nothing: only HYBRID counts copies, and "
                    f"sharding_strategy: {self.sharding_strategy} keeps {kept}; leave it out, or say "
                    "sharding_strategy: HYBRID"
                )
            return
        replicas = self.replicas or _REPLICAS
        if world_size % replicas:
            yield (
                f"backend.replicas: {replicas} copies cannot have equal shares of {world_size} processes; choose "
                "a divisor, or another sharding_strategy"
            )
        elif world_size == replicas:
            yield (
                f"backend.replicas: with {replicas} copies in {world_size} processes nothing is sharded; say "
                "sharding_strategy: NO_SHARD, or choose fewer copies"
            )
