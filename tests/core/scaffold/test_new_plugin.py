"""A new package of every kind is whole, clean, and trains; wrong names and places are refused."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollstock.config import load_config
from rollstock.errors import PluginError, UserError
from rollstock.kinds import KINDS
from rollstock.launch import train
from rollstock.scaffold import new_plugin
from rollstock.testing import installed, read_metrics


def module_of(package: Path) -> Path:
    return next((package / "src").iterdir()) / "__init__.py"


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_package_has_all_its_parts_and_no_open_places(kind: str, tmp_path: Path) -> None:
    package = new_plugin(kind, "my_own", tmp_path)
    assert package == tmp_path / "rollstock-my-own"
    files = sorted(str(path.relative_to(package)) for path in package.rglob("*") if path.is_file())
    assert files == [
        ".gitignore",
        "README.md",
        "example.yaml",
        "pyproject.toml",
        "src/rollstock_my_own/__init__.py",
        "src/rollstock_my_own/py.typed",
        "tests/test_my_own.py",
    ]
    for path in package.rglob("*"):
        if path.is_file():
            assert not re.search(r"<<|>>", path.read_text()), path
    pyproject = (package / "pyproject.toml").read_text()
    assert f'[project.entry-points."rollstock.{kind}"]\nmy_own = "rollstock_my_own"' in pyproject
    assert list(tmp_path.iterdir()) == [package]


@pytest.mark.parametrize("name", ["x", "my_own", "a_plugin_whose_name_is_rather_long"])
def test_new_code_is_clean(name: str, tmp_path: Path) -> None:
    pytest.importorskip("ruff")
    for kind in KINDS:
        new_plugin(kind, name, tmp_path / kind)
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length=120", "--select=E4,E7,E9,F,W,B,UP,SIM"]
    done = subprocess.run([*ruff, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_of_a_new_package_trains_with_it(kind: str, tmp_path: Path) -> None:
    package = new_plugin(kind, "my_own", tmp_path)
    with installed(kind, "my_own", module_of(package).read_text()):
        overrides = [f"run.directory={tmp_path / 'run'}", "train.steps=1", "trackers.0=jsonl"]
        config = load_config(package / "example.yaml", overrides)
        outcome = train(config)
    assert outcome.status == "finished"
    assert [row["step"] for row in read_metrics(outcome.directory) if "metrics" in row] == [1]
    section = KINDS[kind].section
    if kind != "transport":  # which has nothing to carry within one process
        chosen = getattr(config, section)
        assert "my_own" in [one.name for one in (chosen if KINDS[kind].many else [chosen])]


def test_an_unknown_kind_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="Did you mean 'algorithm'"):
        new_plugin("algoritm", "my_own", tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my-algo", "how about 'my_algo'"),
        ("MyAlgo", "how about 'myalgo'"),
        ("2nd", "such as 'my_algo'"),
        ("", "such as 'my_algo'"),
        ("class", "such as 'my_algo'"),
        ("../escape", "how about 'escape'"),
        ("a b", "how about 'a_b'"),
    ],
)
def test_a_name_that_is_no_identifier_is_refused(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=re.escape(said)):
        new_plugin("algorithm", name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"algorithm:grpo is taken by rollstock"):
        new_plugin("algorithm", "grpo", tmp_path)
    assert new_plugin("reward", "grpo", tmp_path).is_dir()  # another kind has names of its own


def test_a_module_that_is_there_already_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "rollstock_hidden.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(PluginError, match="rollstock_hidden"):
        new_plugin("reward", "hidden", tmp_path)


def test_a_directory_that_exists_is_left_alone(tmp_path: Path) -> None:
    package = new_plugin("reward", "my_own", tmp_path)
    (package / "README.md").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        new_plugin("reward", "my_own", tmp_path)
    assert (package / "README.md").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        new_plugin("reward", "my_own", tmp_path / "file")


def test_the_command_line_writes_a_package_and_says_where(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rollstock", "new", "plugin", "tracker", "my_own", "--dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "rollstock-my-own") in done.stdout
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "exists already" in again.stderr
