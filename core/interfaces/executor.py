"""The executor kind: what starts workers, and calls them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rollstock.plugin import C, Plugin


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """The workers of one role: what builds each (a picklable callable of `kwargs` plus rank and world_size), and what
    each gets.

    devices: indices of the accelerators that the workers use, one each, in order of rank; empty leaves it to the
    executor. cpus: cores for each worker. colocate_with: a role that was started before, in whose processes, rank by
    rank, these workers live. visibility_variable: `Device.visibility_variable` of the chip that each worker needs one
    of; None if it needs none.
    """

    role: str
    factory: Callable[..., Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    count: int = 1
    devices: tuple[int, ...] = ()
    cpus: float = 1.0
    colocate_with: str | None = None
    visibility_variable: str | None = None


class WorkerGroup:
    """The workers of one role, called as one. Methods of the worker class carry `@register`, which says how to split a
    call."""

    role: str

    @property
    @abstractmethod
    def size(self) -> int:
        """How many workers there are."""

    @abstractmethod
    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a registered method and gather what it returns, as its marker says; waits for the end, unless the marker
        says `sync=False`: then as `submit`.

        A positional argument may be a future of another group's `submit`: the workers get what it holds, which need not
        pass through the caller's process. Arguments are to be read: a worker that keeps or changes a tensor copies it.
        Raises RunError if the method is not registered, and whatever the worker raised, with the role and rank in a
        note.
        """

    @abstractmethod
    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """The same, at once: a future of what `call` returns."""


class Executor(Plugin[C]):
    """Starts groups of workers and ends them."""

    def validate(self, specs: Sequence[WorkerSpec]) -> Sequence[str]:
        """What these workers, all roles of a run, ask for and cannot have; each sentence refuses the run.

        Called before anything starts, and by `rollstock doctor`. Return nothing when all is well.
        """
        return ()

    def prepare(self, specs: Sequence[WorkerSpec]) -> None:
        """Hear of all roles of a run before the first is started, in the order in which they will be.

        An executor may begin with all of them at once; `start` is then called with these very specs, and waits.
        """
        return

    @abstractmethod
    def start(self, spec: WorkerSpec) -> WorkerGroup:
        """Start the workers of a role and wait until all are built. Raises what a factory raised.

        Each process sees only the devices that are its workers' (the first is 0). Where there are several workers,
        their processes have RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in their environment while the factory runs,
        as torch.distributed reads them; workers that share this process cannot train together and need none of it.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End every worker that was started."""

    @property
    def shares_memory(self) -> bool:
        """Whether workers live in this process, so that one may use another's tensors without a copy."""
        return False
