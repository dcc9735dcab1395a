"""The rules of the house: who may import whom, where plugins may be named, and how long files and functions may be."""

import ast
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstock.discovery import discover

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "core": "rollstock",
    "algorithms": "rollstock.algorithms",
    "backends": "rollstock.backends",
    "hardware": "rollstock.hardware",
    "plugins": "rollstock.plugins",
}
OUTER = [package for folder, package in FOLDERS.items() if folder != "core"]
# Beyond `from rollstock import ...`: the test kit, what averages gradients, what an executor splits calls with, what
# generators and trainers must compute alike, and the shared mathematics.
OPEN_TO_ALL = {
    "rollstock.testing",
    "rollstock.compression",
    "rollstock.dispatch",
    "rollstock.routing",
    "rollstock.uniforms",
    "rollstock.algorithms.functional",
}
# Words that are a plugin's name and much else besides; elsewhere in the core they mean the other thing.
EVERYDAY_WORDS = {
    "environment", "none", "torch", "local", "rule", "native", "cpu", "jsonl", "console", "topk", "model", "int8", "shm"
}  # fmt: skip
# Where a concrete plugin may be named in the core: data, in one place each.
NAMING_PLACES = ("defaults.py", "scaffold/example.py")


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "templates" not in path.parts and "__pycache__" not in path.parts:
                yield path


def imported(path: Path) -> Iterator[tuple[str, str, int]]:
    """Every rollstock module that a file imports from, the name that it takes (empty for the module), and the line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "rollstock":
                    yield alias.name, "", node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            if (node.module or "").split(".")[0] == "rollstock":
                for alias in node.names:
                    yield node.module or "", alias.name, node.lineno


def is_within(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def where(path: Path, line: int = 0) -> str:
    return f"{path.relative_to(ROOT)}{f':{line}' if line else ''}"


def test_the_core_imports_nothing_from_the_other_folders() -> None:
    offences = [
        f"{where(path, line)} imports {module}.{name}"
        for path in sources("core")
        for module, name, line in imported(path)
        if any(is_within(module, package) or is_within(f"{module}.{name}", package) for package in OUTER)
    ]
    assert not offences


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != "core"])
def test_the_other_folders_import_public_names_of_the_core_and_never_each_other(folder: str) -> None:
    def is_allowed(module: str, name: str) -> bool:
        if module == "rollstock":
            return bool(name)
        return any(is_within(f"{module}.{name}", package) for package in (FOLDERS[folder], *OPEN_TO_ALL))

    offences = [
        f"{where(path, line)} imports {module}.{name}"
        for path in sources(folder)
        for module, name, line in imported(path)
        if not is_allowed(module, name)
    ]
    assert not offences


def code_words(path: Path) -> Iterator[tuple[str, int]]:
    """The identifiers of a file and the words of its texts, without its docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from ((word, node.lineno) for word in re.findall(r"\w+", node.value))
        elif isinstance(node, (ast.Name, ast.Attribute)):
            yield getattr(node, "id", getattr(node, "attr", "")), node.lineno


def test_the_core_names_no_concrete_plugin() -> None:
    names = {entry.name for entry in discover().values() if entry.distribution == "rollstock"} - EVERYDAY_WORDS
    offences = [
        f"{where(path, line)} names {word}"
        for path in sources("core")
        if not where(path).removeprefix("core/").startswith(NAMING_PLACES)
        for word, line in code_words(path)
        if word in names
    ]
    assert not offences


def test_files_are_short() -> None:
    lengths = {where(path): len(path.read_text().splitlines()) for path in sources(*FOLDERS)}
    assert not {path: length for path, length in lengths.items() if length > 650}
    assert sum(length < 350 for length in lengths.values()) >= 0.9 * len(lengths)
    assert statistics.median(lengths.values()) <= 130


def test_functions_are_short() -> None:
    lengths = {
        f"{where(path, node.lineno)} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in sources(*FOLDERS)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    long = {name: length for name, length in lengths.items() if length > 60}
    assert len(long) <= 0.01 * len(lengths), long
    assert not {name: length for name, length in long.items() if length > 90}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_module_says_what_it_is_for(folder: str) -> None:
    assert not [where(path) for path in sources(folder) if not ast.get_docstring(ast.parse(path.read_text()))]
