"""Gradients averaged over processes by way of a compressor, or summed part by part, and the bytes that this takes.

For backends whose processes add up gradients over torch.distributed. Each process compresses its own gradients,
everybody gets everybody's, or those of its part (compressed numbers cannot be added on the way), and decompresses and
adds them in the order of ranks, so that the results are equal to the bit. Which gradients, and when, is left to the
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
    """Bytes that one process has sent: `wire_bytes` with compression, `raw_bytes` what a ring sends without of the same
    gradients, which is 2 (p - 1) / p of their size over p processes, or half of that where each gets only its part."""

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


@torch.no_grad()
def scatter_gradients(
    compressor: Compressor[Any], gradient: Tensor, *, key: str, group: Group = None
) -> tuple[Tensor, Traffic]:
    """The sum over processes of a part of a flat gradient [p * n], as far as the compressor lets it through: the
    process of rank r in the group gets the numbers from r * n on, [n].

    The parts are known to the compressor as `<key>/<rank>`. With one process nothing crosses a network, and the
    gradient is returned as it is. Raises RunError if another process sends a part of another key, size or type.
    """
    size = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    if size == 1:
        return gradient, Traffic()
    rank = dist.get_rank(group)
    payloads = [compressor.compress(part, key=f"{key}/{to}") for to, part in enumerate(gradient.chunk(size))]
    sent = [
        ({f"{key}/{to}": payload}, _header({f"{key}/{to}": payload}), _body({f"{key}/{to}": payload}))
        for to, payload in enumerate(payloads)
    ]
    arrived, num_sent = _swap([(header, body) for _, header, body in sent], gradient.device, size, rank, group)
    _check_same(sent[rank][0], [header for header, _ in arrived])
    total = gradient.new_zeros(gradient.numel() // size, dtype=torch.promote_types(gradient.dtype, torch.float32))
    for header, body in arrived:
        total += compressor.decompress(_read(header, body)[f"{key}/{rank}"]).to(total.device)
    raw = gradient.numel() * gradient.element_size()
    return total.to(gradient.dtype), Traffic(raw_bytes=(size - 1) * raw // size, wire_bytes=num_sent)


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
        found.append((_unpacked(message[:first]), message[first:whole].to(device)))
    return found, longest


def _swap(
    messages: list[tuple[bytes, list[Tensor]]], device: torch.device, size: int, rank: int, group: Group
) -> tuple[list[tuple[Header, Tensor]], int]:
    """Send each process its message, a header and a body; returns those that came, in the order of ranks, and the bytes
    that were sent to others."""
    wire = torch.device("cpu") if dist.get_backend(group) == "gloo" else device
    own = [
        torch.cat([part.to(wire) for part in [torch.frombuffer(bytearray(header), dtype=torch.uint8), *body]])
        for header, body in messages
    ]
    lengths = torch.tensor([[len(header), len(own[to])] for to, (header, _) in enumerate(messages)], device=wire)
    all_lengths = [torch.empty_like(lengths) for _ in range(size)]
    dist.all_gather(all_lengths, lengths, group=group)
    told: list[tuple[int, int]] = [(int(theirs[rank, 0]), int(theirs[rank, 1])) for theirs in all_lengths]
    incoming = torch.empty(sum(whole for _, whole in told), dtype=torch.uint8, device=wire)
    dist.all_to_all_single(
        incoming, torch.cat(own), [whole for _, whole in told], [len(message) for message in own], group=group
    )
    found = []
    for (first, whole), message in zip(told, incoming.split([whole for _, whole in told]), strict=True):
        found.append((_unpacked(message[:first]), message[first:whole].to(device)))
    others = sum(len(message) for to, message in enumerate(own) if to != rank)
    return found, others + (size - 1) * _LENGTHS * size


def _unpacked(header: Tensor) -> Header:
    described: Header = json.loads(zlib.decompress(header.cpu().numpy().tobytes()))
    return described


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
