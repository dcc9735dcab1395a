"""The environment's own score as a reward.

The default: whoever hands out a task knows best what a good answer is.
"""

from __future__ import annotations

from typing import Any

from rollstock import Environment, NoOptions, Reward, Sample, hookimpl


class EnvironmentReward(Reward[NoOptions]):
    """Asks the environment. One that does not score abstains, and so does this."""

    def setup(self, environment: Environment[Any]) -> None:
        """Keep the environment of this process."""
        self._environment = environment

    def score(self, sample: Sample) -> float | None:
        """What `Environment.score` says."""
        return self._environment.score(sample)


@hookimpl
def rollstock_reward() -> type[Reward[Any]]:
    """The class of this plugin."""
    return EnvironmentReward
