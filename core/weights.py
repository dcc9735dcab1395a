"""Fingerprints of weights: whether two sides hold the same numbers, to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

_LANES = 4099  # a prime, so that rows of the usual widths do not line up with it
_ROWS_ON_CPU = 7
"""Rows that are summed at a time: a quarter of a MiB, so that the second sum finds in the cache what the first has
read, and few enough for torch not to wake its threads, whose waiting costs more where processes share the cores."""
_ROWS = 4096
"""The same on other devices, where each sum costs a launch."""


def fingerprint(weights: Iterable[tuple[str, Tensor]]) -> str:
    """A 32-digit hexadecimal fingerprint of named tensors, whatever their order.

    It covers names, shapes, dtypes and every bit of every value. Sums of the bit patterns, taken as 64-bit words, run
    on the tensors' device, in `4099` interleaved lanes and over rows that count by their place, so a single changed or
    swapped value shows; it is not for adversaries.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(weights, key=lambda item: item[0]):
        digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        digest.update(_digest(tensor.detach()))
    return digest.hexdigest()[:32]


def _digest(tensor: Tensor) -> bytes:
    """The sums of one tensor, then what is too short for a row of words."""
    if tensor.numel() == 0:
        return b""
    memory = tensor.contiguous().reshape(-1).view(torch.uint8)
    whole = len(memory) // (8 * _LANES) * 8 * _LANES
    rest = memory[whole:].cpu().numpy().tobytes()
    if whole == 0:
        return rest
    words = memory[:whole]
    if words.data_ptr() % 8 or words.storage_offset() % 8:  # words begin at a multiple of their size
        words = words.clone()
    table = words.view(torch.int64).view(-1, _LANES)
    lanes = torch.zeros(_LANES, dtype=torch.int64, device=table.device)
    rows = torch.empty(len(table), dtype=torch.int64, device=table.device)
    step = _ROWS_ON_CPU if table.device.type == "cpu" else _ROWS
    for start in range(0, len(table), step):
        part = table[start : start + step]
        lanes += part.sum(dim=0)
        torch.sum(part, dim=1, out=rows[start : start + step])
    places = torch.arange(1, len(rows) + 1, device=rows.device, dtype=torch.int64)
    return torch.cat([lanes, (rows * places).sum()[None]]).cpu().numpy().tobytes() + rest
