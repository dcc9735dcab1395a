"""Responses that a row of a data file holds itself: a demonstration, or the chosen and the rejected one of a pair.

For the `jsonl` environment. A response is a text, or a list of messages of which the last is the assistant's; the ones
before it are the prompt, in full or not at all. Every error names the field, and the environment adds file and row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollstock import Message, option


@dataclass(kw_only=True)
class ResponseOptions:
    """Options that say where a row's own responses are."""

    response: str | None = option(
        None, "field of a demonstration, for offline training: a text, or messages of which the last is the assistant's"
    )
    chosen: str | None = option(None, "field of the better response of a pair, in the same forms; needs `rejected`")
    rejected: str | None = option(None, "field of the worse response of a pair")

    def __post_init__(self) -> None:
        if (self.chosen is None) != (self.rejected is None):
            raise ValueError("a pair has two responses: give the fields of both `chosen` and `rejected`")
        if self.response is not None and self.chosen is not None:
            raise ValueError("give `response`, for demonstrations, or `chosen` and `rejected`, for pairs; not both")

    def response_fields(self) -> list[str]:
        """The fields of the responses, the best first."""
        return [field for field in (self.response, self.chosen, self.rejected) if field is not None]


def split_conversation(
    messages: Sequence[Message], field: str, *, may_be_empty: bool = False
) -> tuple[list[Message], str]:
    """The messages before the assistant's last one, and what that says. Raises ValueError."""
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"the last message of {field!r} must be the assistant's, not the {messages[-1]['role']}'s")
    return list(messages[:-1]), checked_text(messages[-1]["content"], field, may_be_empty=may_be_empty)


def checked_text(value: Any, field: str, *, may_be_empty: bool = False) -> str:
    """A response that is a text; to say nothing may be what was rejected, but nothing to learn. Raises ValueError."""
    if not isinstance(value, str) or not (value or may_be_empty):
        raise ValueError(f"{field!r} must be a text that is not empty, or a list of messages, not {value!r}")
    return value


def checked_beginning(before: Sequence[Message], prompt: str | Sequence[Message], field: str) -> None:
    """What stands before a response must be its prompt, or nothing. Raises ValueError.

    A system message that only the prompt has comes from the environment's options, and is not missed.
    """
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if not before or list(before) == asked or (asked[0]["role"] == "system" and list(before) == asked[1:]):
        return
    raise ValueError(f"the messages of {field!r} before the last one are not the prompt: {list(before)!r}"[:400])
