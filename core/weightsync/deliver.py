"""The controller's part of a weight sync: it tells both ends what to do, and compares what they have afterwards."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollstock.errors import RunError
from rollstock.interfaces.executor import WorkerGroup
from rollstock.metrics import Metric, Metrics, merge_metrics
from rollstock.weightsync.cargo import Cargo

if TYPE_CHECKING:
    from rollstock.run import Run

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Delivered:
    """What generators were given last: a version, its weights, and the state of the router; empty without one."""

    version: int
    cargo: Future[Cargo]
    router: Mapping[str, Any]


def sync_weights(run: Run) -> None:
    """Bring the actor's weights to every generator, as the next version, and compare both sides.

    Records bytes, what was sent again, and the throughput. Weights that an executor carried and that arrived otherwise
    are sent again, `weight_sync.max_resends` times. Raises RunError if the two sides differ in the end.
    """
    rollout = run.roles["rollout"]
    run.version += 1
    run.delivered = None  # until the next update, the trainer has what belongs to the version
    parts: list[Metrics] = []
    cargo: Future[Cargo] | None = None
    began = time.monotonic()
    wrong: dict[int, str] = {}
    ours = ""
    for attempt in range(1 if _may_alias(run) else 1 + run.config.weight_sync.max_resends):
        if attempt:
            logger.warning("weights %d arrived otherwise at %s and are sent again", run.version, wrong)
        parts.append({"sync/num_resent": Metric(min(attempt, 1), 1.0, "sum")})
        if run.config.transport:
            parts.append(_by_transport(run))
        else:
            cargo = _cargo(run, rollout)
            parts.append(rollout.call("load_weights", cargo, run.version, _may_alias(run)))
        known = run.roles["actor"].submit("fingerprint")
        theirs, ours = rollout.call("fingerprint"), known.result()
        wrong = {rank: their for rank, their in enumerate(theirs) if their != ours}
        if not wrong:
            break
    if wrong:
        raise RunError(
            f"after weight sync {run.version} the generators' weights (by rank: {wrong}) are not the trainer's ({ours})"
        )
    router = _give_router(run, rollout)
    if run.pipeline.runs_ahead and run.executor.recovers:
        run.delivered = Delivered(run.version, cargo or _cargo(run), router)
    metrics = merge_metrics(parts)
    speed = metrics["sync/bytes"].value / max(time.monotonic() - began, 1e-9) / 1e9
    changed = Metric(float(ours != run.fingerprint), 1.0, "last")
    run.record({**metrics, "sync/changed": changed, "perf/sync_gb_per_second": Metric(speed)})
    run.fingerprint = ours


def give_weights(run: Run, rollout: WorkerGroup) -> None:
    """Hand the current version to generators that were started while the run was under way, through the executor: a
    transport may be in the middle of a sync.

    Where the trainer may be further on already, that is what the last sync brought, so that weights and version belong
    together whatever the trainer does meanwhile.
    """
    kept = run.delivered
    if kept is None or _needs_base(run, rollout):
        rollout.call("load_weights", _cargo(run, rollout), run.version, _may_alias(run))
        _give_router(run, rollout)
    if kept is not None:  # the value, since the machine that the future's workers were on may be gone
        rollout.call("load_weights", kept.cargo.result(), kept.version, False)
        rollout.call("load_router", kept.router)


def _may_alias(run: Run) -> bool:
    """Whether generators use the trainer's own tensors."""
    return run.executor.shares_memory and not run.pipeline.runs_ahead and not _sends_adapters(run)


def _sends_adapters(run: Run) -> bool:
    return run.config.weight_sync.content == "adapters"


def _cargo(run: Run, rollout: WorkerGroup | None = None) -> Future[Cargo]:
    """The trainer's weights; of adapters, with what they are added to if one of these generators has not got it."""
    base = rollout is not None and _needs_base(run, rollout)
    return run.roles["actor"].submit("weights", _sends_adapters(run), base)


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


def _give_router(run: Run, rollout: WorkerGroup) -> Mapping[str, Any]:
    """Returns the state that was given."""
    if not run.config.router:
        return {}
    state: Mapping[str, Any] = run.roles["actor"].call("router_state")
    rollout.call("load_router", state)
    return state
