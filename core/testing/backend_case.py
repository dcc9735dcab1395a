"""What the backend kit works with: backends set up on a tiny model, a small batch, and updates on it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rollstock.batch import Batch
from rollstock.interfaces.backend import Backend, BackendState
from rollstock.interfaces.device import Device
from rollstock.interfaces.model import ModelSpec
from rollstock.metrics import Metrics
from rollstock.micro import Loss, MicroBatch, Totals
from rollstock.testing.batches import make_batch
from rollstock.testing.subject import Subject

TEMPERATURE = 0.7


@dataclass(frozen=True)
class BackendCase:
    """The backend under test, with the model and the device that it is set up with."""

    subject: Subject[Backend[Any]]
    model: ModelSpec
    device: Device[Any]
    tolerance: float

    def make(self, *, trainable: bool = True, model: ModelSpec | None = None) -> Backend[Any]:
        """A backend, set up."""
        backend = self.subject.make()
        backend.setup(model or self.model, self.device, trainable=trainable, total_updates=100)
        return backend


def small_batch() -> Batch:
    """Two groups of four, over the tokens of the tiny model."""
    return make_batch(4, num_groups=2, vocab_size=13)


def whole(batch: Batch) -> list[list[int]]:
    """The cut of a batch into one micro-batch."""
    return [list(range(len(batch)))]


def forward(backend: Backend[Any], batch: Batch, cuts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Log-probs and entropies of a batch, flat `[N]`."""
    return backend.forward(batch, ["logprobs", "entropy"], temperature=TEMPERATURE, micro_batches=cuts)


def likelihood(micro: MicroBatch) -> Loss:
    """A loss whose descent makes every token likelier."""
    return micro.loss(-micro.logprobs)


def update(
    backend: Backend[Any],
    batch: Batch,
    cuts: Sequence[Sequence[int]],
    *,
    loss: Callable[[MicroBatch], Loss] = likelihood,
    outputs: Sequence[str] = ("logprobs",),
) -> Metrics:
    """One update on a batch, by default towards its own tokens."""
    totals = Totals.of(batch, response_limit=16)
    return backend.update(batch, loss, outputs=outputs, temperature=TEMPERATURE, micro_batches=cuts, totals=totals)


def frozen(state: BackendState) -> BackendState:
    """A copy of a state, whose tensors may be the live ones."""
    tensors = {part: {n: t.detach().cpu().clone() for n, t in found.items()} for part, found in state.tensors.items()}
    return BackendState(tensors, copy.deepcopy(state.values))


def same_tensors(saved: BackendState, now: BackendState) -> bool:
    """Whether two states have the same tensors, to the bit."""
    if saved.tensors.keys() != now.tensors.keys():
        return False
    return all(
        saved.tensors[part].keys() == now.tensors[part].keys()
        and all(torch.equal(tensor, now.tensors[part][name].cpu()) for name, tensor in saved.tensors[part].items())
        for part in saved.tensors
    )


def other_seed(model: ModelSpec) -> ModelSpec:
    """The same model with other random weights."""
    return replace(model, seed=model.seed + 1)
