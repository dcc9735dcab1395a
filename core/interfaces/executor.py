"""The executor kind: what starts workers, and calls them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rollstock.errors import RunError
from rollstock.interfaces.scheduler import WorkerLoad
from rollstock.plugin import C, Plugin


@dataclass(frozen=True, kw_only=True)
class Retry:
    """How often a call is made again that came to nothing, and after how many seconds: `first_s`, then twice as many
    each time, up to `longest_s`."""

    limit: int = 3
    first_s: float = 0.5
    longest_s: float = 60.0

    def delay(self, attempt: int) -> float:
        """Seconds before the so-and-so-manieth attempt to make a call again, from 1."""
        return min(self.longest_s, self.first_s * 2.0 ** min(attempt - 1, 60))


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """The workers of one role: what builds each (a picklable callable of `kwargs` plus rank and world_size), and what
    each gets.

    devices: indices of the accelerators that the workers use, one each, in order of rank; empty leaves it to the
    executor. cpus: cores for each worker. colocate_with: a role that was started before, in whose processes, rank by
    rank, these workers live. visibility_variable: `Device.visibility_variable` of the chip that each worker needs one
    of; None if it needs none. stateless: a worker that is built anew and told of by `rollstock_worker_started` is as
    good as the old one, and every call may be made again. together: the workers talk to each other, so that none can be
    replaced without the others. call_timeout_s: seconds after which a call that has not ended never will, and its
    worker is lost; 0: none. retry: for calls of stateless workers.
    """

    role: str
    factory: Callable[..., Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    count: int = 1
    devices: tuple[int, ...] = ()
    cpus: float = 1.0
    colocate_with: str | None = None
    visibility_variable: str | None = None
    stateless: bool = False
    together: bool = False
    call_timeout_s: float = 0.0
    retry: Retry = Retry()

    @property
    def may_resize(self) -> bool:
        """Whether workers of this role could join and leave during a run: they have no state, do not talk to each
        other, and have processes of their own on no device in particular."""
        return self.stateless and not self.together and not self.devices and self.colocate_with is None


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
        note. An executor that recovers makes the lost part of a call to stateless workers again, and raises
        WorkerLostError for a lost worker with a state: then, and until `Executor.recover`, for every call to it.
        """

    @abstractmethod
    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """The same, at once: a future of what `call` returns."""

    def member(self, rank: int) -> WorkerGroup:
        """The worker of one rank as a group of its own, for what it alone is to be told."""
        raise RunError(f"the workers of {self.role} cannot be called one by one")

    @property
    def can_resize(self) -> bool:
        """Whether `resize` is for this group."""
        return False

    def resize(self, count: int) -> int:
        """Start workers, or end the last ones, until there are `count`; returns how many there are then, which may be
        fewer for want of room. Between calls only. Each new one is told of by `rollstock_worker_started`."""
        raise RunError(f"the number of workers of {self.role} cannot be changed")

    def load(self) -> WorkerLoad | None:
        """How busy the workers were since this was last asked; None where nobody measures it."""
        return None


class Executor(Plugin[C]):
    """Starts groups of workers and ends them."""

    resizes: ClassVar[bool] = False
    """Whether the number of workers can change during a run (`WorkerGroup.resize`): of each role whose spec says
    `may_resize`, and in whose processes no other role lives."""

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
    def recovers(self) -> bool:
        """Whether lost workers can be started again: `recover` then does so, and no worker ever changes what another
        one, or the controller, was given."""
        return False

    def recover(self, roles: Collection[str] = ()) -> Mapping[str, Sequence[int]]:
        """Start every lost worker again, with those that cannot do without it, and all workers of `roles`; returns the
        ranks that were built anew, by role. Raises RunError if there is no room for them, and what a factory raised.

        Called by the core after a WorkerLostError. The core then loads the state of a trained role, and tells of each
        worker by `rollstock_worker_started`. While a run is under way, lost workers of stateless roles are the
        executor's own to replace, and to tell of, before the call that found them lost is made again.
        """
        raise RunError(f"executor {self.plugin_name!r} cannot start lost workers again")

    @property
    def shares_memory(self) -> bool:
        """Whether workers live in this process, so that one may use another's tensors without a copy."""
        return False
