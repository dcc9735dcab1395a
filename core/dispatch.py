"""How a call of a role reaches its workers: marked on the method, split over the workers, gathered from them.

For authors of roles, who mark methods with `@register`, and of executors, which use `split_call` and `gather`.
An executor decides where workers live; what is split and how is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import torch

from rollstock.batch import Batch
from rollstock.errors import RunError
from rollstock.interfaces.rollout import GenerationRequest, GenerationResult
from rollstock.metrics import Metric, merge_metrics
from rollstock.partition import balanced_partitions

Dispatch: TypeAlias = Literal["broadcast", "scatter", "rank_zero"]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Registration:
    """What `@register` says of a worker's method."""

    dispatch: Dispatch
    sync: bool


def register(*, dispatch: Dispatch = "broadcast", sync: bool = True) -> Callable[[F], F]:
    """Mark a worker's method as one that the controller may call.

    broadcast: every worker gets the same arguments; the result is rank 0's, metrics of all ranks are merged.
    scatter: the first argument (a Batch or a list of generation requests) is split over the workers, balanced by
    tokens, the rest is the same for all; results are put together in the order of the whole. A Batch says by its
    `whole_groups` that no group may be cut. rank_zero: only rank 0 is called.
    sync: False for a method that callers as a rule `submit` and do not wait for.
    """

    def mark(method: F) -> F:
        method.__rollstock__ = Registration(dispatch, sync)  # type: ignore[attr-defined]  # the marker is the point
        return method

    return mark


def registration(worker: type, method: str) -> Registration:
    """The marker of a worker's method. Raises RunError naming the methods that have one."""
    found = getattr(getattr(worker, method, None), "__rollstock__", None)
    if isinstance(found, Registration):
        return found
    marked = sorted(name for name in dir(worker) if hasattr(getattr(worker, name, None), "__rollstock__"))
    raise RunError(f"{worker.__name__} has no registered method {method!r}; it has: {', '.join(marked)}")


@dataclass(frozen=True)
class Shares:
    """A call cut up: for each rank that takes part its positional arguments, and the indices of the whole that it
    got."""

    arguments: list[tuple[Any, ...]]
    indices: list[list[int]] | None


def split_call(marker: Registration, num_workers: int, args: tuple[Any, ...]) -> Shares:
    """Cut a call for `num_workers` workers. A rank may get nothing to do (an empty slice), never no call at all."""
    if marker.dispatch == "rank_zero":
        return Shares([args], None)
    if marker.dispatch == "broadcast" or num_workers == 1:
        return Shares([args] * num_workers, None)
    whole, *rest = args
    if isinstance(whole, Batch):
        parts = _balanced(whole, num_workers)
        return Shares([(whole.select(part), *rest) for part in parts], parts)
    if isinstance(whole, Sequence) and all(isinstance(item, GenerationRequest) for item in whole):
        parts = _by_prompt(whole, num_workers)
        return Shares([([whole[i] for i in part], *rest) for part in parts], parts)
    raise RunError(f"a scattered call takes a Batch or generation requests first, not {type(whole).__name__}")


def _balanced(batch: Batch, num_workers: int) -> list[list[int]]:
    lengths = batch.total_lengths()
    units = batch.members() if batch.whole_groups else [[i] for i in range(len(batch))]
    parts = balanced_partitions([sum(lengths[i] for i in unit) for unit in units], num_workers)
    return [sorted(i for unit in part for i in units[unit]) for part in parts]


def _by_prompt(requests: Sequence[GenerationRequest], num_workers: int) -> list[list[int]]:
    """Keep requests of one prompt together, so that its prefill is still shared; balance prompts by their tokens."""
    members: dict[tuple[int, ...], list[int]] = {}
    for i, request in enumerate(requests):
        members.setdefault(request.prompt, []).append(i)
    groups = list(members.values())
    costs = [len(requests[group[0]].prompt) + len(group) for group in groups]
    return [sorted(i for g in part for i in groups[g]) for part in balanced_partitions(costs, num_workers)]


def gather(results: Sequence[Any], shares: Shares) -> Any:
    """Put together what the ranks returned: metrics are merged, columns and completions take their places in the whole.

    Columns come as lists of one tensor a trajectory, and are gathered as one flat tensor.
    """
    first = results[0]
    if isinstance(first, dict) and first and all(_is_column(value) for value in first.values()):
        indices = shares.indices or [list(range(len(next(iter(first.values())))))]
        return {name: torch.cat(_placed([result[name] for result in results], indices)) for name in first}
    if len(results) == 1:
        return first
    if isinstance(first, dict) and first and all(isinstance(value, Metric) for value in first.values()):
        return merge_metrics(results)
    if shares.indices is None:
        return first
    if isinstance(first, GenerationResult):
        placed = _placed([result.completions for result in results], shares.indices)
        return GenerationResult(placed, merge_metrics(result.metrics for result in results))
    raise RunError(f"a scattered call cannot gather {type(first).__name__}")


def _is_column(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, torch.Tensor) for item in value)


def _placed(parts: Sequence[Sequence[Any]], indices: Sequence[Sequence[int]]) -> list[Any]:
    whole: list[Any] = [None] * sum(len(part) for part in parts)
    for part, places in zip(parts, indices, strict=True):
        for item, place in zip(part, places, strict=True):
            whole[place] = item
    return whole
