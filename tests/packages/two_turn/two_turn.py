"""A two-turn environment for tests: guess a digit, hear `higher` or `lower`, and guess again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollstock import Environment, Message, Sample, Split, Task, hookimpl, option


@dataclass(kw_only=True)
class TwoTurnConfig:
    """Options of the `two_turn` environment."""

    second: float = option(0.5, "value of being right at the second guess", minimum=0, maximum=1)
    prompt: str = option("guess ", "what the policy is told")


class TwoTurn(Environment[TwoTurnConfig]):
    """Ten tasks, one for each digit; those that 5 divides are held out."""

    def num_tasks(self, split: Split) -> int:
        """Eight for training, two held out."""
        return len(self._digits(split))

    def task(self, split: Split, index: int) -> Task:
        """The task whose answer is the split's digit at `index`."""
        digit = self._digits(split)[index]
        return Task(id=f"guess-{digit}", prompt=self.config.prompt, answer=digit)

    def respond(self, task: Task, turns: Sequence[Message], state: dict[str, Any]) -> str | None:
        """A hint after a first wrong guess; the end after a right one, or a second."""
        guesses = state.setdefault("guesses", [])
        text = turns[-1]["content"].strip()
        guesses.append(int(text[0]) if text[:1].isdigit() else -1)
        if guesses[-1] == task.answer or len(guesses) == 2:
            return None
        return " higher " if guesses[-1] < task.answer else " lower "

    def score(self, sample: Sample) -> float:
        """1 for the first guess, `second` for the second, 0 for none."""
        guesses = sample.state.get("guesses", [])
        if sample.task.answer not in guesses:
            return 0.0
        return 1.0 if guesses[0] == sample.task.answer else self.config.second

    def _digits(self, split: Split) -> list[int]:
        return [digit for digit in range(10) if (digit % 5 == 0) == (split == "heldout")]


@hookimpl
def rollstock_environment() -> type[Environment[Any]]:
    """The class of this plugin."""
    return TwoTurn
