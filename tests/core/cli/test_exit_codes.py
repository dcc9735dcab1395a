"""What scripts go by: exit codes, and standard output that is one JSON document, whoever else prints."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollstock import Extension, NoOptions, hookimpl
from rollstock.cli import main
from rollstock.testing import installed


@pytest.fixture
def config(small_run, tmp_path, monkeypatch) -> Path:
    """A config file with the console among its trackers."""
    values: dict[str, Any] = small_run(tmp_path / "run", "train.steps=2", trackers=["console", "jsonl"]).to_dict()
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(values))
    monkeypatch.chdir(tmp_path)
    return path


def document(capsys) -> Any:
    return json.loads(capsys.readouterr().out)


def test_every_command_of_a_run_prints_one_document(config, capsys):
    assert main(["train", str(config), "--json"]) == 0
    shown = capsys.readouterr()
    outcome = json.loads(shown.out)
    assert (outcome["status"], outcome["step"]) == ("finished", 2)
    assert outcome["evaluation"].keys() >= {"eval/greedy/reward_mean"}
    assert "step 1/2" in shown.err  # what the console tracker had to say
    assert main(["resume", "run", "--json"]) == 2
    error = document(capsys)["error"]
    assert error["type"] == "UserError"
    assert "has finished its 2 steps" in error["message"]
    assert main(["export", "run", "--to", "model", "--json"]) == 0
    assert document(capsys) == {"path": "model"}
    assert main(["train", str(config), "--json", "--overwrite", "train.steps=1"]) == 0
    assert document(capsys)["step"] == 1


class Fails(Extension[NoOptions]):
    """Fails at the end of step 2."""

    @hookimpl
    def rollstock_step_end(self, run, step, metrics):
        print("about to fail")
        if step == 2:
            raise ZeroDivisionError("nothing to divide by")


def test_a_run_that_fails_exits_with_1_names_the_plugin_and_says_how_to_go_on(config, capsys):
    arguments = ["train", str(config), "extensions=[fails]", "checkpoint.every_steps=1"]
    with installed("extension", "fails", Fails):
        assert main([*arguments, "--json"]) == 1
        error = document(capsys)["error"]
        assert main([*arguments, "--overwrite"]) == 1
        said = capsys.readouterr().err
    assert error["type"] == "ZeroDivisionError"
    run = config.parent / "run"
    notes = [
        "raised by the hook rollstock_step_end of plugin extension:fails/instance",
        f"the run failed in step 2; the newest checkpoint is of step 1; go on with: rollstock resume {run}",
    ]
    assert error["notes"] == notes
    for note in notes:
        assert note in said


class Leaves(Extension[NoOptions]):
    """Calls exit in step 2."""

    @hookimpl
    def rollstock_step_end(self, run, step, metrics):
        if step == 2:
            sys.exit(0)


def test_a_plugin_that_calls_exit_fails_the_run_and_is_named(config, capsys):
    with installed("extension", "leaves", Leaves):
        assert main(["train", str(config), "extensions=[leaves]", "checkpoint.every_steps=1", "--json"]) == 1
    error = document(capsys)["error"]
    assert f"{Path(__file__).name}:" in error["message"]
    assert "called exit(0)" in error["message"]
    assert "raised by the hook rollstock_step_end of plugin extension:leaves/instance" in error["notes"]
    assert "the newest checkpoint is of step 1" in error["notes"][-1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stpes=3", "Did you mean 'steps'?"),
        ("algorithm=grop", "Did you mean 'grpo'?"),
        ("train.steps=many", "train.steps"),
        ("sampling.temperature=0", "advantage is 0"),
        ("sampling.max_prompt_tokens=1", "over sampling.max_prompt_tokens=1"),
    ],
)
def test_wrong_input_exits_with_2_and_one_message(config, capsys, override, message):
    assert main(["train", str(config), override]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert "Traceback" not in shown.out


def test_a_second_start_in_the_same_directory_exits_with_2(config, capsys):
    assert main(["train", str(config), "train.steps=1"]) == 0
    capsys.readouterr()
    assert main(["train", str(config), "--json"]) == 2
    error = document(capsys)["error"]
    assert error["type"] == "OccupiedError"
    assert "--overwrite" in error["message"]
