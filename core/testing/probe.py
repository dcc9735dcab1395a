"""The worker that the executor kit starts: it answers with what it is and what it was given."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rollstock.batch import Batch
from rollstock.dispatch import register
from rollstock.interfaces.rollout import Completion, GenerationRequest, GenerationResult
from rollstock.metrics import Metric, Metrics


class ProbeError(Exception):
    """What a probe raises when it is told to."""


class Probe:
    """A worker without a model. `label` is what the spec's kwargs give; `refuse` makes building it fail."""

    def __init__(self, *, label: str, rank: int, world_size: int, refuse: bool = False) -> None:
        if refuse:
            raise ProbeError(f"{label} cannot be built")
        self.label, self.rank, self.world_size = label, rank, world_size
        self.data_parallel_rank = rank // 2
        self.count = 0

    @register()
    def who(self, greeting: str, *, ending: str = "") -> dict[str, Any]:
        """What this worker is, with the arguments."""
        return {"label": f"{greeting}{self.label}{ending}", "rank": self.rank, "world_size": self.world_size}

    @register()
    def process(self) -> int:
        """The id of the process that it lives in."""
        return os.getpid()

    @register()
    def add(self, number: int) -> Metrics:
        """Add to a count that the worker keeps; metrics of every worker."""
        self.count += number
        return {"count": Metric(self.count, 1.0, "sum"), "rank": Metric(self.rank, 1.0, "max")}

    @register(dispatch="all_gather")
    def ranks(self) -> int:
        """The rank of each."""
        return self.rank

    @register(dispatch="data_parallel", places=True)
    def tag(self, items: Sequence[str], places: Sequence[int] | None = None) -> list[str]:
        """Each item with its place in the whole, and who answers: the first of each two workers, which get the same."""
        return [f"{item}{place}.{self.rank}" for item, place in zip(items, places or [], strict=True)]

    @register(sync=False)
    def later(self) -> str:
        """What nobody waits for."""
        return "later"

    @register(dispatch="rank_zero")
    def first(self) -> int:
        """The rank of who answers."""
        return self.rank

    @register(dispatch="scatter")
    def generate(self, requests: Sequence[GenerationRequest], length: int) -> GenerationResult:
        """For each request its seed and this worker's rank, as tokens."""
        made = [
            Completion(
                tokens=[request.seed, self.rank][:length],
                logprobs=[0.0] * length,
                finish_reason="length",
                versions=[0] * length,
            )
            for request in requests
        ]
        return GenerationResult(made, {"requests": Metric(len(requests), 1.0, "sum")})

    @register(dispatch="scatter")
    def double(self, batch: Batch) -> dict[str, list[Tensor]]:
        """Twice the response tokens, a tensor for each trajectory."""
        lengths = batch.lengths.tolist()
        return {"doubled": list((2 * batch.flat("response")).split(lengths))}

    @register()
    def fail(self, rank: int) -> None:
        """Raise on one rank."""
        if self.rank == rank:
            raise ProbeError("told to fail")

    def secret(self) -> int:
        """A method without a marker."""
        return self.rank
