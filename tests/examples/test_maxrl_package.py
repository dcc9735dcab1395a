"""The third-party algorithm of examples/plugins: installed by pip into a fresh place, and run by name from a config."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PACKAGE = Path(__file__).parents[2] / "examples" / "plugins" / "rollstock-maxrl"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in which the package is installed; it is built from a copy, to leave the tree
    clean."""
    folder = tmp_path_factory.mktemp("maxrl")
    shutil.copytree(PACKAGE, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command = [*install, "--disable-pip-version-check", "--target", str(folder / "site"), str(folder / "source")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COV_", "PYTEST_"))}
    return {**kept, "PYTHONPATH": str(folder / "site"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(arguments: list[str], environment: dict[str, str], folder: Path) -> str:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_its_own_tests_pass(environment: dict[str, str], tmp_path: Path) -> None:
    said = run(
        ["pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", str(PACKAGE / "tests")],
        environment,
        tmp_path,
    )
    assert "passed" in said


def test_it_is_listed_and_described(environment: dict[str, str], tmp_path: Path) -> None:
    said = run(["rollstock", "plugins", "show", "algorithm:maxrl"], environment, tmp_path)
    assert "rollstock-maxrl" in said
    assert "group_size" in said


def test_a_config_runs_it_by_name(environment: dict[str, str], tmp_path: Path) -> None:
    overrides = ["train.steps=3", "checkpoint.every_steps=1", "trackers=[jsonl]"]
    run(["rollstock", "train", str(PACKAGE / "example.yaml"), *overrides], environment, tmp_path)
    folder = tmp_path / "runs" / "example"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "metrics" in row] == [1, 2, 3]
    assert all("maxrl/unsolved_groups" in row["metrics"] for row in rows if "metrics" in row)
    manifest = json.loads((folder / "manifest.json").read_text())
    used = {plugin["name"]: plugin["distribution"] for plugin in manifest["plugins"] if plugin["kind"] == "algorithm"}
    assert used == {"maxrl": "rollstock-maxrl"}


def test_without_the_package_the_name_is_not_known(environment: dict[str, str], tmp_path: Path) -> None:
    bare = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "rollstock", "train", str(PACKAGE / "example.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=bare, cwd=tmp_path)
    assert done.returncode == 2
    assert "maxrl" in done.stderr
    assert "Traceback" not in done.stderr
