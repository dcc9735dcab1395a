"""The controller's part of a weight sync: it tells both ends what to do, and compares what they have afterwards."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from rollstock.errors import RunError
from rollstock.interfaces.executor import WorkerGroup
from rollstock.metrics import Metric, Metrics, merge_metrics

if TYPE_CHECKING:
    from rollstock.run import Run

logger = logging.getLogger(__name__)


def sync_weights(run: Run) -> None:
    """Bring the actor's weights to every generator, as the next version, and compare both sides.

    Records bytes, what was sent again, and the throughput. Weights that an executor carried and that arrived otherwise
    are sent again, `weight_sync.max_resends` times. Raises RunError if the two sides differ in the end.
    """
    rollout = run.roles["rollout"]
    run.version += 1
    parts: list[Metrics] = []
    began = time.monotonic()
    wrong: dict[int, str] = {}
    ours = ""
    for attempt in range(1 if _may_alias(run) else 1 + run.config.weight_sync.max_resends):
        if attempt:
            logger.warning("weights %d arrived otherwise at %s and are sent again", run.version, wrong)
        parts.append({"sync/num_resent": Metric(min(attempt, 1), 1.0, "sum")})
        parts.append(_by_transport(run) if run.config.transport else _by_executor(run, rollout))
        known = run.roles["actor"].submit("fingerprint")
        theirs, ours = rollout.call("fingerprint"), known.result()
        wrong = {rank: their for rank, their in enumerate(theirs) if their != ours}
        if not wrong:
            break
    if wrong:
        raise RunError(
            f"after weight sync {run.version} the generators' weights (by rank: {wrong}) are not the trainer's ({ours})"
        )
    _give_router(run, rollout)
    metrics = merge_metrics(parts)
    speed = metrics["sync/bytes"].value / max(time.monotonic() - began, 1e-9) / 1e9
    changed = Metric(float(ours != run.fingerprint), 1.0, "last")
    run.record({**metrics, "sync/changed": changed, "perf/sync_gb_per_second": Metric(speed)})
    run.fingerprint = ours


def give_weights(run: Run, rollout: WorkerGroup) -> None:
    """Hand the current weights to generators that were started while the run was under way, through the executor: a
    transport may be in the middle of a sync."""
    _by_executor(run, rollout)
    _give_router(run, rollout)


def _may_alias(run: Run) -> bool:
    """Whether generators use the trainer's own tensors."""
    return run.executor.shares_memory and not run.pipeline.runs_ahead and not _sends_adapters(run)


def _sends_adapters(run: Run) -> bool:
    return run.config.weight_sync.content == "adapters"


def _by_executor(run: Run, rollout: WorkerGroup) -> Metrics:
    cargo = run.roles["actor"].submit("weights", _sends_adapters(run), _needs_base(run, rollout))
    found: Metrics = rollout.call("load_weights", cargo, run.version, _may_alias(run))
    return found


def _by_transport(run: Run) -> Metrics:
    actor, rollout = run.roles["actor"], run.roles["rollout"]
    inboxes = rollout.call("weights_inbox")
    offer = actor.call("offer_weights", run.version, inboxes, _sends_adapters(run), _needs_base(run, rollout))
    try:
        received: Metrics = rollout.call("take_weights", offer)
    except RunError:
        actor.call("finish_offer")  # what went wrong there is the cause
        raise
    return {**received, **actor.call("finish_offer")}


def _needs_base(run: Run, rollout: WorkerGroup) -> bool:
    """Whether some generator has not got what the adapters are added to."""
    if not _sends_adapters(run):
        return False
    ours = run.roles["actor"].call("base_fingerprint")
    return any(theirs != ours for theirs in rollout.call("base_fingerprint"))


def _give_router(run: Run, rollout: WorkerGroup) -> None:
    if run.config.router:
        rollout.call("load_router", run.roles["actor"].call("router_state"))
