"""Finding and reading the source of a module without importing it, or the packages that hold it.

For whatever lists and describes plugins: importing one may take seconds, need a package that is not there, or fail.
What the source means is left to `rollstock.static`.
"""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import re
import sys
from collections.abc import Sequence
from pathlib import Path

_DOCSTRING = re.compile(r'(?:\s|#[^\n]*\n)*[rR]?("""|\'\'\'|"|\')')
_SUMMARY_BYTES = 4096


@functools.cache
def find_module(module: str) -> Path | None:
    """The source file of a module, or None if there is no such module, or it is not written in Python.

    Asks the import system's finders from the outermost package inwards, so that editable installs and namespace
    packages work, and runs no code of the packages on the way.
    """
    spec: importlib.machinery.ModuleSpec | None = None
    search: Sequence[str] | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _find_spec(".".join(parts[:depth]), search)
        if spec is None:
            return None
        search = _locations(spec)
        if search is None and depth < len(parts):
            return None
    if spec is None or not spec.has_location or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin)


def _find_spec(name: str, search: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        try:
            spec: importlib.machinery.ModuleSpec | None = find(name, search) if find else None
        except KeyError:  # a namespace package asks for the package around it, which is not imported
            spec = _namespace(name, search or ())
        if spec is not None:
            return spec
    return None


def _locations(spec: importlib.machinery.ModuleSpec) -> list[str] | None:
    """Where the submodules of a package are; None for a plain module."""
    if spec.submodule_search_locations is None:
        return None
    return list(spec.submodule_search_locations)


def _namespace(name: str, search: Sequence[str]) -> importlib.machinery.ModuleSpec:
    """The spec of a namespace package: its folders wherever the package around it has folders."""
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    folders = [Path(folder, name.rpartition(".")[2]) for folder in search]
    spec.submodule_search_locations = [str(folder) for folder in folders if folder.is_dir()]
    return spec


def read_source(module: str) -> str | None:
    """The text of a module, or None where `find_module` finds none or the file cannot be read."""
    path = find_module(module)
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def summary(module: str) -> str:
    """The first line of a module's docstring, without its full stop; empty if it has none."""
    path = find_module(module)
    if path is None:
        return ""
    try:
        with path.open("rb") as file:
            head = file.read(_SUMMARY_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
    match = _DOCSTRING.match(head)
    if match is None:
        return ""
    text = head[match.end() :].partition(match.group(1))[0].strip()
    return text.partition("\n")[0].strip().rstrip(".")


@functools.cache
def parse(module: str) -> ast.Module | None:
    """The syntax tree of a module, or None where there is no source or it is not valid Python."""
    source = read_source(module)
    try:
        return None if source is None else ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def constant(module: str, name: str) -> object:
    """The value of a module-level `name = <literal>`, or None if there is no such line."""
    tree = parse(module)
    for node in tree.body if tree else ():
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return literal(getattr(node, "value", None))
    return None


def literal(node: ast.AST | None) -> object:
    """The value of an expression of literals alone; None for any other."""
    try:
        value: object = ast.literal_eval(node) if isinstance(node, ast.expr) else None
    except (ValueError, TypeError, SyntaxError):
        return None
    return value
