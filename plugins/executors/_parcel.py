"""Values as Ray carries them: pickled, with the memory of tensors and arrays beside the pickle and not in it.

Ray copies that memory into its object store once and maps it into every process of a machine that reads it, so a large
batch or a model's weights are neither pickled nor copied again on the way. A tensor that comes out of a parcel lies in
that shared memory and must not be written to. Small tensors travel in the pickle, and are the reader's own.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

SMALL = 4096
"""Bytes up to which a tensor's memory goes into the pickle: beside it, each costs Ray more than the copy."""


class Parcel:
    """A pickled value: `head`, the pickle, and `buffers`, the memory beside it."""

    __slots__ = ("buffers", "head")

    def __init__(self, head: bytes, buffers: Sequence[Any]) -> None:
        self.head = head
        self.buffers = buffers

    @classmethod
    def pack(cls, value: Any) -> Parcel:
        """Pickle a value. Classes and functions that no module holds are pickled themselves, as Ray does."""
        buffers: list[pickle.PickleBuffer] = []
        file = io.BytesIO()
        _pickler_class()(file, protocol=5, buffer_callback=buffers.append).dump(value)
        return cls(file.getvalue(), buffers)

    def unpack(self) -> Any:
        """The value; its large tensors are views of the parcel's memory."""
        return pickle.loads(self.head, buffers=self.buffers)

    @property
    def num_bytes(self) -> int:
        """What it weighs, in bytes."""
        return len(self.head) + sum(memoryview(buffer).nbytes for buffer in self.buffers)

    def __reduce__(self) -> tuple[Any, ...]:
        return Parcel, (self.head, [pickle.PickleBuffer(buffer) for buffer in self.buffers])


class Columns:
    """Lists of tensors by name, as forward passes return them, one tensor a trajectory: joined, since each tensor in a
    pickle has its price."""

    __slots__ = ("_joined",)

    def __init__(self, lists: Mapping[str, Sequence[Any]]) -> None:
        torch: Any = importlib.import_module("torch")
        self._joined = {
            name: (torch.cat(list(parts)) if parts else None, [len(part) for part in parts])
            for name, parts in lists.items()
        }

    def lists(self) -> dict[str, list[Any]]:
        """The lists, of views."""
        return {
            name: [] if whole is None else list(whole.split(lengths)) for name, (whole, lengths) in self._joined.items()
        }

    @staticmethod
    def fit(value: Any) -> bool:
        """Whether a value is such lists: of tensors that have a first dimension, and a type and further ones alike."""
        torch: Any = sys.modules.get("torch")
        if torch is None or not isinstance(value, dict) or not all(isinstance(parts, list) for parts in value.values()):
            return False
        return all(
            isinstance(part, torch.Tensor)
            and part.dim() > 0
            and part.dtype == parts[0].dtype
            and part.shape[1:] == parts[0].shape[1:]
            for parts in value.values()
            for part in parts
        )


def _pickler_class() -> Any:
    """The pickler: Ray's, with a way of its own for tensors. Made when it is first needed, so that Ray is not imported
    before."""
    global _PICKLER
    if _PICKLER is None:
        base: Any = importlib.import_module("ray.cloudpickle").CloudPickler

        class Pickler(base):  # type: ignore[misc]  # the base is known when a config asks for it
            def reducer_override(self, value: Any) -> Any:
                torch: Any = sys.modules.get("torch")
                if torch is not None and type(value) is torch.Tensor and _is_plain(torch, value):
                    return _reduce_tensor(torch, value)
                return super().reducer_override(value)

        _PICKLER = Pickler
    return _PICKLER


_PICKLER: Any = None


def _is_plain(torch: Any, tensor: Any) -> bool:
    """Whether a tensor is its values and no more; others are pickled as torch does."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_conj() and not tensor.is_neg()


def _reduce_tensor(torch: Any, tensor: Any) -> tuple[Any, ...]:
    values = tensor.detach().cpu().contiguous().reshape(-1)
    memory = values.view(torch.uint8).numpy() if values.numel() else b""
    kind, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if values.nbytes <= SMALL:
        return _own_tensor, (bytes(memory), kind, shape)
    return _shared_tensor, (pickle.PickleBuffer(memory), kind, shape)


def _own_tensor(memory: bytes, kind: str, shape: tuple[int, ...]) -> Any:
    torch: Any = importlib.import_module("torch")
    if not memory:
        return torch.empty(shape, dtype=getattr(torch, kind))
    return torch.frombuffer(bytearray(memory), dtype=getattr(torch, kind)).reshape(shape)


def _shared_tensor(memory: Any, kind: str, shape: tuple[int, ...]) -> Any:
    torch: Any = importlib.import_module("torch")
    with warnings.catch_warnings():  # torch says once that this memory is not to be written to, which is the contract
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=getattr(torch, kind)).reshape(shape)
