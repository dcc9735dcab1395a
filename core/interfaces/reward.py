"""The reward kind: what scores trajectories. Several may be combined."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rollstock.plugin import C, Plugin

if TYPE_CHECKING:
    from rollstock.interfaces.device import Device
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


class BatchReward(Reward[C]):
    """Scores many samples at once: for what is slow one at a time, such as a model or a service.

    One process holds the batch rewards of a config, whatever `reward_limits.workers` says, so that a model is loaded
    once; the time limit is that of a batch. A batch that raises is scored again one sample at a time, so that the
    sample at fault is found and the others keep their scores.
    """

    device: Device[Any]
    """The run's device, active in the reward's process; set before `setup`."""

    @property
    def batch_size(self) -> int:
        """The most samples that `score_batch` is given: the option `batch_size` where there is one, else 16."""
        return int(getattr(self.config, "batch_size", 16))

    @abstractmethod
    def score_batch(self, samples: Sequence[Sample]) -> Sequence[float | None]:
        """The reward of each sample, in their order, or None to abstain. What a sample is worth does not depend on the
        others. May raise."""

    def score(self, sample: Sample) -> float | None:
        """A batch of one."""
        return self.score_batch([sample])[0]
