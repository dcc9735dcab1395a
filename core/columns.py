"""Who provides a column that an algorithm declared: a role's forward pass, a second playing, or an extension.

For the builder of a run, which starts the roles that are needed and refuses a run in which nobody provides a column,
and for the prepare stage. A column of an extension needs no change here: `Extension.provides` names it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from rollstock.errors import ConfigError, suggest
from rollstock.interfaces.model import HEAD_OUTPUTS, Head

ALWAYS: frozenset[str] = frozenset(
    {"scores", "scored", "groups", "mask", "action_mask", "rollout_logprobs", "versions", "response", "lengths"}
)

PLAYED: frozenset[str] = frozenset({"greedy_scores", "greedy_scored"})
"""Columns `[B]` for which the prepare stage plays each task of the batch once more, greedily (`rollstock.greedy`).
Whoever declares one of them finds both, as `scored` stands beside `scores`."""


@dataclass(frozen=True)
class Source:
    """A role, and what its model's forward pass calls the column."""

    role: str
    output: str


SOURCES: dict[str, Source] = {
    "old_logprobs": Source("actor", "logprobs"),
    "old_entropy": Source("actor", "entropy"),
    "ref_logprobs": Source("reference", "logprobs"),
    "values": Source("critic", "values"),
}


def sources(head: Head) -> dict[str, Source]:
    """Who provides each column where the actor's model has this head: one with a value head is its own critic."""
    found = {
        name: source
        for name, source in SOURCES.items()
        if source.role != "actor" or source.output in HEAD_OUTPUTS[head]
    }
    if "values" in HEAD_OUTPUTS[head]:
        found["values"] = Source("actor", "values")
    return found


def roles_needed(
    plugin: str, needs: Set[str], provided: Set[str], *, head: Head = "lm", kind: str = "algorithm"
) -> list[str]:
    """The roles beyond actor and rollout that have to run for the plugin of this name and kind, sorted.

    provided: the columns that extensions bring; head: of the actor's model. Raises ConfigError for a column that nobody
    provides.
    """
    roles, known = set(), sources(head)
    for column in sorted(needs - ALWAYS - PLAYED - provided):
        if column not in known:
            raise ConfigError(
                f"{kind} {plugin!r} needs the column {column!r}, which no role and no extension of this config "
                f"provides. {suggest(column, [*known, *PLAYED, *ALWAYS, *provided])} An extension that does so "
                "names it in `provides`"
            )
        roles.add(known[column].role)
    return sorted(roles - {"actor", "rollout"})


def to_compute(
    needs: Set[str], provided: Set[str], present: Sequence[str], *, head: Head = "lm"
) -> dict[str, list[tuple[str, str]]]:
    """For each role the (output, column) pairs that the prepare stage has to ask it for; `head`: of the actor's
    model."""
    work: dict[str, list[tuple[str, str]]] = {}
    known = sources(head)
    for column in sorted(needs - ALWAYS - PLAYED - provided - set(present)):
        source = known[column]
        work.setdefault(source.role, []).append((source.output, column))
    return work


def needs_greedy(needs: Set[str], provided: Set[str], present: Sequence[str]) -> bool:
    """Whether the prepare stage has to play the batch's tasks greedily."""
    return bool((needs & PLAYED) - provided - set(present))
