"""What is sent: weights, or the low-rank additions to weights that the generators keep; and its table of contents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollstock.lowrank import LowRank


@dataclass
class Cargo:
    """Weights by name, and additions to weights: to these ones, or to those of an earlier cargo if there are none."""

    weights: list[tuple[str, Tensor]] = field(default_factory=list)
    adapters: list[tuple[str, LowRank]] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, those of several names once."""
        return sum(tensor.nbytes for _, tensor in tensors_of(self))


@dataclass(frozen=True)
class Entry:
    """One tensor of a table of contents: all names that it goes by, its shape, and the name of its type."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its type."""
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype), self.dtype
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Table:
    """The entries of a cargo: its weights, then two factors for each adapter, whose target, scale and turn are here."""

    entries: tuple[Entry, ...]
    adapters: tuple[tuple[str, float, bool], ...] = ()

    @property
    def num_weights(self) -> int:
        """How many of the entries are weights."""
        return len(self.entries) - 2 * len(self.adapters)


def tensors_of(cargo: Cargo) -> list[tuple[tuple[str, ...], Tensor]]:
    """The tensors that travel, each once, with the names of those that share its memory (tied embeddings)."""
    found: dict[tuple[object, ...], tuple[list[str], Tensor]] = {}
    for name, tensor in cargo.weights:
        memory = (tensor.data_ptr() or id(tensor), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        found.setdefault(memory, ([], tensor))[0].append(name)
    weights = [(tuple(names), tensor) for names, tensor in found.values()]
    factors = [((name,), factor) for name, addition in cargo.adapters for factor in (addition.a, addition.b)]
    return weights + factors


def table_of(cargo: Cargo) -> Table:
    """The table of contents, in the order of `tensors_of`."""
    entries = (
        Entry(names, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for names, tensor in tensors_of(cargo)
    )
    adapters = ((name, addition.scale, addition.transposed) for name, addition in cargo.adapters)
    return Table(tuple(entries), tuple(adapters))


def named(entries: Iterable[tuple[Entry, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under each of its names."""
    for entry, tensor in entries:
        for name in entry.names:
            yield name, tensor


def unpacked(table: Table, arriving: Iterable[tuple[Entry, Tensor]]) -> Cargo:
    """The cargo of a table whose tensors are arriving."""
    tensors = list(arriving)
    weights, factors = tensors[: table.num_weights], [tensor for _, tensor in tensors[table.num_weights :]]
    adapters = [
        (name, LowRank(factors[2 * place], factors[2 * place + 1], scale, transposed))
        for place, (name, scale, transposed) in enumerate(table.adapters)
    ]
    return Cargo(list(named(weights)), adapters)
