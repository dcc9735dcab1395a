"""Tensors to a byte stream and back, in the safetensors layout, without ever holding a second copy of the weights.

The safetensors package wants the whole file in memory when it writes, and a plain file on disk when it reads. A
checkpoint is compressed and hashed on its way, so the (small, public) layout is written here piece by piece instead:
eight bytes of header length, a JSON header, then the tensors' raw bytes. An uncompressed file opens in any safetensors
reader. Names that share one tensor (tied embeddings) are stored once and come back sharing.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rollstock.checkpoint.errors import CheckpointCorruptError

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 8 << 20
MAX_HEADER_BYTES = 100 << 20
_ALIASES = "rollstock.aliases"
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


class Writer(Protocol):
    """Takes bytes in order."""

    def write(self, data: memoryview | bytes, /) -> Any:
        """Append `data`."""


class Reader(Protocol):
    """Gives bytes in order."""

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the front of `buffer`; return how many bytes that were, 0 at the end."""


@functools.cache
def _names_of_dtypes() -> dict[torch.dtype, str]:
    import torch

    return {getattr(torch, attribute): name for name, attribute in _DTYPES.items() if hasattr(torch, attribute)}


@dataclass(frozen=True)
class Layout:
    """Where each tensor goes: the finished header and the tensors in the order of their bytes."""

    header: bytes
    tensors: tuple[torch.Tensor, ...]
    num_bytes: int


def plan(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Lay `tensors` out: wide element types first, so that each starts aligned; the header keeps the mapping's order.

    Raises `TypeError` for what has no raw bytes to store: a dtype without a safetensors name, a tensor without data.
    """
    import torch

    names = _names_of_dtypes()
    stored: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    owners: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in names or tensor.layout is not torch.strided or tensor.is_meta:
            raise TypeError(f"tensor {name!r} ({tensor.dtype}, {tensor.layout}, {tensor.device}) cannot be stored")
        owner = owners.setdefault(identity(tensor), name) if tensor.numel() else name
        if owner == name:
            stored[name] = tensor
        else:
            aliases[name] = owner
    by_width = sorted(stored, key=lambda name: -stored[name].element_size())  # stable: ties keep the mapping's order
    entries: dict[str, Any] = {}
    offset = 0
    for name in by_width:
        end = offset + stored[name].numel() * stored[name].element_size()
        entries[name] = {
            "dtype": names[stored[name].dtype],
            "shape": list(stored[name].shape),
            "data_offsets": [offset, end],
        }
        offset = end
    header: dict[str, Any] = {
        "__metadata__": {_ALIASES: json.dumps(aliases), "rollstock.order": json.dumps([*tensors])}
    }
    text = json.dumps(header | entries).encode()
    text += b" " * (-len(text) % 8)
    return Layout(len(text).to_bytes(8, "little") + text, tuple(stored[name] for name in by_width), offset)


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What two tensors have in common that are one and the same memory."""
    storage = tensor.untyped_storage().data_ptr()
    flags = (tensor.is_conj(), tensor.is_neg())
    return (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, flags)


def write(layout: Layout, out: Writer) -> None:
    """Send a laid-out set of tensors to `out`; at most one tensor is copied (from its device) at a time."""
    import torch

    out.write(layout.header)
    for tensor in layout.tensors:
        if tensor.numel() == 0:
            continue
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), CHUNK_BYTES):
            out.write(data[start : start + CHUNK_BYTES])


def read(source: Reader, where: str) -> dict[str, torch.Tensor]:
    """Read tensors written by `write`, each straight into its own memory on the CPU.

    Raises `CheckpointCorruptError`, naming `where`, if the stream ends early, goes on too long or has a bad header.
    """
    import torch

    length = int.from_bytes(_exactly(source, 8, where), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointCorruptError(f"{where}: its header claims {length} bytes")
    entries, aliases, order = _parse(_exactly(source, length, where), where)
    dtypes = {name: dtype for dtype, name in _names_of_dtypes().items()}
    found: dict[str, torch.Tensor] = {}
    for name, dtype_name, shape, num_bytes in entries:
        dtype = dtypes.get(dtype_name)
        if dtype is None:
            raise CheckpointCorruptError(f"{where}: tensor {name!r} has the unknown dtype {dtype_name!r}")
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel() * tensor.element_size() != num_bytes:
            raise CheckpointCorruptError(f"{where}: tensor {name!r} of shape {shape} does not take {num_bytes} bytes")
        if num_bytes:
            fill(source, tensor.reshape(-1).view(torch.uint8).numpy().data, where)
        found[name] = tensor
    if source.readinto(memoryview(bytearray(1))):
        raise CheckpointCorruptError(f"{where}: goes on after its last tensor")
    try:
        found |= {alias: found[owner] for alias, owner in aliases.items()}
        return {name: found[name] for name in order or found}
    except KeyError as error:
        raise CheckpointCorruptError(f"{where}: its header names a tensor {error} that is not in it") from error


def _parse(text: bytes, where: str) -> tuple[list[tuple[str, str, list[int], int]], dict[str, str], list[str]]:
    """Header bytes -> (name, dtype, shape, bytes) in the order of the data, aliases, and the order to hand back."""
    try:
        header: dict[str, Any] = json.loads(text)
        metadata = header.pop("__metadata__", {})
        aliases: dict[str, str] = json.loads(metadata.get(_ALIASES, "{}"))
        order: list[str] = json.loads(metadata.get("rollstock.order", "[]"))
        entries = sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"]))
        rows = [(name, entry["dtype"], entry["shape"], *entry["data_offsets"]) for name, entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorruptError(f"{where}: its header cannot be read ({error})") from error
    return list(_contiguous(rows, where)), aliases, order


def _contiguous(
    rows: list[tuple[str, str, list[int], int, int]], where: str
) -> Iterator[tuple[str, str, list[int], int]]:
    offset = 0
    for name, dtype, shape, start, end in rows:
        if start != offset or end < start:
            raise CheckpointCorruptError(f"{where}: tensor {name!r} does not begin where the one before it ends")
        offset = end
        yield name, dtype, shape, end - start


def _exactly(source: Reader, num_bytes: int, where: str) -> bytes:
    buffer = bytearray(num_bytes)
    fill(source, memoryview(buffer), where)
    return bytes(buffer)


def fill(source: Reader, buffer: memoryview, where: str) -> None:
    """Fill all of `buffer` from `source`, or raise `CheckpointCorruptError` naming `where`."""
    while buffer:
        count = source.readinto(buffer[:CHUNK_BYTES])
        if not count:
            raise CheckpointCorruptError(f"{where}: ends {len(buffer)} bytes too early")
        buffer = buffer[count:]
