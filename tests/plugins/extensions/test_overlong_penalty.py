"""The overlong penalty: DAPO's equation 13, and its place around the score stage."""

from types import SimpleNamespace

import pytest
import torch

from rollstock import Batch, Sampling, Trajectory, hookimpl
from rollstock.manager import make_manager
from rollstock.plugins.extensions.overlong_penalty import OverlongPenalty, OverlongPenaltyConfig


def batch_of(lengths, rewards):
    return Batch.from_trajectories(
        [
            Trajectory(
                prompt=torch.tensor([1]),
                response=torch.ones(n, dtype=torch.int64),
                action_mask=torch.ones(n, dtype=torch.bool),
                rollout_logprobs=torch.zeros(n),
                versions=torch.zeros(n, dtype=torch.int64),
                group=0,
                reward=reward,
            )
            for n, reward in zip(lengths, rewards, strict=True)
        ]
    )


class FakeRun(SimpleNamespace):
    """What the extension reads of a run."""

    def record(self, metrics):
        self.recorded.update(metrics)


def run_with(max_new_tokens=20):
    return FakeRun(sampling=Sampling(max_new_tokens=max_new_tokens), recorded={})


class ScoreStage:
    @hookimpl
    def rollstock_score(self, run, batch):
        return True


def score(options, run, batch):
    """Run the score stage through the real manager, with the extension around it."""
    manager = make_manager()
    manager.create("extension", {"name": "overlong_penalty", **options})
    manager.register("stage", ScoreStage())
    assert manager.hook.rollstock_score(run=run, batch=batch) is True


def test_equation_13():
    # L_max = 20, L_cache = 4: nothing up to 16, then a straight line to -1 at 20, and -1 beyond.
    extension = OverlongPenalty(OverlongPenaltyConfig(buffer=4))
    lengths = torch.tensor([0, 15, 16, 17, 18, 20, 30])
    assert extension.penalty(lengths, 20).tolist() == [0, 0, 0, 0.25, 0.5, 1, 1]


def test_scores_lose_the_penalty_and_metrics_say_how_much():
    run, batch = run_with(), batch_of([10, 18, 20], [1.0, 1.0, 0.5])
    score({"buffer": 4, "scale": 2.0}, run, batch)
    assert batch.scores.tolist() == [1.0, 0.0, -1.5]
    assert run.recorded["reward/overlong_penalty"].value == pytest.approx(1.0)
    assert run.recorded["reward/overlong_ratio"].value == pytest.approx(2 / 3)
    assert run.recorded["reward/overlong_ratio"].weight == 3


def test_a_limit_of_its_own():
    batch = batch_of([10], [1.0])
    score({"buffer": 5, "limit": 10}, run_with(1000), batch)
    assert batch.scores.tolist() == [0.0]


def test_what_nobody_scored_stays_unscored():
    run, batch = run_with(), batch_of([20, 20], [None, None])
    score({"buffer": 4}, run, batch)
    assert batch.scored.tolist() == [False, False]
    assert batch.scores.tolist() == [0.0, 0.0]
    assert run.recorded == {}


def test_an_empty_response_is_not_punished():
    batch = batch_of([0, 20], [0.0, 0.0])
    score({"buffer": 20}, run_with(), batch)
    assert batch.scores.tolist() == [0.0, -1.0]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"buffer": 30}, "buffer (30) is longer than the limit of 20 response tokens, so that even empty"),
        ({"buffer": 11, "limit": 10}, "buffer (11) is longer than the limit of 10"),
        ({"buffer": 4, "scale": 0.0}, "takes nothing off any score"),
        ({"buffer": 4, "scale": 0.0, "filter": True}, ""),
        ({"buffer": 20}, ""),
    ],
)
def test_a_penalty_of_nothing_or_on_everything_is_refused(options, problem):
    config = SimpleNamespace(sampling=Sampling(max_new_tokens=20))
    extension = OverlongPenalty(OverlongPenaltyConfig(**options))
    found = extension.validate(config, SimpleNamespace(offline=False))
    assert [problem in sentence for sentence in found] == ([True] if problem else [])
    assert "offline" in extension.validate(config, SimpleNamespace(offline=True))[0]


def test_filtered_responses_are_in_the_baseline_and_in_no_loss(stages, stand_in):
    run, batch = stand_in(sampling=Sampling(max_new_tokens=2)), batch_of([2, 1, 2], [0.0, 1.0, 0.0])
    batch.finish_reasons[0] = "length"
    for options, expected in (
        ({"filter": True, "scale": 0.0}, [[False, False], [True, False], [True, True]]),
        ({}, [[True, True], [True, False], [True, True]]),
    ):
        call = stages(run, {"name": "overlong_penalty", "buffer": 1, **options})
        assert call("advantages", batch)["action_mask"].tolist() == [[True, True], [True, False], [True, True]]
        assert call("update", batch)["action_mask"].tolist() == expected
        assert batch.action_mask.tolist() == [[True, True], [True, False], [True, True]]
    assert run.value("train/num_filtered") == 1


def test_a_run_that_filters_trains_on_the_others_alone(steps_of_run):
    """All of it, if the one token that is allowed is never an end."""
    options = {"name": "overlong_penalty", "buffer": 1, "scale": 0.0, "filter": True}
    kept, cut = (
        steps_of_run(f"limit-{limit}", "train.steps=1", sampling={"max_new_tokens": limit}, extensions=[options])[0]
        for limit in (6, 1)
    )
    assert 0 < kept["train/num_filtered"] < 16
    assert kept["actor/grad_norm"] > 0
    assert cut["train/num_filtered"] == pytest.approx(16 * cut["response_length/clip_ratio"])
    assert cut["actor/skipped_updates"] == 0
