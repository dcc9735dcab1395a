"""Gradients averaged over processes by way of a compressor, and the bytes that this takes.

For backends whose processes add up gradients over torch.distributed. Each process compresses its own gradients,
everybody gets everybody's (an all-gather, since compressed numbers cannot be added on the way), and all decompress and
average in the order of ranks, so that the results are equal to the bit. Which gradients, and when, is left to the
backend.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from rollstock.errors import RunError, UserError
from rollstock.interfaces.compressor import Compressor, Payload
from rollstock.metrics import Metric, Metrics

Group: TypeAlias = "dist.ProcessGroup | None"

_LENGTHS = 16
"""Bytes of the two lengths that each process tells before its message."""


@dataclass
class Traffic:
    """Bytes that one process has sent: `wire_bytes` with compression, `raw_bytes` what a ring all-reduce of the same
    gradients sends without, which is 2 (p - 1) / p of their size over p processes."""

    raw_bytes: int = 0
    wire_bytes: int = 0

    @property
    def ratio(self) -> float:
        """Bytes sent relative to those without compression; 1 if there is nothing to send."""
        return self.wire_bytes / self.raw_bytes if self.raw_bytes else 1.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.raw_bytes + other.raw_bytes, self.wire_bytes + other.wire_bytes)

    def metrics(self) -> Metrics:
        """Both counts, summed over updates and processes, and their ratio."""
        return {
            "network/gradient_bytes": Metric(self.wire_bytes, reducer="sum"),
            "network/gradient_raw_bytes": Metric(self.raw_bytes, reducer="sum"),
            "network/gradient_ratio": Metric(self.ratio, self.raw_bytes),
        }


@torch.no_grad()
def average_gradients(compressor: Compressor[Any], gradients: Mapping[str, Tensor], *, group: Group = None) -> Traffic:
    """Replace gradients, in place, by their mean over the processes of a group, as far as the compressor lets it
    through.

    gradients: floating-point tensors of any shape by the names that the compressor is to know them by, the same on
    every process and in the same order; all travel in one message, so that memory for one from each process is needed.
    group: the default one if None; with one process, or without torch.distributed, nothing crosses a network, and the
    gradients stay as they are. Raises UserError for a tensor that is no gradient, RunError if another process sends
    gradients of other names, shapes or types.
    """
    for name, gradient in gradients.items():
        if not gradient.is_floating_point():
            raise UserError(f"{name!r} is {gradient.dtype}: a gradient is a floating-point tensor")
    size = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    if size == 1 or not gradients:
        return Traffic()
    payloads = {name: compressor.compress(gradient, key=name) for name, gradient in gradients.items()}
    device = next(iter(gradients.values())).device
    messages, longest = _exchange(_header(payloads), _body(payloads), device, size, group)
    _check_same(payloads, [header for header, _ in messages])
    arrived = [_read(header, body) for header, body in messages]
    for name, gradient in gradients.items():
        total = torch.zeros_like(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
        for theirs in arrived:
            total += compressor.decompress(theirs[name]).to(total.device)
        gradient.copy_(total / size)
    raw = sum(payload.raw_bytes for payload in payloads.values())
    return Traffic(raw_bytes=2 * (size - 1) * raw // size, wire_bytes=(size - 1) * (_LENGTHS + longest))


Header: TypeAlias = "dict[str, dict[str, Any]]"
"""By the gradient's name: its shape and type, the payload's values, and its tensors as [name, type, shape]."""


def _header(payloads: Mapping[str, Payload]) -> bytes:
    """How to read a body: JSON, which is repetitive, and so shrinks to little."""
    described = {
        name: {
            "shape": list(payload.shape),
            "dtype": _type_name(payload.dtype),
            "values": payload.values,
            "tensors": [[key, _type_name(t.dtype), list(t.shape)] for key, t in payload.tensors.items()],
        }
        for name, payload in payloads.items()
    }
    return zlib.compress(json.dumps(described, separators=(",", ":")).encode())


def _body(payloads: Mapping[str, Payload]) -> list[Tensor]:
    """The bytes of all tensors, one after another."""
    return [
        tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for payload in payloads.values()
        for tensor in payload.tensors.values()
    ]


def _exchange(
    header: bytes, body: list[Tensor], device: torch.device, size: int, group: Group
) -> tuple[list[tuple[Header, Tensor]], int]:
    """Every process's header and body, in the order of ranks, and the bytes that a message took. Messages are filled
    up to the longest, since not every way of gathering takes different lengths."""
    wire = torch.device("cpu") if dist.get_backend(group) == "gloo" else device
    head = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    own = torch.cat([part.to(wire) for part in [head, *body]])
    lengths = torch.tensor([len(header), own.numel()], device=wire)
    all_lengths = [torch.empty_like(lengths) for _ in range(size)]
    dist.all_gather(all_lengths, lengths, group=group)
    told: list[tuple[int, int]] = [(int(first), int(whole)) for first, whole in all_lengths]
    longest = max(whole for _, whole in told)
    messages = [torch.empty(longest, dtype=torch.uint8, device=wire) for _ in range(size)]
    dist.all_gather(messages, torch.nn.functional.pad(own, (0, longest - own.numel())), group=group)
    found = []
    for message, (first, whole) in zip(messages, told, strict=True):
        described: Header = json.loads(zlib.decompress(message[:first].cpu().numpy().tobytes()))
        found.append((described, message[first:whole].to(device)))
    return found, longest


def _check_same(payloads: Mapping[str, Payload], headers: list[Header]) -> None:
    """Every process compares all of them, so that all stop if two differ."""
    own = [(name, list(payload.shape), _type_name(payload.dtype)) for name, payload in payloads.items()]
    for rank, header in enumerate(headers):
        theirs = [(name, entry["shape"], entry["dtype"]) for name, entry in header.items()]
        if theirs != own:
            pairs = itertools.zip_longest(own, theirs, fillvalue="nothing")
            mine, other = next(pair for pair in pairs if pair[0] != pair[1])
            raise RunError(
                f"the process of rank {rank} averages {other}, and this one {mine}: the gradients of all processes "
                f"must have the same names, shapes and types, in the same order"
            )


def _read(header: Header, body: Tensor) -> dict[str, Payload]:
    """The payloads of a message."""
    payloads, place = {}, 0
    for name, entry in header.items():
        tensors = {}
        for key, dtype, shape in entry["tensors"]:
            kind = _type(dtype)
            length = torch.Size(shape).numel() * kind.itemsize
            # A copy begins where its numbers may begin: at a multiple of their size.
            tensors[key] = body[place : place + length].clone().view(kind).reshape(shape)
            place += length
        payloads[name] = Payload(tensors, tuple(entry["shape"]), _type(entry["dtype"]), values=entry["values"])
    return payloads


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _type(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found
