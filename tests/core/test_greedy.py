"""The greedy response to each task, and its score, as columns that an algorithm may declare."""

import json
import shutil

import pytest
import torch

from rollstock import Algorithm, Extension, NoOptions, hookimpl
from rollstock.build import choose
from rollstock.columns import needs_greedy
from rollstock.launch import resume, train
from rollstock.testing import read_metrics


class Leader(Algorithm[NoOptions]):
    """Compares two samples with the greedy response."""

    needs = frozenset({"greedy_scores"})
    seen: list = []  # noqa: RUF012 - of a run in this process

    @property
    def samples_per_prompt(self):
        return 2

    def advantages(self, batch):
        Leader.seen.append(batch)
        return torch.where(batch.greedy_scored, batch.scores - batch.greedy_scores, 0.0)[:, None] * batch.mask

    def loss(self, micro):
        return micro.loss(-micro.logprobs * micro.advantages)


@pytest.fixture(autouse=True)
def leader(installed, monkeypatch):
    """Have `leader` installed, which has seen nothing yet."""
    installed("algorithm", "leader", Leader)
    monkeypatch.setattr(Leader, "seen", [])


def steps_of(folder):
    return [row["metrics"] for row in read_metrics(folder) if "metrics" in row]


LEADER = {"algorithm": {"name": "leader"}}


def by_function(folder, body):
    """The section of a reward that is a function of the sample."""
    (folder / "scores.py").write_text(f"def score(sample):\n    return {body}\n")
    return [{"name": "rule", "kind": "function", "function": f"{folder / 'scores.py'}:score"}]


SPELLING = "float(sum(place * ord(letter) for place, letter in enumerate(sample.response, 1)) % 7)"
"""A score that tells responses apart."""


def test_who_declares_one_of_the_columns_needs_them_played():
    assert needs_greedy({"greedy_scores", "values"}, frozenset(), [])
    assert needs_greedy({"greedy_scored"}, frozenset(), [])
    assert not needs_greedy({"old_logprobs"}, frozenset(), [])
    assert not needs_greedy({"greedy_scores"}, frozenset(), ["greedy_scores"])
    assert not needs_greedy({"greedy_scores"}, {"greedy_scores"}, [])


def test_every_sample_of_a_task_gets_the_score_of_its_greedy_response(small_run, tmp_path):
    train(small_run(tmp_path / "run", "train.prompts_per_step=4", rewards=by_function(tmp_path, SPELLING), **LEADER))
    assert len({score for batch in Leader.seen for score in batch.greedy_scores.tolist()}) > 1
    for batch in Leader.seen:
        assert batch.greedy_scores.shape == (8,)
        assert batch.greedy_scored.all()
        for members in batch.members():
            assert len(set(batch.greedy_scores[members].tolist())) == 1


def test_the_greedy_score_is_that_of_the_likeliest_response(installed, small_run, tmp_path):
    """An extension plays and scores the tasks greedily as well, with other seeds: it finds the same."""

    class Twice(Extension[NoOptions]):
        @hookimpl(wrapper=True)
        def rollstock_prepare(self, run, batch):
            done = yield
            from rollstock.episodes import greedy

            tasks = [batch.metadata[members[0]]["sample"].task for members in batch.members()]
            episodes, _ = run.player.play(tasks, samples=1, sampling=greedy(run.sampling), seed_of=lambda place, k: 99)
            totals = run.roles["reward"].call("score", [e.sample() for e in episodes], run.step).totals
            expected.append([totals[g] for g in batch.groups.unique(return_inverse=True)[1].tolist()])
            return done

    expected = []
    installed("extension", "twice", Twice)
    train(small_run(tmp_path / "run", extensions=["twice"], rewards=by_function(tmp_path, SPELLING), **LEADER))
    assert len({score for row in expected for score in row}) > 1
    assert [batch.greedy_scores.tolist() for batch in Leader.seen] == [pytest.approx(row) for row in expected]


def test_what_it_costs_and_brings_is_recorded_apart_from_the_samples(small_run, tmp_path):
    train(small_run(tmp_path / "run", **LEADER))
    train(small_run(tmp_path / "plain", algorithm={"name": "grpo", "group_size": 2}))
    for metrics, plain in zip(steps_of(tmp_path / "run"), steps_of(tmp_path / "plain"), strict=True):
        assert metrics["greedy/num_responses"] == 2
        assert metrics["greedy/num_unscored"] == 0
        assert metrics["greedy/num_tokens"] > 2
        assert metrics["greedy/response_length/max"] <= 2
        assert "greedy/reward_mean" in metrics
        assert metrics["timing_s/greedy"] <= metrics["timing_s/prepare"]
        assert metrics["reward/num_unscored"] == 0
        assert not any(name.startswith("greedy/") or name == "timing_s/greedy" for name in plain)
    first, plain = steps_of(tmp_path / "run")[0], steps_of(tmp_path / "plain")[0]
    assert first["reward/mean"] == plain["reward/mean"]  # the samples are the same ones
    assert first["response_length/mean"] == plain["response_length/mean"]
    assert first["perf/total_num_tokens"] == plain["perf/total_num_tokens"] + first["greedy/num_tokens"]


def test_evaluation_and_the_files_of_rollouts_stay_as_they_are(small_run, tmp_path):
    train(small_run(tmp_path / "run", **LEADER))
    (first, *_) = (tmp_path / "run" / "rollouts" / "step-000001.jsonl").read_text().splitlines()
    assert not any("greedy" in name for name in json.loads(first))
    for row in read_metrics(tmp_path / "run"):
        if "evaluation" in row:
            assert all(name.startswith("eval/greedy/") for name in row["evaluation"])
            assert row["evaluation"]["eval/greedy/num_samples"] == 2


def test_an_unscored_greedy_response_is_counted_and_gives_no_signal(installed, small_run, tmp_path):
    """The score stage is replaced, so that only the greedy responses meet the reward, which abstains."""

    class Scored(Extension[NoOptions]):
        @hookimpl
        def rollstock_score(self, run, batch):
            batch["scores"] = torch.arange(len(batch)).float()
            batch["scored"] = torch.ones(len(batch), dtype=torch.bool)
            return True

    installed("extension", "scored", Scored)
    evaluation, rewards = {"at_start": False, "at_end": False}, by_function(tmp_path, "None")
    train(small_run(tmp_path / "run", extensions=["scored"], rewards=rewards, evaluation=evaluation, **LEADER))
    for batch, metrics in zip(Leader.seen, steps_of(tmp_path / "run"), strict=True):
        assert metrics["greedy/num_unscored"] == 2
        assert not batch.greedy_scored.any()
        assert not batch.greedy_scores.any()
        assert not batch.advantages.any()


def test_a_run_taken_up_again_plays_as_one_that_went_on(small_run, tmp_path, assert_same_run):
    overrides = ["train.steps=4", "checkpoint.every_steps=2", "algorithm.name=remax"]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    for folder in (straight, broken):
        train(small_run(folder, *overrides))
    shutil.rmtree(broken / "checkpoints" / "step-000004")
    resume(broken)
    assert_same_run(straight, broken)


def test_no_role_is_started_for_it(small_run, tmp_path):
    assert choose(small_run(tmp_path / "run", **LEADER)).roles == ["actor", "rollout", "reward"]
