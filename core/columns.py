"""Who provides a column that an algorithm declared: a role's forward pass, or an extension.

For the builder of a run, which starts the roles that are needed and refuses a run in which nobody provides a column,
and for the prepare stage. A column of an extension needs no change here: `Extension.provides` names it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from rollstock.errors import ConfigError, suggest

ALWAYS: frozenset[str] = frozenset(
    {"scores", "scored", "groups", "mask", "action_mask", "rollout_logprobs", "versions", "response", "lengths"}
)


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


def roles_needed(algorithm: str, needs: Set[str], provided: Set[str]) -> list[str]:
    """The roles beyond actor and rollout that have to run, sorted.

    provided: the columns that extensions bring. Raises ConfigError for a column that nobody provides.
    """
    roles = set()
    for column in sorted(needs - ALWAYS - provided):
        if column not in SOURCES:
            raise ConfigError(
                f"algorithm {algorithm!r} needs the column {column!r}, which no role and no extension of this config "
                f"provides. {suggest(column, [*SOURCES, *ALWAYS, *provided])} An extension that does so names it in "
                "`provides`"
            )
        roles.add(SOURCES[column].role)
    return sorted(roles - {"actor", "rollout"})


def to_compute(needs: Set[str], provided: Set[str], present: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
    """For each role the (output, column) pairs that the prepare stage has to ask it for."""
    work: dict[str, list[tuple[str, str]]] = {}
    for column in sorted(needs - ALWAYS - provided - set(present)):
        source = SOURCES[column]
        work.setdefault(source.role, []).append((source.output, column))
    return work
