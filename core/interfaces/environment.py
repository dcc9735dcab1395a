"""The environment kind: what hands out tasks, plays the other side, and scores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from rollstock.plugin import C, Plugin

Split: TypeAlias = Literal["train", "heldout"]
Message: TypeAlias = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One thing to do. It is plain data: it travels to reward processes and into the run's files.

    prompt: chat messages (`[{"role": "user", "content": ...}]`), rendered by the tokenizer's chat template; or a text,
    encoded as it is; or token ids. answer: what a score compares with; None where there is no single one. responses:
    those that the data itself holds, the best first: a demonstration, or the chosen and the rejected one of a pair.
    Offline algorithms train on them; others do not look at them.
    """

    id: str
    prompt: list[Message] | str | list[int]
    answer: Any = None
    responses: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Sample:
    """One finished trajectory as rewards see it: plain data without tensors.

    response: the decoded text of the policy's (last) turn; turns: all of them, where an episode has several, the
    environment's replies between; num_tokens: how many tokens the policy chose; state: what `respond` kept.
    """

    task: Task
    response: str
    turns: list[Message] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str = "stop"
    state: dict[str, Any] = field(default_factory=dict)


class Environment(Plugin[C]):
    """A source of tasks. `task` is a pure function of (config, split, index), so that a run can be repeated and
    resumed."""

    def setup(self, seed: int) -> None:
        """Read files, draw splits; called once in every process that needs the environment. Raises UserError."""

    @abstractmethod
    def num_tasks(self, split: Split) -> int | None:
        """How many tasks a split has; None if there is no end to them. The core shuffles and repeats finite ones."""

    @abstractmethod
    def task(self, split: Split, index: int) -> Task:
        """The task at `index` (0-based, below `num_tasks`). No task of one split appears in the other."""

    def respond(self, task: Task, turns: Sequence[Message], state: dict[str, Any]) -> str | None:
        """The other side's reply to the policy's latest turn, or None at the end of the episode (single turn: always).

        turns: the conversation after the prompt, alternating `assistant` and `user`; state: a dict of the episode's
        own, of JSON data, that the environment may change.
        """
        return None

    def score(self, sample: Sample) -> float | None:
        """How good a trajectory is, or None to abstain. Runs in a reward process, under a time limit."""
        return None

    def fingerprint(self) -> str:
        """What identifies the data in the run's manifest: a checksum, a version."""
        return ""
