"""Fingerprints of weights: whether two sides hold the same numbers, to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

_LANES = 4099  # a prime, so that rows of the usual widths do not line up with it


def fingerprint(weights: Iterable[tuple[str, Tensor]]) -> str:
    """A 32-digit hexadecimal fingerprint of named tensors, whatever their order.

    It covers names, shapes, dtypes and every bit of every value. Sums of the bit patterns run on the tensors' device,
    in `4099` interleaved lanes that weight a value by its place, so a single changed or swapped value shows; it is not
    for adversaries.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(weights, key=lambda item: item[0]):
        digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        digest.update(_digest(tensor.detach()))
    return digest.hexdigest()[:32]


def _digest(tensor: Tensor) -> bytes:
    if tensor.numel() == 0:
        return b""
    flat = tensor.contiguous().reshape(-1)
    bits = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    whole = len(bits) // _LANES * _LANES
    lanes = (
        bits[:whole].view(-1, _LANES).sum(dim=0, dtype=torch.int64)
        if whole
        else bits.new_zeros(_LANES, dtype=torch.int64)
    )
    rows = (
        bits[:whole].view(-1, _LANES).sum(dim=1, dtype=torch.int64) if whole else bits.new_zeros(0, dtype=torch.int64)
    )
    places = torch.arange(1, len(rows) + 1, device=bits.device, dtype=torch.int64)
    tail = bits[whole:].to(torch.int64)
    mixed = torch.cat([lanes, (rows * places).sum().reshape(1), tail])
    return mixed.cpu().numpy().tobytes()
