import configparser
import json
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDERS = {
    "core": "rollstock",
    "algorithms": "rollstock/algorithms",
    "backends": "rollstock/backends",
    "hardware": "rollstock/hardware",
    "plugins": "rollstock/plugins",
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("rollstock-*-py3-none-any.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_ships_every_file_of_the_five_folders_and_nothing_else(
    wheel: zipfile.ZipFile, checkout: Path
) -> None:
    expected = {
        f"{package}/{path.relative_to(checkout / folder).as_posix()}"
        for folder, package in FOLDERS.items()
        for path in (checkout / folder).rglob("*")
        if path.is_file()
    }
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert shipped == expected
    assert "rollstock/py.typed" in shipped
    assert {name.split("/")[0] for name in wheel.namelist()} == {"rollstock", "rollstock-0.1.0.dist-info"}


def test_the_wheel_states_every_entry_point(wheel: zipfile.ZipFile, checkout: Path) -> None:
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.read_string(wheel.read("rollstock-0.1.0.dist-info/entry_points.txt").decode())
    stated = {section: dict(parser[section]) for section in parser.sections()}
    assert stated == {"console_scripts": project["scripts"], **project["entry-points"]}
    for group, entries in project["entry-points"].items():
        for value in entries.values():
            path = value.replace(".", "/")
            assert {f"{path}.py", f"{path}/__init__.py"} & set(wheel.namelist()), f"{group}: {value} is not shipped"


def test_the_sdist_ships_tests_examples_and_documentation(built: Path, checkout: Path) -> None:
    (path,) = built.glob("rollstock-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("tests", "examples", "docs", *FOLDERS):
        files = {p.relative_to(checkout).as_posix() for p in (checkout / folder).rglob("*") if p.is_file()}
        assert files
        assert not files - names
    assert {"Makefile", "constraints.txt", "README.md", "setup.py"} <= names


def assert_usable(environment: Any, cwd: Path) -> None:
    """The command lists all built-in plugins, and a plugin's module is there."""
    listed = json.loads(environment.run("rollstock", "plugins", "--json", cwd=cwd))
    names = {(row["kind"], row["name"]) for row in listed["plugins"]}
    assert {("algorithm", "grpo"), ("backend", "torch"), ("rollout", "native"), ("device", "cpu")} <= names
    described = json.loads(environment.run("rollstock", "plugins", "show", "algorithm:grpo", "--json", cwd=cwd))
    assert "group_size" in json.dumps(described)


@pytest.mark.parametrize("how", ["wheel", "folder", "editable"])
def test_an_installation_lists_plugins_from_any_directory(
    how: str, built: Path, checkout: Path, tmp_path: Path, make_environment: Callable[[], Any]
) -> None:
    (path,) = built.glob("*.whl")
    environment = make_environment()
    environment.pip_install(*{"wheel": [str(path)], "folder": [str(checkout)], "editable": ["-e", str(checkout)]}[how])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert_usable(environment, elsewhere)
    where = environment.run("python", "-c", "import rollstock; print(rollstock.__file__)", cwd=elsewhere).strip()
    expected = checkout / "core" if how == "editable" else environment.folder
    assert Path(where).is_relative_to(expected)
