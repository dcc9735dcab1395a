"""The reward kind: what scores trajectories. Several may be combined."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from rollstock.plugin import C, Plugin

if TYPE_CHECKING:
    from rollstock.interfaces.environment import Environment, Sample


class Reward(Plugin[C]):
    """Scores one sample at a time, in a process of its own, under a time limit.

    The core sums the rewards of a config, each times its `weight` (an option of the core's that every entry of
    `rewards` may set); one that abstains counts nothing, and a sample of which all abstain has no score and is not
    trained on.
    """

    def setup(self, environment: Environment[Any]) -> None:
        """Called once in each reward process, with an environment of that process's own. Raises UserError."""

    @abstractmethod
    def score(self, sample: Sample) -> float | None:
        """The sample's reward, or None to abstain (which is not 0). May raise: the sample is named and counted."""
