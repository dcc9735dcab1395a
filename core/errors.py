"""What can go wrong, as exceptions that a command turns into an exit code and one clear message.

For everyone who raises or catches: a `UserError` (exit code 2) says that something the user wrote is wrong, a
`RunError` (exit code 1) that a sound run failed. Anything else that escapes is a bug. Printing is left to the command
line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar


class RollstockError(Exception):
    """The root of all errors that rollstock raises on purpose; `exit_code` is what the command line returns."""

    exit_code: ClassVar[int] = 1


class UserError(RollstockError):
    """The input is wrong: the message names the thing, what was expected, and what to do."""

    exit_code: ClassVar[int] = 2


class ConfigError(UserError):
    """A config file, an override or an option is wrong."""


class PluginError(UserError):
    """A plugin is missing, broken or breaks its contract; `plugin` is its name, `kind:name`, where one is known."""

    def __init__(self, message: str, plugin: str | None = None) -> None:
        super().__init__(message)
        self.plugin = plugin


class RunError(RollstockError):
    """A run whose input was right has failed."""


class WorkerLostError(RunError):
    """A worker died, or hung until it was ended; `role` and `rank` are its own. What it held is gone, but the run can
    go on once it was started again."""

    def __init__(self, message: str, role: str, rank: int) -> None:
        super().__init__(message)
        self.role, self.rank = role, rank

    def __reduce__(self) -> tuple[type[WorkerLostError], tuple[str, str, int]]:
        return type(self), (str(self), self.role, self.rank)


@contextmanager
def noted(note: str) -> Iterator[None]:
    """Put `note` (who was at work, on what) beneath whatever is raised inside."""
    try:
        yield
    except (Exception, SystemExit) as error:  # a plugin may call sys.exit
        error.add_note(note)
        raise


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The names that `name` may have been meant to be, nearest first; empty when none is near."""
    by_folded = {_fold(candidate): candidate for candidate in sorted(known, reverse=True)}
    return [by_folded[match] for match in difflib.get_close_matches(_fold(name), by_folded, n=3, cutoff=0.6)]


def suggest(name: str, known: Iterable[str]) -> str:
    """A sentence for the end of an error about an unknown name: the nearest match, then all that exist, nearest first.

    Empty `known` gives the sentence that there are none.
    """
    names = sorted(set(known))
    if not names:
        return "There are none."
    near = nearest(name, names)
    listed = near + [candidate for candidate in names if candidate not in near]
    question = f"Did you mean {near[0]!r}? " if near else ""
    return f"{question}Known: {', '.join(listed)}."


def _fold(name: str) -> str:
    """`name` as it is compared: case and the usual separators do not matter."""
    return name.casefold().replace("-", "_").replace(" ", "_")
