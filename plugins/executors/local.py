"""Workers in the controller's own process, called directly: the executor of one machine, and of every debugger.

Several workers of one role take their turns one after the other. A role whose workers train together needs processes of
its own, and another executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from rollstock import Executor, NoOptions, RunError, WorkerGroup, WorkerSpec, hookimpl
from rollstock.dispatch import data_parallel_rank, gather, registration, split_call


class LocalGroup(WorkerGroup):
    """The workers of a role, as objects of this process."""

    def __init__(self, role: str, workers: list[Any]) -> None:
        self.role = role
        self.workers = workers

    @property
    def size(self) -> int:
        """How many workers there are."""
        return len(self.workers)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call every worker that takes part, in order of rank, and gather the results; a future of them where nobody
        waits."""
        if not registration(type(self.workers[0]), method, self.role).sync:
            return self.submit(method, *args, **kwargs)
        return self._call(method, args, kwargs)

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        marker = registration(type(self.workers[0]), method, self.role)
        known = tuple(value.result() if isinstance(value, Future) else value for value in args)
        ranks = [data_parallel_rank(worker, rank) for rank, worker in enumerate(self.workers)]
        shares = split_call(marker, ranks, known)
        results = []
        for rank, mine in enumerate(shares.arguments):
            try:
                results.append(getattr(self.workers[rank], method)(*mine, **kwargs, **shares.keywords(rank)))
            except Exception as error:
                error.add_note(f"in {method!r} of {self.role} worker {rank}")
                raise
        return gather(results, shares)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """The same; in one process the future is finished when it is returned."""
        future: Future[Any] = Future()
        try:
            future.set_result(self._call(method, args, kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Local(Executor[NoOptions]):
    """Builds each worker in this process."""

    def __init__(self, config: NoOptions | None = None) -> None:
        super().__init__(config)
        self._groups: list[LocalGroup] = []

    def validate(self, specs: Sequence[WorkerSpec]) -> list[str]:
        """Refuse a device other than the first, where everything in this process is."""
        return [
            f"roles.{spec.role}.devices: {list(spec.devices)} cannot be had: the executor 'local' keeps every worker "
            "in this process and on its first device, 0. Leave it empty; a variable such as CUDA_VISIBLE_DEVICES says "
            "which device is the first"
            for spec in specs
            if any(spec.devices)
        ]

    def start(self, spec: WorkerSpec) -> WorkerGroup:
        """Build the workers of a role, one after the other. Raises RunError for a count below 1."""
        if spec.count < 1:
            raise RunError(f"role {spec.role!r} needs at least one worker, not {spec.count}")
        workers = [spec.factory(**spec.kwargs, rank=rank, world_size=spec.count) for rank in range(spec.count)]
        group = LocalGroup(spec.role, workers)
        self._groups.append(group)
        return group

    def shutdown(self) -> None:
        """Let go of the workers."""
        self._groups.clear()

    @property
    def shares_memory(self) -> bool:
        """True: a generator may use the trainer's very tensors."""
        return True


@hookimpl
def rollstock_executor() -> type[Executor[Any]]:
    """Give `Local`."""
    return Local
