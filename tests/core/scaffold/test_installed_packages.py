"""New packages of every kind, installed by pip: they are listed, pass their own tests, and train from the command
line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollstock.kinds import KINDS
from rollstock.scaffold import new_plugin

pytestmark = pytest.mark.slow

# Trains every example whose path is given, in one process: importing torch takes longer than these runs.
TRAIN_ALL = """
import sys
from rollstock.cli import main
for path in sys.argv[1:]:
    code = main(["train", path, f"run.directory={path}.run", "train.steps=3"])
    assert code == 0, f"{path} ended with {code}"
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("packages")
    return {kind: new_plugin(kind, f"my_{kind}", folder) for kind in KINDS}


@pytest.fixture(scope="module")
def environment(packages: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in which all the packages are installed."""
    site = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command = [*install, "--disable-pip-version-check", "--target", str(site), *map(str, packages.values())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COV_", "PYTEST_"))}
    return {**kept, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(command: list[str], environment: dict[str, str], folder: Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_they_are_listed_with_their_origin(environment: dict[str, str], tmp_path: Path) -> None:
    listed = run([sys.executable, "-m", "rollstock", "plugins", "--json"], environment, tmp_path)
    for kind in KINDS:
        assert f"rollstock-my-{kind}" in listed
    shown = run([sys.executable, "-m", "rollstock", "plugins", "show", "tracker:my_tracker"], environment, tmp_path)
    assert "metrics.csv" in shown
    assert json.loads(listed)


def test_their_own_tests_pass(packages: dict[str, Path], environment: dict[str, str], tmp_path: Path) -> None:
    tests = [str(package / "tests") for package in packages.values()]
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    said = run([*pytest_command, *tests], environment, tmp_path)
    assert "passed" in said
    assert "skipped" not in said


def test_their_examples_train(packages: dict[str, Path], environment: dict[str, str], tmp_path: Path) -> None:
    examples = [str(package / "example.yaml") for package in packages.values()]
    run([sys.executable, "-c", TRAIN_ALL, *examples], environment, tmp_path)
    for example in examples:
        rows = [json.loads(line) for line in Path(f"{example}.run", "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if "metrics" in row] == [1, 2, 3]
    assert (Path(f"{packages['tracker']}/example.yaml.run") / "metrics.csv").stat().st_size > 100


def test_an_example_trains_unchanged(packages: dict[str, Path], environment: dict[str, str], tmp_path: Path) -> None:
    said = run(
        [sys.executable, "-m", "rollstock", "train", str(packages["algorithm"] / "example.yaml")], environment, tmp_path
    )
    assert "runs/example" in said
    manifest = json.loads((tmp_path / "runs" / "example" / "manifest.json").read_text())
    used = [(plugin["name"], plugin["distribution"]) for plugin in manifest["plugins"]]
    assert ("my_algorithm", "rollstock-my-algorithm") in used
