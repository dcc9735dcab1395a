"""Evaluation on held-out tasks: greedy, and sampled at the run's temperature."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rollstock.episodes import Episode, greedy
from rollstock.interfaces.rollout import Sampling
from rollstock.metrics import Metrics, metric_values
from rollstock.offline import heldout_loss
from rollstock.seeding import derive_seed

if TYPE_CHECKING:
    from rollstock.run import Run
    from rollstock.schema import EvaluationSection


class Evaluator:
    """Decides when to evaluate, and does."""

    def __init__(self, settings: EvaluationSection) -> None:
        self._settings = settings

    def is_due(self, step: int, *, last: bool, done: int = -1) -> bool:
        """Whether an evaluation belongs after `step` steps (0: before the first) and is still to do; `done`: the step
        of the latest."""
        if done >= step:
            return False
        if step == 0:
            return self._settings.at_start
        return (last and self._settings.at_end) or (self._settings.every > 0 and step % self._settings.every == 0)

    def evaluate(self, run: Run) -> tuple[dict[str, float], float | None]:
        """Play the held-out tasks. Returns metrics named `eval/greedy/...` and `eval/sampled/...`, and the score that
        ranks
        checkpoints: the mean reward, greedy where greedy was played; None where nothing was scored. For an offline
        algorithm it is the loss on them, and minus the loss."""
        if run.algorithm.offline:
            return heldout_loss(run, self._settings.prompts)
        values: dict[str, float] = {}
        rank: float | None = None
        modes: list[tuple[str, Sampling, int]] = []
        if self._settings.greedy:
            modes.append(("greedy", greedy(run.sampling), 1))
        if self._settings.samples:
            modes.append(("sampled", replace(run.sampling, exploring=False), self._settings.samples))
        tasks = run.tasks.heldout(self._settings.prompts)
        for mode, sampling, samples in modes:
            episodes, measured = run.player.play(
                tasks,
                samples=samples,
                sampling=sampling,
                seed_of=lambda place, k: derive_seed(run.seed, "evaluation", place, k),
            )
            scores = run.roles["reward"].call("score", [e.sample() for e in episodes], run.progress.step)
            found = {**self._summary(episodes, scores.totals, samples), **_by_reward(scores.metrics)}
            kept = {k: v for k, v in metric_values(measured).items() if k.startswith("response_length/")}
            values |= {f"eval/{mode}/{name}": value for name, value in {**found, **kept}.items()}
            if rank is None:
                rank = found.get("reward_mean")
        return values, rank

    def _summary(self, episodes: list[Episode], scores: list[float | None], samples: int) -> dict[str, float]:
        said = [score for score in scores if score is not None]
        summary = {"num_samples": float(len(scores)), "num_unscored": float(len(scores) - len(said))}
        if not said:
            return summary
        solved = [score is not None and score >= self._settings.solved_at for score in scores]
        summary["reward_mean"] = sum(said) / len(said)
        summary["solved"] = sum(solved) / len(solved)
        if samples > 1:
            by_group: dict[int, list[bool]] = {}
            for episode, good in zip(episodes, solved, strict=True):
                by_group.setdefault(episode.group, []).append(good)
            summary[f"pass_at_{samples}"] = sum(any(good) for good in by_group.values()) / len(by_group)
        return summary


def _by_reward(metrics: Metrics) -> dict[str, float]:
    """The mean of each reward, unweighted, which the reward role measures where there are several."""
    means = {name.removeprefix("reward/"): value for name, value in metric_values(metrics).items()}
    return {name: value for name, value in means.items() if name.endswith("_mean")}
