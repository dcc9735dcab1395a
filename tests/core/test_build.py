"""What is refused before a run is begun, with nothing written, and what a mistake that shows later is told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstock.errors import ConfigError, UserError
from rollstock.launch import train


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
