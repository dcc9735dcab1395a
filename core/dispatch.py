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

Dispatch: TypeAlias = Literal["broadcast", "all_gather", "scatter", "data_parallel", "rank_zero"]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Registration:
    """What `@register` says of a worker's method."""

    dispatch: Dispatch
    sync: bool
    roles: tuple[str, ...] = ()
    equal_counts: bool = False
    places: bool = False


def register(
    *,
    role: str | Sequence[str] = (),
    dispatch: Dispatch = "broadcast",
    sync: bool = True,
    equal_counts: bool = False,
    places: bool = False,
) -> Callable[[F], F]:
    """Mark a worker's method as one that the controller may call.

    role: the roles that have the method, where one worker class serves several; by default all. dispatch:

    - broadcast: every worker gets the same arguments; the result is rank 0's, metrics of all ranks are merged;
    - all_gather: the same, and the result is the list of what every rank returned;
    - scatter: the first argument is split over the workers, the rest is the same for all, and results are put together
      in the order of the whole. A Batch is balanced by tokens, and says by its `whole_groups` that no group may be cut;
      generation requests are balanced by prompts; any other list is cut into runs of equal length;
    - data_parallel: as scatter, over the workers' data-parallel groups: those with one `data_parallel_rank` (an
      attribute of the worker, by default its rank) get the same share, and the first of them answers;
    - rank_zero: only rank 0 is called.

    sync: False for a method that nobody waits for: `call` returns a future at once, as `submit` does. equal_counts: the
    parts also have equally many trajectories (or groups, or prompts), or differ by one. places: where the first
    argument was split, the method gets the keyword argument `places`, the place of each item in the whole.
    """
    roles = (role,) if isinstance(role, str) else tuple(role)

    def mark(method: F) -> F:
        marker = Registration(dispatch, sync, roles, equal_counts, places)
        method.__rollstock__ = marker  # type: ignore[attr-defined]  # the marker is the point
        return method

    return mark


def registration(worker: type, method: str, role: str = "") -> Registration:
    """The marker of a worker's method. Raises RunError naming the methods that have one, or, where `role` is given and
    has no such method, the roles that do."""
    found = getattr(getattr(worker, method, None), "__rollstock__", None)
    if not isinstance(found, Registration):
        marked = sorted(name for name in dir(worker) if hasattr(getattr(worker, name, None), "__rollstock__"))
        raise RunError(f"{worker.__name__} has no registered method {method!r}; it has: {', '.join(marked)}")
    if role and found.roles and role not in found.roles:
        raise RunError(f"the role {role!r} has no method {method!r}; these have: {', '.join(found.roles)}")
    return found


def data_parallel_rank(worker: Any, rank: int) -> int:
    """Which share of a `data_parallel` call a worker gets; for executors, which ask once a worker is built."""
    return int(getattr(worker, "data_parallel_rank", rank))


@dataclass(frozen=True)
class Shares:
    """A call cut up for the ranks 0 to `num_ranks` - 1.

    indices: for each of them the indices of the whole that it gets, None where all get the whole; answering: the ranks
    whose results count. Executors of other processes send the whole once, and cut it there by `take`.
    """

    marker: Registration
    args: tuple[Any, ...]
    num_ranks: int
    indices: list[list[int]] | None
    answering: list[int]

    @property
    def arguments(self) -> list[tuple[Any, ...]]:
        """The positional arguments of each rank."""
        return [take(self.args, self.part(rank)) for rank in range(self.num_ranks)]

    def part(self, rank: int) -> list[int] | None:
        """The indices of the whole that a rank gets; None for all."""
        return None if self.indices is None else self.indices[rank]

    def keywords(self, rank: int) -> dict[str, Any]:
        """The keyword arguments that a rank gets besides the caller's."""
        part = self.part(rank)
        return {"places": part} if self.marker.places and part is not None else {}


def take(args: tuple[Any, ...], part: Sequence[int] | None) -> tuple[Any, ...]:
    """The arguments with the first one cut down to `part`; None: as they are."""
    if part is None:
        return args
    whole, *rest = args
    mine = whole.select(part) if isinstance(whole, Batch) else [whole[i] for i in part]
    return (mine, *rest)


def split_call(marker: Registration, workers: int | Sequence[int], args: tuple[Any, ...]) -> Shares:
    """Cut a call for so many workers, or for workers of these data-parallel ranks.

    A rank may get nothing to do (an empty slice), never no call at all. Raises RunError for a first argument that
    cannot be split.
    """
    ranks = list(range(workers)) if isinstance(workers, int) else list(workers)
    if marker.dispatch == "rank_zero":
        return Shares(marker, args, 1, None, [0])
    everyone = list(range(len(ranks)))
    if marker.dispatch not in ("scatter", "data_parallel"):
        return Shares(marker, args, len(ranks), None, everyone)
    shares = everyone if marker.dispatch == "scatter" else ranks
    answering = [shares.index(share) for share in sorted(set(shares))]
    if len(answering) == 1:
        return Shares(marker, args, len(ranks), None, answering)
    if not args:
        raise RunError("a scattered call takes what is to be split as its first positional argument")
    parts = dict(zip(sorted(set(shares)), _partition(args[0], len(answering), marker), strict=True))
    return Shares(marker, args, len(ranks), [parts[share] for share in shares], answering)


def _partition(whole: Any, count: int, marker: Registration) -> list[list[int]]:
    if isinstance(whole, Batch):
        lengths = whole.total_lengths()
        units = whole.members() if whole.whole_groups else [[i] for i in range(len(whole))]
        return _balanced(units, [sum(lengths[i] for i in unit) for unit in units], count, marker)
    if not isinstance(whole, (list, tuple)):
        raise RunError(f"a scattered call takes a Batch or a list first, not {type(whole).__name__}")
    if whole and all(isinstance(item, GenerationRequest) for item in whole):
        # Requests of one prompt stay together, so that its prefill is still shared.
        members: dict[tuple[int, ...], list[int]] = {}
        for i, request in enumerate(whole):
            members.setdefault(request.prompt, []).append(i)
        return _balanced(
            list(members.values()), [len(prompt) + len(group) for prompt, group in members.items()], count, marker
        )
    return [list(range(k * len(whole) // count, (k + 1) * len(whole) // count)) for k in range(count)]


def _balanced(
    units: Sequence[Sequence[int]], costs: Sequence[int], count: int, marker: Registration
) -> list[list[int]]:
    parts = balanced_partitions(costs, count, equal_size=marker.equal_counts)
    return [sorted(i for unit in part for i in units[unit]) for part in parts]


def worth_sending(marker: Registration, result: Any, *, answers: bool, rank: int) -> Any:
    """What of a result `gather` will look at, for executors that have to carry it: None where it is nothing."""
    if marker.dispatch == "broadcast" and rank > 0:
        return result if _is_metrics(result) else None
    return result if answers else None


def gather(results: Sequence[Any], shares: Shares) -> Any:
    """Put together what the ranks returned: metrics are merged, columns and completions take their places in the whole.

    Columns come as lists of one tensor a trajectory, and are gathered as one flat tensor. A list has one item for each
    item of the share. A class of results of its own has a class method `gathered(parts, indices)`.
    """
    if shares.marker.dispatch == "all_gather":
        return list(results)
    counted = [results[rank] for rank in shares.answering]
    first = counted[0]
    if isinstance(first, dict) and first and all(_is_column(value) for value in first.values()):
        cut = shares.indices is not None
        indices = _counted(shares) if cut else [list(range(len(next(iter(first.values())))))]
        parts = counted if cut else counted[:1]
        return {name: torch.cat(_placed([part[name] for part in parts], indices)) for name in first}
    if len(counted) == 1:
        return first
    if _is_metrics(first):
        return merge_metrics(counted)
    if shares.indices is None or first is None:
        return first
    if isinstance(first, GenerationResult):
        placed = _placed([result.completions for result in counted], _counted(shares))
        return GenerationResult(placed, merge_metrics(result.metrics for result in counted))
    if isinstance(first, list):
        return _placed(counted, _counted(shares))
    if hasattr(type(first), "gathered"):
        return type(first).gathered(counted, _counted(shares))
    raise RunError(f"a scattered call cannot gather {type(first).__name__}, which has no class method `gathered`")


def _counted(shares: Shares) -> list[list[int]]:
    assert shares.indices is not None
    return [shares.indices[rank] for rank in shares.answering]


def _is_metrics(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(item, Metric) for item in value.values())


def _is_column(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, torch.Tensor) for item in value)


def _placed(parts: Sequence[Sequence[Any]], indices: Sequence[Sequence[int]]) -> list[Any]:
    whole: list[Any] = [None] * sum(len(part) for part in parts)
    for part, places in zip(parts, indices, strict=True):
        for item, place in zip(part, places, strict=True):
            whole[place] = item
    return whole
