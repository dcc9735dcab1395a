"""Workers that join and leave between the steps of a run, as its scheduler says.

For the run. How many are wanted is the scheduler's to decide, starting and ending them the executor's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rollstock.answers import num_workers
from rollstock.interfaces.executor import Executor, WorkerSpec
from rollstock.interfaces.scheduler import Scheduler
from rollstock.manager import PluginManager
from rollstock.metrics import Metric

if TYPE_CHECKING:
    from rollstock.run import Run
    from rollstock.schema import RunConfig

logger = logging.getLogger(__name__)


def examine_scheduler(config: RunConfig, manager: PluginManager) -> Iterator[str]:
    """What a scheduler that resizes roles could not do in this run, as a sentence."""
    scheduler, executor = manager.load_as(Scheduler, config.scheduler), manager.load_as(Executor, config.executor)
    if scheduler.resizes and not executor.resizes:
        yield (
            f"scheduler: {config.scheduler['name']!r} changes the number of workers during the run, which the executor "
            f"{config.executor['name']!r} cannot: choose another executor, or another scheduler"
        )


def resizable_roles(executor: Executor[Any], specs: Sequence[WorkerSpec]) -> list[str]:
    """The roles of a run whose number of workers its executor can change."""
    hosts = {spec.colocate_with for spec in specs}
    return [spec.role for spec in specs if executor.resizes and spec.may_resize and spec.role not in hosts]


def adjust(run: Run) -> None:
    """Ask the scheduler, after a step, how many workers each role shall have, and have them started or ended."""
    if not run.scheduler.resizes or run.is_last:
        return
    for role, group in run.roles.items():
        load = group.load() if group.can_resize else None
        if load is None:
            continue
        wanted = num_workers(run.scheduler, load)
        found = group.size
        if wanted is not None and wanted != group.size:
            found = group.resize(wanted)
            logger.info(
                "%s has %d workers now, and had %d: %d tasks waited, and workers were busy for %.0f%% of the time%s",
                *(role, found, load.num_workers, load.queue_length, 100 * load.utilisation),
                "" if found == wanted else f"; {wanted} were wanted",
            )
        run.record_event(
            {
                f"scheduler/{role}_workers": Metric(float(found), 1.0, "last"),
                f"scheduler/{role}_utilisation": Metric(load.utilisation, 1.0, "last"),
                f"scheduler/{role}_queue": Metric(float(load.queue_length), 1.0, "last"),
            }
        )
