"""A whole life of a run by the command line: checked, trained, refused, evaluated, exported, reported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollstock import launch
from rollstock.cli import main

CONFIG = """
model:
  config: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
           num_key_value_heads: 2, max_position_embeddings: 64, tie_word_embeddings: true}
  tokenizer: {characters: "0123456789+-*/= ?."}
algorithm: {name: grpo, group_size: 2}
environment: {name: arithmetic, chat: false, prompt: "{a}{op}{b}="}
sampling: {max_new_tokens: 2}
train: {steps: 1, prompts_per_step: 2}
evaluation: {at_start: false, prompts: 2, samples: 0}
reward_limits: {workers: 1}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("demo.yaml").write_text(CONFIG)
    return tmp_path


@pytest.mark.slow
def test_a_run_from_the_dry_run_to_the_report(folder: Path, capsys) -> None:
    assert main(["train", "demo.yaml", "--dry-run"]) == 0
    assert "no step was taken" in capsys.readouterr().out
    assert not Path("runs").exists()

    assert main(["train", "demo.yaml"]) == 0
    assert "finished after step 1 in " in capsys.readouterr().out
    assert main(["train", "demo.yaml"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["resume", "runs/demo"]) == 2
    assert "has finished its 1 steps" in capsys.readouterr().err

    assert main(["eval", "runs/demo", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["status"], shown["step"]) == ("finished", 1)
    assert "eval/greedy/reward_mean" in shown["evaluation"]
    assert main(["eval", "runs/demo"]) == 0
    assert "eval/greedy/reward_mean: " in capsys.readouterr().out

    assert main(["export", "runs/demo", "--to", "model", "--step", "best"]) == 0
    assert "from_pretrained('model')" in capsys.readouterr().out
    assert what_is_said_beside_training("model") == ""
    assert main(["report", "runs/demo", "--json"]) == 0
    assert Path(json.loads(capsys.readouterr().out)["path"]).is_file()


def what_is_said_beside_training(model: str) -> str:
    """Standard error, no terminal, of a run of a process of its own whose weights are loaded from a directory."""
    Path("loaded.yaml").write_text(f"model: {{path: {model}}}" + CONFIG[CONFIG.index("\nalgorithm:") :])
    return subprocess.run(
        [sys.executable, "-m", "rollstock", "train", "loaded.yaml"], capture_output=True, text=True, check=True
    ).stderr


def test_the_run_directory_has_every_option_of_every_plugin(folder: Path) -> None:
    assert main(["train", "demo.yaml", "trackers=[jsonl]", "run.directory=here"]) == 0
    written = Path("here/config.yaml").read_text()
    assert "  clip: 0.2\n" in written
    assert "  learning_rate: " in written


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("checked", 0), ("interrupted", 1)])
def test_a_run_that_was_interrupted_is_not_done(folder: Path, capsys, monkeypatch, status: str, code: int) -> None:
    outcome = launch.Outcome(status=status, directory=Path("runs/x"), step=3, message="go on with: rollstock resume")
    monkeypatch.setattr(launch, "resume", lambda path, **chosen: outcome)
    Path("runs/x").mkdir(parents=True)
    for name in ("config.yaml", "manifest.json"):
        Path("runs/x", name).touch()
    assert main(["resume", "runs/x"]) == code
    assert "go on with: rollstock resume" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["resume", "eval"])
def test_what_is_no_run_is_refused_without_waiting_for_torch(folder: Path, command: str) -> None:
    script = f"import sys\nfrom rollstock.cli import main\ncode = main([{command!r}, 'nowhere'])\n"
    done = subprocess.run(
        [sys.executable, "-c", script + "print(code, 'torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "2 False\n"


def test_the_doctor_looks_at_a_config(folder: Path, capsys) -> None:
    assert main(["doctor", "demo.yaml", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {"severity", "subject", "message", "advice"} == set(findings[0])
    assert main(["doctor", "demo.yaml", "algorithm=grop"]) == 2
    assert "Did you mean 'grpo'" in capsys.readouterr().out


def test_a_new_plugin_is_written_where_it_is_wanted(folder: Path, capsys) -> None:
    assert main(["new", "plugin", "reward", "my_reward", "--json"]) == 0
    path = Path(json.loads(capsys.readouterr().out)["path"])
    assert (path / "pyproject.toml").is_file()
    assert main(["new", "plugin", "reward", "my_reward"]) == 2
