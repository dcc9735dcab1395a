"""What a reward process serves: the environment and rewards of a config, built by a plugin manager of its own.

Apart from the reward role, which imports torch, so that a reward process starts without it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollstock.interfaces.device import Device
from rollstock.interfaces.environment import Environment, Sample
from rollstock.interfaces.reward import BatchReward, Reward
from rollstock.manager import make_manager
from rollstock.sandbox import announce


def make_scorer(
    environment: Mapping[str, Any], rewards: Sequence[Mapping[str, Any]], blocked: Sequence[str], seed: int
) -> Callable[[tuple[int, Sample]], float | None]:
    """Build the rewards of a config in this process; the result scores (index of the reward, sample)."""
    made = _make_rewards(environment, rewards, blocked, seed)

    def score(call: tuple[int, Sample]) -> float | None:
        index, sample = call
        return checked_reward(made[index].score(sample), made[index].plugin_name)

    return score


def make_batch_scorer(
    environment: Mapping[str, Any],
    rewards: Sequence[Mapping[str, Any]],
    blocked: Sequence[str],
    seed: int,
    device: Mapping[str, Any],
) -> Callable[[tuple[int, Sequence[Sample]]], list[float | None]]:
    """Build batch rewards in this process, on the run's device; the result scores (index of the reward, samples)."""
    made = _make_rewards(environment, rewards, blocked, seed, device)

    def score(call: tuple[int, Sequence[Sample]]) -> list[float | None]:
        index, samples = call
        reward = made[index]
        assert isinstance(reward, BatchReward)
        values = list(reward.score_batch(samples))
        if len(values) != len(samples):
            raise ValueError(f"reward {reward.plugin_name!r} gave {len(values)} values for {len(samples)} samples")
        return [checked_reward(value, reward.plugin_name) for value in values]

    return score


def _make_rewards(
    environment: Mapping[str, Any],
    rewards: Sequence[Mapping[str, Any]],
    blocked: Sequence[str],
    seed: int,
    device: Mapping[str, Any] | None = None,
) -> list[Reward[Any]]:
    manager = make_manager(blocked)
    announce(_described("environment", environment))
    world = manager.create_as(Environment, environment)
    world.setup(seed)
    chip = None
    if device is not None:
        announce(_described("device", device))
        chip = manager.create_as(Device, device)
        chip.activate(0)
    made = []
    for options in rewards:
        announce(_described("reward", options))
        reward = manager.create_as(Reward, options)
        if isinstance(reward, BatchReward) and chip is not None:
            reward.device = chip
        reward.setup(world)
        made.append(reward)
    return made


def _described(kind: str, section: Mapping[str, Any]) -> str:
    """A plugin of a config, with its options that are texts, since a file that it loads is among those."""
    texts = [f"{key}: {value}" for key, value in section.items() if key != "name" and value and isinstance(value, str)]
    return f"{kind} {section['name']!r}" + (f" ({textwrap.shorten(', '.join(texts), 300)})" if texts else "")


def checked_reward(value: object, name: str) -> float | None:
    """A reward as a float, or None. Raises TypeError or ValueError for what is no finite number."""
    if value is None:
        return None
    if not isinstance(value, int | float) and not hasattr(value, "__float__"):
        raise TypeError(f"reward {name!r} returned {type(value).__name__}, not a number or None")
    number = float(value)
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(f"reward {name!r} returned {number}, which is not finite")
    return number
