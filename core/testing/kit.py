"""The machinery of the conformance kits: checks run in order, and errors that say what to mend.

For the kits of `rollstock.testing`, one a kind. A check is a function whose docstring is the promise that it tests;
it calls `fail` or `expect`, or raises `NotApplicable`. What is checked is left to the kits.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from rollstock.errors import suggest

S = TypeVar("S")


class ConformanceError(AssertionError):
    """A plugin breaks a promise of its kind.

    found: what was seen; promise: what every plugin of the kind promises; mend: how its author puts it right; plugin
    and check: who broke what.
    """

    def __init__(self, found: str, *, mend: str, promise: str = "", plugin: str = "", check: str = "") -> None:
        super().__init__(found)
        self.found, self.mend, self.promise, self.plugin, self.check = found, mend, promise, plugin, check

    def __str__(self) -> str:
        head = f"{self.plugin} fails the check `{self.check}`: {self.found}" if self.check else self.found
        promise = f"\n  promised: {self.promise}" if self.promise else ""
        return f"{head}{promise}\n  to mend: {self.mend}"


class NotApplicable(Exception):  # noqa: N818  # it is no error: the check has nothing to test here
    """A check has nothing to test in this plugin or on this machine; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a kit did: the checks that passed, and those that were left out, each with the reason."""

    plugin: str
    passed: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)


def fail(found: str, *, mend: str) -> NoReturn:
    """End a check: the plugin breaks its promise."""
    raise ConformanceError(found, mend=mend)


def expect(condition: object, found: str, *, mend: str) -> None:
    """`fail` unless the condition holds."""
    if not condition:
        fail(found, mend=mend)


def run_checks(
    plugin: str, checks: Sequence[Callable[[S], None]], subject: S, *, skip: Mapping[str, str] | None = None
) -> Report:
    """Run checks in order; the first that fails raises ConformanceError.

    skip: names of checks that do not hold for a plugin on purpose, each with its reason. Raises ValueError for a name
    that is no check, and for one without a reason. Random generators are as before afterwards.
    """
    left_out = _reasons(skip or {}, [_name(check) for check in checks])
    passed: list[str] = []
    for check in checks:
        name = _name(check)
        if name in left_out:
            continue
        try:
            with _same_random_state():
                check(subject)
        except NotApplicable as reason:
            left_out[name] = str(reason)
        except ConformanceError as error:
            error.plugin, error.check, error.promise = plugin, name, error.promise or _promise(check)
            raise
        except Exception as error:
            raise ConformanceError(
                f"it raised {type(error).__name__}: {error}{_notes(error)}",
                mend="see the traceback above: the plugin must take what the check gave it",
                promise=_promise(check),
                plugin=plugin,
                check=name,
            ) from error
        else:
            passed.append(name)
    return Report(plugin=plugin, passed=tuple(passed), skipped=left_out)


def _reasons(skip: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    for name, reason in skip.items():
        if name not in names:
            raise ValueError(f"there is no check {name!r} to skip. {suggest(name, names)}")
        if not (isinstance(reason, str) and reason.strip()):
            raise ValueError(f"skip={{{name!r}: ...}} must say why the check does not hold for this plugin")
    return dict(skip)


def _name(check: Callable[..., None]) -> str:
    return check.__name__.removeprefix("check_")


def _promise(check: Callable[..., None]) -> str:
    return " ".join((inspect.getdoc(check) or "").split())


def _notes(error: Exception) -> str:
    notes = getattr(error, "__notes__", ())
    return f" ({'; '.join(notes)})" if notes else ""


@contextmanager
def _same_random_state() -> Iterator[None]:
    """Put the global generators back where they were, those of torch and numpy only if somebody imported them."""
    python = random.getstate()
    torch: Any = sys.modules.get("torch")
    numpy: Any = sys.modules.get("numpy")
    kept = torch.get_rng_state() if torch is not None else None
    drawn = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        if kept is not None:
            torch.set_rng_state(kept)
        if drawn is not None:
            numpy.random.set_state(drawn)
