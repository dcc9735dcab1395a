"""One step of an algorithm on a made-up batch, as the loop would take it: prepare, advantages, and the loss on slices.

For the algorithm kit. The model is left out: log-probs are leaves of their own, so that the gradient of the loss is
known token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rollstock.batch import Batch
from rollstock.columns import ALWAYS, PLAYED, SOURCES
from rollstock.interfaces.algorithm import Algorithm
from rollstock.metrics import Metrics, merge_metrics
from rollstock.micro import Loss, MicroBatch, Totals
from rollstock.testing.batches import columns_of, greedy_columns_of
from rollstock.testing.kit import expect, fail

RESPONSE_LIMIT = 16

Columns = Mapping[str, Callable[[Batch], Tensor]]
"""Made-up values of an algorithm's own columns: token columns flat `[N, ...]`, or sequence columns `[B, ...]`."""


class RecordingBatch(Batch):
    """A batch that remembers which of its columns were read."""

    read: set[str]

    @classmethod
    def of(cls, batch: Batch) -> RecordingBatch:
        """Watch a batch, which is left as it is."""
        made = cls.__new__(cls)
        made.__dict__.update(vars(batch))
        made.__dict__.update(read=set(), _tokens=dict(batch._tokens), _sequences=dict(batch._sequences))
        return made

    def __getitem__(self, name: str) -> Tensor:
        self.__dict__["read"].add(name)
        return super().__getitem__(name)

    def flat(self, name: str) -> Tensor:
        """See `Batch.flat`."""
        self.__dict__["read"].add(name)
        return super().flat(name)

    def select(self, indices: Sequence[int] | Tensor) -> Batch:
        """See `Batch.select`; what is read of the part counts as well."""
        part = RecordingBatch.of(super().select(indices))
        part.__dict__["read"] = self.__dict__["read"]
        return part


@dataclass
class Gradients:
    """What the losses of all slices came to: their sum, its gradient by each output of the model [N], and merged
    metrics."""

    loss: float
    by: dict[str, Tensor]
    metrics: Metrics = field(default_factory=dict)

    @property
    def main(self) -> Tensor:
        """The gradient by the log-prob of each token, [N]; of a reward model by what it says after each token."""
        return self.by["logprobs" if "logprobs" in self.by else "token_scores"]


def own_columns(algorithm: Algorithm[Any], columns: Columns) -> dict[str, Callable[[Batch], Tensor]]:
    """The columns that no role provides, with what makes them up. ConformanceError if one has nothing."""
    own = set(algorithm.needed_columns()) - ALWAYS - PLAYED - SOURCES.keys()
    missing = sorted(own - columns.keys())
    if missing:
        fail(
            f"it needs the column {missing[0]!r}, which no role of a run provides",
            mend=f"is the name right? Roles provide {', '.join(sorted([*SOURCES, *PLAYED]))}; if an extension provides "
            f"{missing[0]!r}, pass "
            f"the kit made-up values: columns={{{missing[0]!r}: lambda batch: ...}}",
        )
    return {name: columns[name] for name in own}


def prepare(
    algorithm: Algorithm[Any], batch: Batch, columns: Columns, *, seed: int = 0, values: float | None = None
) -> None:
    """Put in what the prepare stage would, for a step of one update: what is needed, old log-probs only for an early
    reader.

    values: what a critic says of every token, in place of made-up numbers.
    """
    needed = set(algorithm.needed_columns())
    if "old_logprobs" not in algorithm.early_columns():
        needed.discard("old_logprobs")
    made = columns_of(batch, seed=seed)
    if values is not None:
        made["values"] = torch.where(batch.flat("action_mask"), values, 0.0)
    for name in sorted(needed & made.keys()):
        batch.set_flat(name, made[name])
    if needed & PLAYED:
        for name, value in greedy_columns_of(batch, seed=seed).items():
            batch.set_sequence(name, value)
    for name, make in own_columns(algorithm, columns).items():
        set_column(batch, name, make(batch))


def set_column(batch: Batch, name: str, value: Tensor) -> None:
    """Set a column of tokens `[N, ...]` or of sequences `[B, ...]`, whichever its length says."""
    if len(value) == batch.num_tokens and len(value) != len(batch):
        batch.set_flat(name, value)
    else:
        batch.set_sequence(name, value)


def give_advantages(algorithm: Algorithm[Any], batch: Batch) -> None:
    """Ask for advantages as the advantages stage does, and put them in; ConformanceError for what it would refuse."""
    found = algorithm.advantages(batch)
    given: Mapping[str, Any] = found if isinstance(found, Mapping) else {"advantages": found}
    shape = (len(batch), batch.max_length)
    mend = "return a [B, T] tensor, or a mapping of columns with `advantages` among them"
    expect("advantages" in given, f"`advantages` returned columns {sorted(given)} without `advantages`", mend=mend)
    for name, value in given.items():
        expect(
            isinstance(value, Tensor),
            f"`advantages` returned {type(value).__name__} as {name!r}, not a tensor",
            mend=mend,
        )
    found_shape = tuple(given["advantages"].shape)
    expect(found_shape == shape, f"the advantages have shape {found_shape}, the batch is {shape}", mend=mend)
    for name, value in given.items():
        batch[name] = value


def step(
    algorithm: Algorithm[Any], batch: Batch, columns: Columns, *, seed: int = 0, values: float | None = None
) -> Batch:
    """Prepare a batch and give it advantages; returns it."""
    prepare(algorithm, batch, columns, seed=seed, values=values)
    give_advantages(algorithm, batch)
    return batch


def drifted(batch: Batch, *, seed: int = 1, scale: float = 0.1) -> Tensor:
    """Log-probs [N] of a policy that has moved a little from the one that sampled."""
    noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(seed))
    return (batch.flat("rollout_logprobs") + scale * noise).clamp(max=-1e-4)


def gradients(
    loss: Callable[[MicroBatch], Loss],
    batch: Batch,
    outputs: Mapping[str, Tensor],
    *,
    slices: Sequence[Sequence[int]] | None = None,
    totals: Totals | None = None,
) -> Gradients:
    """Sum a loss over slices of a batch (all of it at once by default) and differentiate by `outputs`, each flat
    `[N]`."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in outputs.items()}
    totals = totals or Totals.of(batch, response_limit=RESPONSE_LIMIT)
    tokens = torch.arange(batch.num_tokens).split(batch.lengths.tolist())
    value, measured = 0.0, []
    for indices in slices if slices is not None else [range(len(batch))]:
        part = batch.select(list(indices))
        rows = torch.cat([tokens[i] for i in indices]) if len(indices) else torch.zeros(0, dtype=torch.int64)
        found = loss(MicroBatch(part, totals, {name: part.pad(leaf[rows]) for name, leaf in leaves.items()}))
        _check_loss(found)
        if found.value.requires_grad:
            found.value.backward()
        value += float(found.value.detach())
        measured.append(found.metrics)
    by = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return Gradients(value, by, merge_metrics(measured))


def _check_loss(found: object) -> None:
    expect(
        isinstance(found, Loss) and isinstance(found.value, Tensor) and found.value.dim() == 0,
        f"the loss is {_describe(found)}, not a `Loss` with a scalar value",
        mend="return `micro.loss(losses)` for losses [b, T]",
    )


def _describe(found: object) -> str:
    if isinstance(found, Loss):
        return f"a Loss of shape {tuple(getattr(found.value, 'shape', ()))}"
    return type(found).__name__


def model_outputs(algorithm: Algorithm[Any], batch: Batch, logprobs: Tensor, *, seed: int = 2) -> dict[str, Tensor]:
    """What the model in training says: the outputs that the algorithm asked for, flat `[N]`. A reward model says the
    numbers of `logprobs` as scores."""
    wanted: Set[str] = algorithm.training_outputs()
    outputs = {"token_scores" if algorithm.actor_head() == "score" else "logprobs": logprobs}
    generator = torch.Generator().manual_seed(seed)
    if "entropy" in wanted:
        outputs["entropy"] = torch.rand(batch.num_tokens, generator=generator) + 0.1
    if "values" in wanted:
        outputs["values"] = torch.randn(batch.num_tokens, generator=generator)
    return outputs
