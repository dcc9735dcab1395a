"""What became of a call in a sandbox, as its caller is told."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from rollstock.sandbox.protocol import Answer

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[ResultT]):
    """What became of one call.

    value: what it returned, None unless `status` is `ok` (and possibly then). error: why there is no value, in one
    line. output: what it printed, the beginning of it. seconds: how long it took.
    """

    status: Literal["ok", "raised", "timed_out"]
    value: ResultT | None = None
    error: str = ""
    traceback: str = ""
    output: str = ""
    seconds: float = 0.0


def read_answer(answer: Answer, output: str) -> Outcome[Any]:
    """A worker's answer as the caller sees it; a value that cannot be unpickled here is an error of the call."""
    if answer.error:
        return Outcome("raised", error=answer.error, traceback=answer.traceback, output=output, seconds=answer.seconds)
    try:
        value = pickle.loads(answer.value)
    except Exception as error:
        reason = f"the result cannot be read back: {type(error).__name__}: {error}"
        return Outcome("raised", error=reason, output=output, seconds=answer.seconds)
    return Outcome("ok", value=value, output=output, seconds=answer.seconds)
