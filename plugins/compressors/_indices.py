"""The largest numbers of a tensor, and where they stand, in as few bytes as that takes.

For compressors that send some of a tensor's numbers. Ascending indices are written in the code of Elias and Fano (P.
Elias, Efficient storage and retrieval by content and address of static files, JACM 21, 1974): their low bits as they
are, their high bits in unary. k of n indices take about 2 + log2(n / k) bits each, against 32 as int32 and at most two
thirds of a bit more than the least possible. Where many are sent, one bit for each of the n is less, and is taken.
Either size depends on n and k alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from rollstock import option

if TYPE_CHECKING:
    from torch import Tensor

_HISTOGRAM = 65_536
"""Tensors of more numbers than this are searched by a histogram on a CPU."""


@dataclass(kw_only=True)
class SparseOptions:
    """Options of what is sent of a tensor."""

    share: float = option(
        0.1, "share of a tensor's numbers that is sent, at least one of them", minimum=1e-8, maximum=1
    )
    count: int | None = option(
        None, "how many numbers of each tensor are sent, in place of a share", minimum=1, maximum=1_000_000_000_000
    )

    def num_sent(self, size: int) -> int:
        """How many numbers of a tensor of `size` >= 1 are sent."""
        return min(size, self.count or max(1, round(self.share * size)))


def largest(values: Tensor, count: int) -> Tensor:
    """[count] int64: the ascending indices of the numbers of largest magnitude in values [n], 1 <= count <= n."""
    magnitudes = values.abs()
    if values.device.type == "cpu" and values.dtype == torch.float32 and values.numel() > _HISTOGRAM:
        return _largest_by_histogram(magnitudes, count)
    return magnitudes.topk(count, sorted=False).indices.sort().values


def _largest_by_histogram(magnitudes: Tensor, count: int) -> Tensor:
    """The same several times as fast: floats of one sign are ordered as their bits are, so that a histogram of the
    upper 16 bits tells a magnitude which at least `count` reach, and hardly more."""
    bits = magnitudes.view(torch.int32)
    reached = torch.bincount(bits >> 16).flip(0).cumsum(0)
    bucket = reached.numel() - 1 - int(torch.searchsorted(reached, count))
    found = torch.nonzero(bits >= bucket << 16).flatten()
    surplus = found.numel() - count
    if not surplus:
        return found
    fewer_go = surplus < count
    chosen = magnitudes[found].topk(min(surplus, count), largest=not fewer_go, sorted=False).indices
    marks = _marks(chosen, found.numel())
    return found[~marks if fewer_go else marks]


def encode_indices(indices: Tensor, size: int) -> dict[str, Tensor]:
    """Bytes by name for ascending indices [k] int64 below `size`, k >= 1."""
    count = indices.numel()
    low_bits = _low_bits(size, count)
    unary = count + ((size - 1) >> low_bits) + 1
    if _num_bytes(unary) + _num_bytes(count * low_bits) >= _num_bytes(size):
        return {"bitmap": _pack(_marks(indices, size))}
    steps = (indices >> low_bits) + torch.arange(count, device=indices.device)
    places = torch.arange(low_bits, device=indices.device)
    low = (indices[:, None] >> places) & 1
    return {"high": _pack(_marks(steps, unary)), "low": _pack(low.reshape(-1).bool())}


def decode_indices(tensors: dict[str, Tensor], size: int, count: int) -> Tensor:
    """The `count` indices that `encode_indices` was given."""
    if "bitmap" in tensors:
        return torch.nonzero(_unpack(tensors["bitmap"])).flatten()
    low_bits = _low_bits(size, count)
    steps = torch.nonzero(_unpack(tensors["high"])).flatten()
    high = steps - torch.arange(count, device=steps.device)
    low = _unpack(tensors["low"])[: count * low_bits].reshape(count, low_bits)
    places = torch.arange(low_bits, device=steps.device)
    return (high << low_bits) + (low.long() << places).sum(-1)


def _low_bits(size: int, count: int) -> int:
    """The whole part of log2(size / count)."""
    return (size // count).bit_length() - 1


def _num_bytes(bits: int) -> int:
    return -(-bits // 8)


def _marks(places: Tensor, size: int) -> Tensor:
    """[size] bool: true at `places`."""
    marks = torch.zeros(size, dtype=torch.bool, device=places.device)
    marks[places] = True
    return marks


def _pack(bits: Tensor) -> Tensor:
    """[m] bool as [ceil(m / 8)] uint8, the first bit lowest."""
    columns = pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).reshape(-1, 8)
    packed = torch.zeros(columns.shape[0], dtype=torch.uint8, device=bits.device)
    for place in range(8):
        packed |= columns[:, place] << place
    return packed


def _unpack(packed: Tensor) -> Tensor:
    """[8 * m] bool of [m] uint8."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> places) & 1).reshape(-1).bool()
