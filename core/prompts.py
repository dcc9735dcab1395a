"""Prompts of tasks as token ids, and what becomes of those that are too long: refused, left out, or cut, and counted.

For whatever turns tasks into trajectories: episodes that are played, and responses that the data holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollstock.errors import UserError
from rollstock.interfaces.environment import Task
from rollstock.metrics import Metric, Metrics
from rollstock.tokens import encode_prompt


@dataclass
class PromptCounts:
    """How many prompts were left out, and how many were cut."""

    skipped: int = 0
    truncated: int = 0

    def metrics(self) -> Metrics:
        """Both as metrics of a step."""
        return {
            "prompt_length/num_skipped": Metric(self.skipped, 1.0, "sum"),
            "prompt_length/num_truncated": Metric(self.truncated, 1.0, "sum"),
        }


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Encodes prompts. `overlong` is what becomes of one over `limit` tokens: `error`, `skip` or `truncate_left`."""

    tokenizer: Any
    limit: int | None
    overlong: str

    def encode(self, task: Task, counts: PromptCounts) -> list[int] | None:
        """The task's prompt as ids, or None where the task is left out for its length.

        Raises UserError for a prompt without tokens, and for one that is too long where that is an error.
        """
        prompt = encode_prompt(self.tokenizer, task.prompt)
        if not prompt:
            raise UserError(f"the prompt of task {task.id!r} has no tokens; a response needs at least one before it")
        if self.limit is None or len(prompt) <= self.limit:
            return prompt
        if self.overlong == "truncate_left":
            counts.truncated += 1
            return prompt[-self.limit :]
        if self.overlong == "skip":
            counts.skipped += 1
            return None
        raise UserError(
            f"the prompt of task {task.id!r} has {len(prompt)} tokens, over sampling.max_prompt_tokens={self.limit}; "
            "raise the limit, shorten the prompts, or set sampling.overlong_prompt to skip or truncate_left (both are "
            "counted)"
        )
