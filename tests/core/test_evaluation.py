"""Evaluation: when, on what, and what it says."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from rollstock import Metric, Sample, Sampling, Task
from rollstock.episodes import Episode
from rollstock.evaluation import Evaluator
from rollstock.roles.reward import Scores
from rollstock.schema import EvaluationSection


def is_due(step, *, last=False, done=-1, **settings):
    return Evaluator(EvaluationSection(**settings)).is_due(step, last=last, done=done)


def test_before_the_first_step_only_where_that_is_asked_for():
    assert is_due(0)
    assert not is_due(0, at_start=False, every=1)


def test_every_so_many_steps():
    assert [step for step in range(1, 9) if is_due(step, every=3)] == [3, 6]
    assert not any(is_due(step) for step in range(1, 9))


def test_after_the_last_step_only_where_that_is_asked_for():
    assert is_due(5, last=True)
    assert not is_due(5, last=True, at_end=False)
    assert is_due(6, last=True, at_end=False, every=3)


def test_never_twice_after_one_step():
    assert not is_due(6, every=3, done=6)
    assert not is_due(6, last=True, done=6)
    assert not is_due(0, done=0)
    assert is_due(6, every=3, done=3)


class World:
    """Stands in for a run: plays what it is told, and scores by a table."""

    def __init__(self, scores, *, tasks=2):
        self.scores = list(scores)
        self.metrics = {}
        self.asked = []
        self.seed, self.sampling = 7, Sampling(temperature=0.7, top_k=5, max_new_tokens=9)
        self.progress = SimpleNamespace(step=4)
        self.tasks = SimpleNamespace(
            heldout=lambda count: [Task(id=str(i), prompt="?") for i in range(min(tasks, count))]
        )
        self.player = self
        self.roles = {"reward": self}
        self.algorithm = SimpleNamespace(offline=False)

    def play(self, tasks, *, samples, sampling, seed_of):
        seeds = [[seed_of(place, k) for k in range(samples)] for place in range(len(tasks))]
        self.asked.append((len(tasks), samples, sampling, seeds))
        episodes = [
            Episode(task, group, seeds[group][k], [1]) for group, task in enumerate(tasks) for k in range(samples)
        ]
        return episodes, {"response_length/mean": Metric(3.0), "rollout/max_turns": Metric(1.0)}

    def call(self, method, samples, step):
        assert (method, step) == ("score", 4)
        assert all(isinstance(sample, Sample) for sample in samples)
        totals, self.scores = self.scores[: len(samples)], self.scores[len(samples) :]
        return Scores(totals, [{"one": total} for total in totals], self.metrics)


def evaluate(world, **settings):
    return Evaluator(EvaluationSection(**settings)).evaluate(world)


def test_greedy_then_sampled_and_the_greedy_mean_ranks():
    world = World([1.0, 0.0, 0.5, 1.0, 0.0, 0.0])
    values, rank = evaluate(world, samples=2)
    assert values == {
        "eval/greedy/num_samples": 2,
        "eval/greedy/num_unscored": 0,
        "eval/greedy/reward_mean": 0.5,
        "eval/greedy/solved": 0.5,
        "eval/greedy/response_length/mean": 3.0,
        "eval/sampled/num_samples": 4,
        "eval/sampled/num_unscored": 0,
        "eval/sampled/reward_mean": 0.375,
        "eval/sampled/solved": 0.25,
        "eval/sampled/pass_at_2": 0.5,
        "eval/sampled/response_length/mean": 3.0,
    }
    assert rank == 0.5
    (_, once, greedy, _), (_, twice, sampled, _) = world.asked
    assert (once, greedy.temperature, greedy.top_k) == (1, 0.0, 0)
    assert (twice, sampled) == (2, replace(world.sampling, exploring=False))


def test_of_several_rewards_each_has_its_mean_without_its_weight():
    world = World([2.0, 4.0])
    world.metrics = {
        "reward/model_mean": Metric(1.5, 2),
        "reward/rule_mean": Metric(1.0, 1),
        "reward/silent_mean": Metric(0.0, 0),  # it abstained from all
        "reward/num_unscored": Metric(0, 1.0, "sum"),
    }
    values, _ = evaluate(world, samples=0)
    assert {name: value for name, value in values.items() if name.endswith("_mean")} == {
        "eval/greedy/reward_mean": 3.0,
        "eval/greedy/model_mean": 1.5,
        "eval/greedy/rule_mean": 1.0,
    }


def test_sampled_alone_ranks_where_greedy_is_off():
    values, rank = evaluate(World([0.25, 0.75]), greedy=False)
    assert rank == 0.5
    assert not any(name.startswith("eval/greedy") for name in values)


def test_each_sample_has_a_seed_of_its_own_which_does_not_depend_on_the_step():
    worlds = [World([0.0] * 6), World([0.0] * 6)]
    worlds[1].progress.step = 4
    for world in worlds:
        evaluate(world, greedy=False, samples=3)
    seeds = [seed for row in worlds[0].asked[0][3] for seed in row]
    assert len(set(seeds)) == 6
    assert worlds[0].asked == worlds[1].asked


def test_samples_without_a_score_are_counted_left_out_of_the_mean_and_not_solved():
    values, rank = evaluate(World([None, 1.0]), samples=0)
    assert (values["eval/greedy/num_unscored"], values["eval/greedy/reward_mean"]) == (1, 1.0)
    assert values["eval/greedy/solved"] == 0.5
    assert rank == 1.0


def test_without_any_score_there_is_no_rank():
    values, rank = evaluate(World([None, None]), samples=0)
    assert rank is None
    assert "eval/greedy/reward_mean" not in values
    assert values["eval/greedy/num_unscored"] == 2


@pytest.mark.parametrize(("threshold", "solved"), [(0.5, 1.0), (0.9, 0.5)])
def test_from_which_reward_a_task_counts_as_solved_is_an_option(threshold, solved):
    values, _ = evaluate(World([0.5, 1.0]), samples=0, solved_at=threshold)
    assert values["eval/greedy/solved"] == solved


def test_no_more_tasks_are_played_than_there_are():
    world = World([1.0, 1.0], tasks=2)
    evaluate(world, samples=0, prompts=64)
    assert world.asked[0][0] == 2
