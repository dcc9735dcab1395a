"""How calls that went wrong are told in the log: the first of a kind whole, its repeats in one line a round.

For `rollstock.sandbox.pool`. One mistake in a reward goes wrong in the same way for every sample of every step; told
each time, it would bury everything else.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any, TypeAlias

from rollstock.sandbox.outcome import Outcome

logger = logging.getLogger(__name__)

NUM_NAMED = 3
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+)', re.MULTILINE)

Cause: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Label:
    """What to call a request: what it is asked of (`reward 'rule'`), for what (`task 't'`), and when (`step 3`)."""

    of: str
    name: str
    when: str


@dataclass
class _Kind:
    """A way to go wrong: where it was told whole, and what repeated it since the last line about it."""

    first: Label
    repeats: list[Label]


class FailureLog:
    """Tells the failures of one sandbox for as long as it lives. `owner` begins every message."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._kinds: dict[Cause, _Kind] = {}

    def add(self, label: Label, outcome: Outcome[Any]) -> None:
        """Tell a failure whole, at once, if it is the first of its kind; count it otherwise."""
        kind = self._kinds.setdefault(cause(label, outcome), _Kind(label, []))
        if kind.first is not label:
            kind.repeats.append(label)
            return
        subject = " of ".join(part for part in (label.of, label.name) if part)
        message = f"{self._owner}: {subject}{_in_brackets(label.when)} {_verb(outcome)}: {outcome.error}"
        details = "\n".join(text.rstrip() for text in (outcome.traceback, outcome.output) if text.strip())
        logger.warning("%s", message + (f"\n{details}" if details else ""))

    def tell_repeats(self) -> None:
        """A line for each kind that was repeated since the last call: how often, and the names of a few."""
        for found, kind in self._kinds.items():
            if kind.repeats:
                logger.warning("%s", self._repeated(found, kind))
                kind.repeats = []

    def _repeated(self, found: Cause, kind: _Kind) -> str:
        count, when = len(kind.repeats), kind.repeats[0].when
        names = list(dict.fromkeys(label.name for label in kind.repeats))
        listed = ", ".join(names[:NUM_NAMED]) + (f" and {more} more" if (more := len(names) - NUM_NAMED) > 0 else "")
        subject, verb, reason = found[:3]
        times = "once more" if count == 1 else f"{count} more times"
        first = f"{kind.first.name}{_in_brackets(kind.first.when)}"
        return (
            f"{self._owner}: {f'{subject} ' if subject else ''}{verb} {times}{_in_brackets(when)}, "
            f"with {reason} as told of {first}: {listed}"
        )


def cause(label: Label, outcome: Outcome[Any]) -> Cause:
    """What makes two failures one kind: the same call raised the same type of exception in the same lines of code.

    The exception's text is left out where there is a traceback, since it often quotes the sample. A line counts once,
    so that a recursion is of one kind however deep it went.
    """
    if not outcome.traceback:
        return label.of, _verb(outcome), outcome.error
    frames = dict.fromkeys(f"{file}:{line}" for file, line in _FRAME.findall(outcome.traceback))
    return label.of, _verb(outcome), outcome.error.partition(":")[0], *frames


def _verb(outcome: Outcome[Any]) -> str:
    return "timed out" if outcome.status == "timed_out" else "raised"


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""
