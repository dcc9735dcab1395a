"""Bytes, error and time of each compressor for one gradient.

    python benchmarks/compression.py
    python benchmarks/compression.py --size 1000000 --dtype bfloat16 --json

The gradient is of normally distributed numbers, which is hard on those that send the largest only: real gradients have
heavier tails, and lose less. Printed for each compressor with its default options, and a few others: bytes on the wire,
as a count and relative to the gradient's; the error of the first round relative to the gradient's norm; the same of
the mean of all rounds of this one gradient, in which error feedback shows; and the median processor time of a round to
compress (feedback included) and to decompress. `all-gather` is how many processes it takes until the all-gather of
what is compressed sends more than the ring all-reduce of the plain gradient.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollstock import Compressor
from rollstock.manager import make_manager

METHODS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("none", {}),
    ("int8", {}),
    ("int8", {"stochastic": True, "feedback": False}),
    ("topk", {}),
    ("topk", {"share": 0.01}),
    ("hybrid", {}),
    ("hybrid", {"share": 0.1}),
    ("hybrid", {"share": 0.01}),
)


@dataclass(frozen=True)
class Row:
    """What is printed of one method."""

    method: str
    num_bytes: int
    ratio: float
    error: float
    mean_error: float
    compress_s: float
    decompress_s: float
    break_even: int


def main() -> None:
    options = _arguments()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(options.seed)
    gradient = torch.randn(options.size, generator=generator).to(getattr(torch, options.dtype))
    manager = make_manager()
    rows = []
    for name, settings in METHODS:
        compressor = manager.create_as(Compressor, {"name": name, **settings})
        label = ", ".join([name, *(f"{key} {value}".lower() for key, value in settings.items())])
        rows.append(_measure(label, compressor, gradient, options.rounds))
    if options.json:
        print(json.dumps([vars(row) for row in rows], indent=1))
    else:
        _table(rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"size": 10_000_000, "rounds": 5, "threads": 1, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _measure(label: str, compressor: Compressor[Any], gradient: Tensor, rounds: int) -> Row:
    total = torch.zeros_like(gradient, dtype=torch.float32)
    there, back, error = [], [], 0.0
    for number in range(rounds):
        start = time.process_time()
        payload = compressor.compress(gradient, key="gradient")
        middle = time.process_time()
        found = compressor.decompress(payload)
        there.append(middle - start)
        back.append(time.process_time() - middle)
        total += found
        error = error if number else _error(total, gradient)
    ratio = payload.num_bytes / payload.raw_bytes
    return Row(
        method=label,
        num_bytes=payload.num_bytes,
        ratio=ratio,
        error=error,
        mean_error=_error(total / rounds, gradient),
        compress_s=statistics.median(there),
        decompress_s=statistics.median(back),
        break_even=math.floor(2 / ratio) + 1,  # an all-gather sends (p - 1) * ratio, a ring 2 * (p - 1) / p
    )


def _error(found: Tensor, truth: Tensor) -> float:
    return float((found - truth.float()).norm() / truth.float().norm())


def _table(rows: list[Row]) -> None:
    print("| method | bytes | ratio | error | error of the mean | compress, ms | decompress, ms | all-gather |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.method} | {row.num_bytes:,} | {row.ratio:.2%} | {row.error:.2%} | {row.mean_error:.2%} | "
            f"{1e3 * row.compress_s:.0f} | {1e3 * row.decompress_s:.0f} | {row.break_even} |"
        )


if __name__ == "__main__":
    main()
