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
