"""The conformance kit of rewards: scores that are numbers or abstentions, the same each time.

For authors of rewards, who call `check_reward(MyReward)` in a test. Time limits and processes are the core's.
"""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollstock.interfaces.environment import Environment, Sample, Split, Task
from rollstock.interfaces.reward import BatchReward, Reward
from rollstock.manager import make_manager
from rollstock.plugin import NoOptions
from rollstock.testing.environment import JUNK, make_sample, own_answer, score_of
from rollstock.testing.kit import Report, expect, run_checks
from rollstock.testing.subject import Subject
from rollstock.testing.subject import check_options as check_plugin_options


class Sums(Environment[NoOptions]):
    """The environment that rewards are checked with by default: sums of two digits, one point for the right number."""

    def num_tasks(self, split: Split) -> int:
        """Half of the pairs each."""
        return 50

    def task(self, split: Split, index: int) -> Task:
        """Pairs with an even index are for training."""
        a, b = divmod(2 * index + (split == "heldout"), 10)
        return Task(id=f"{a}+{b}", prompt=f"{a}+{b}=", answer=str(a + b))

    def score(self, sample: Sample) -> float:
        """1 for the answer alone."""
        return float(sample.response.strip() == sample.task.answer)


@dataclass(frozen=True)
class RewardCase:
    """The reward under test, the environment that it is set up with, and the samples that it scores."""

    subject: Subject[Reward[Any]]
    environment: Environment[Any]
    samples: Sequence[Sample]

    def make(self) -> Reward[Any]:
        """A reward, set up."""
        reward = self.subject.make()
        if isinstance(reward, BatchReward):
            from rollstock.testing.models import get_device  # which imports torch

            reward.device = get_device(None)
        reward.setup(self.environment)
        return reward


def check_reward(
    reward: type[Reward[Any]] | Reward[Any] | str,
    *,
    options: Mapping[str, Any] | None = None,
    environment: Environment[Any] | str | None = None,
    samples: Sequence[Sample] = (),
    skip: Mapping[str, str] | None = None,
) -> Report:
    """Check a reward, given as a class, an instance or an installed plugin's name.

    options: of the plugin; environment: one that is set up, or the name of an installed one, where sums of two digits
    will not do; samples: to score, besides right answers and junk for the environment's first tasks; skip: checks
    that do not hold on purpose, each with the reason. Raises ConformanceError.
    """
    world = environment
    if not isinstance(world, Environment):
        world = Sums() if world is None else make_manager().create_as(Environment, {"name": world})
        world.setup(0)
    size = world.num_tasks("train")
    tasks = [world.task("train", index) for index in range(6 if size is None else min(size, 6))]
    made = [make_sample(task, text) for task in tasks for text in (own_answer(task), *JUNK)]
    case = RewardCase(Subject(Reward, reward, options), world, [*samples, *made])
    checks = (*CHECKS, check_batches) if issubclass(case.subject.cls, BatchReward) else CHECKS
    return run_checks(case.subject.label, checks, case, skip=skip)


def check_options(case: RewardCase) -> None:
    """Every option has a help text, and the defaults fit their own types and bounds; making a plugin leaves its
    config alone."""
    check_plugin_options(case.subject)


def check_scores(case: RewardCase) -> None:
    """A score is a finite number, or None to abstain, whatever the response; scoring changes nothing."""
    reward = case.make()
    for sample in case.samples:
        score_of(reward.score, sample)


def check_determinism(case: RewardCase) -> None:
    """A score depends on the sample alone: not on earlier ones, the instance, or global generators."""
    random.seed(1)
    first, second = case.make(), case.make()
    scores = [score_of(first.score, sample) for sample in case.samples]
    random.seed(2)
    backwards = [score_of(second.score, sample) for sample in reversed(case.samples)][::-1]
    for sample, score, again in zip(case.samples, scores, backwards, strict=True):
        expect(
            score == again,
            f"the response {sample.response!r:.60} to task {sample.task.id!r} scores {score}, and {again} in another "
            "order",
            mend="keep nothing from one sample to the next; several processes score at once, each a part",
        )


def check_batches(case: RewardCase) -> None:
    """A reward that scores batches gives each sample the score that it has alone, to rounding, in their order."""
    reward = case.make()
    assert isinstance(reward, BatchReward)
    expect(
        reward.batch_size >= 1,
        f"its batch_size is {reward.batch_size}",
        mend="at least 1: the most samples that it is given at once",
    )
    alone = [score_of(reward.score, sample) for sample in case.samples]
    for samples, scores in ((case.samples, alone), (case.samples[::-1], alone[::-1]), ((), ())):
        together = list(reward.score_batch(samples))
        expect(
            len(together) == len(samples),
            f"it gives {len(together)} scores for {len(samples)} samples",
            mend="return one for each sample, None where it abstains",
        )
        for sample, one, other in zip(samples, scores, together, strict=True):
            same = (one is None) == (other is None) and math.isclose(
                one or 0.0, other or 0.0, rel_tol=1e-3, abs_tol=1e-4
            )
            expect(
                same,
                f"the response {sample.response!r:.60} to task {sample.task.id!r} scores {one} alone, and {other} in a "
                "batch",
                mend="padding and neighbours must not matter; keep the order of the samples",
            )


def check_transport(case: RewardCase) -> None:
    """A score can be sent to another process, as can the options."""
    reward = case.make()
    for value in [reward.score(sample) for sample in case.samples[:3]]:
        expect(
            value is None or float(pickle.loads(pickle.dumps(value))) == float(value),
            f"the score {value!r} does not survive the trip to another process",
            mend="return a float",
        )


CHECKS = (check_options, check_scores, check_determinism, check_transport)
