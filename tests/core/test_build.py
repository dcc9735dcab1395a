"""What is refused before a run is begun, with nothing written, and what a mistake that shows later is told."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstock.checkpoint import CheckpointCorruptError
from rollstock.errors import ConfigError, UserError
from rollstock.launch import resume, train


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([], "rewards: nobody scores"),
        ([{"name": "environment", "weight": 0}], "rewards: every weight is 0, so every reward would be 0"),
    ],
)
def test_rewards_that_cannot_teach_anything_are_refused(
    tmp_path: Path, small_run: Callable[..., Any], rewards: list[Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(small_run(tmp_path / "run", rewards=rewards))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["roles.actor.devices=[7]"], r"roles\.actor\.devices: \[7\] cannot be had: the executor 'local' keeps"),
        (["roles.rollout.count=2", "roles.rollout.devices=[0,1]"], r"roles\.rollout\.devices: \[0, 1\] cannot be had"),
        (["roles.actor.devices=[0,1]"], r"must name one device for each of its workers, and roles\.actor\.count is 1"),
        (["roles.actor.count=2"], r"roles\.actor\.count: 2 workers would each train a model of their own"),
        (["algorithm=ppo", "roles.critic.count=2"], r"roles\.critic\.count: 2 workers would each train"),
        (["roles.rollout.colocate_with=critic"], r"colocate_with: 'critic', which is none of this run's"),
        (["roles.rollout.colocate_with=rollout"], r"colocate_with: 'rollout', which waits for it in turn"),
        (
            ["roles.rollout.colocate_with=actor", "roles.rollout.count=2"],
            r"roles\.rollout\.count: 2 workers cannot share the processes of 'actor', of which there are 1",
        ),
        (
            ["roles.rollout.colocate_with=actor", "roles.rollout.devices=[0]"],
            r"roles\.rollout\.devices: \[0\] cannot be chosen; its workers use those of 'actor'",
        ),
        (["roles.reward.backend={dtype: float32}"], r"roles\.reward\.backend: the reward role has no backend"),
    ],
)
def test_roles_that_would_not_be_what_the_config_says_are_refused(
    tmp_path: Path, small_run: Callable[..., Any], overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(small_run(tmp_path / "run", *overrides))
    assert not (tmp_path / "run").exists()


def test_the_first_device_may_be_named_and_a_reference_may_have_several_workers(
    tmp_path: Path, small_run: Callable[..., Any]
) -> None:
    overrides = ["roles.actor.devices=[0]", "algorithm={name: ppo, kl_coef: 0.1}", "roles.reference.count=2"]
    assert train(small_run(tmp_path / "run", *overrides), dry_run=True).status == "checked"


def test_a_tokenizer_that_does_not_fit_the_tasks_is_refused_before_anything_is_written(
    tmp_path: Path, small_run: Callable[..., Any]
) -> None:
    config = small_run(tmp_path / "run")
    config.model.tokenizer = {"characters": "abc"}
    with pytest.raises(UserError, match=r"no token for '\d', .* add to model\.tokenizer\.characters") as caught:
        train(config)
    assert "in the prompt of task" in caught.value.__notes__[0]
    assert not (tmp_path / "run").exists()


def test_a_mistake_that_shows_when_the_run_has_begun_is_not_told_to_resume(
    tmp_path: Path, small_run: Callable[..., Any]
) -> None:
    config = small_run(tmp_path / "run")
    config.model.config["max_position_embeddings"] = 2
    with pytest.raises(UserError, match="leaves no room for a response") as caught:
        train(config)
    assert any("begin anew: rollstock train CONFIG --overwrite" in note for note in caught.value.__notes__)


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_again_in_silence(
    tmp_path: Path, small_run: Callable[..., Any]
) -> None:
    train(small_run(tmp_path / "run", "train.steps=2", "checkpoint.every_steps=1"))
    for state in (tmp_path / "run/checkpoints").glob("step-*/state.json"):
        state.write_text("{oops")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.jsonl")}
    with pytest.raises(CheckpointCorruptError) as caught:
        resume(tmp_path / "run")
    assert "no checkpoint of" in caught.value.__notes__[-1]
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.jsonl")} == before


def test_a_run_without_a_checkpoint_says_that_it_begins_again(
    tmp_path: Path, small_run: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    train(small_run(tmp_path / "run", "train.steps=2"))
    shutil.rmtree(tmp_path / "run/checkpoints")
    assert resume(tmp_path / "run").step == 2
    assert "has no checkpoint: beginning again with the first step" in caplog.text
