"""Seeds for every random stream of a run, each a function of what it is for.

Nothing keeps a generator between steps: a stream is named by labels (purpose, step, index, ...), so that a resumed run
draws what an uninterrupted one would have drawn, and a sample does not depend on its neighbours.
"""

from __future__ import annotations

import functools
import hashlib
import random


def derive_seed(seed: int, *labels: str | int) -> int:
    """A seed in [0, 2**63) for the stream that `labels` name, from a run's `seed` (SHA-256, so that labels do not
    collide)."""
    text = "\x1f".join([str(seed), *(f"{type(label).__name__}:{label}" for label in labels)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def permuted_index(seed: int, position: int, size: int) -> int:
    """The index at `position` (0-based, without end) of a data set of `size` rows, shuffled anew in each epoch.

    Every epoch visits each index once. The order is a function of the seed and the epoch alone.
    """
    epoch, place = divmod(position, size)
    return _epoch_order(seed, epoch, size)[place]


@functools.lru_cache(maxsize=1)  # an epoch is left once, and an order may be of millions
def _epoch_order(seed: int, epoch: int, size: int) -> list[int]:
    order = list(range(size))
    random.Random(derive_seed(seed, "epoch", epoch)).shuffle(order)
    return order
