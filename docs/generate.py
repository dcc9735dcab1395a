"""Write the pages of docs/reference from the code: hooks, options, plugins and commands.

For `make docs`; a test compares what is written with what is committed. Plugins are described from their source, so
optional packages need not be installed, and only those of rollstock itself are described. `--check` writes nothing, and
has the exit code 1 where a page is not what it would write.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path

import rollstock
from rollstock import hookspecs
from rollstock.cli import main as command_line
from rollstock.cli.parser import command_names
from rollstock.defaults import DEFAULT_PLUGINS
from rollstock.discovery import PluginEntry, discover
from rollstock.kinds import KINDS
from rollstock.options import Option, describe_options, field_types
from rollstock.schema import CORE_ROLES, RoleSection, RunConfig
from rollstock.static import describe_statically, docstring

REFERENCE = Path(__file__).resolve().parent / "reference"
NOTE = "<!-- Written by docs/generate.py from the code: change it there. -->"
COLUMNS = "80"


def hooks() -> str:
    """Every hook with its signature, its docstring, and the example of the docstring as a block that runs."""
    tree = ast.parse(inspect.getsource(hookspecs))
    specs = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    providers = {kind.provider for kind in KINDS.values()}
    parts = [
        NOTE,
        "# Hooks",
        "A hook is a function that a plugin implements, marked with `@hookimpl` and matched by name. Arguments are "
        "matched by name as well, and an implementation may leave some out. The specifications are in "
        "`rollstock.hookspecs`.",
        "Providers come first, one for each kind of plugin. Then come the stages of a step and the events of a run, in "
        "the order in which a run fires them.",
        "## Providers",
        *(_hook(spec) for spec in specs if spec.name in providers),
        "## Stages and events",
        "A stage is a first-result hook: implementations are asked in turn, and the first result that is not `None` "
        "counts. The core's own implementation comes last. Events go to everyone who listens.",
        *(_hook(spec) for spec in specs if spec.name not in providers),
    ]
    return "\n\n".join(parts) + "\n"


def _hook(spec: ast.FunctionDef) -> str:
    """One hook: heading, signature, what its docstring says."""
    returns = f" -> {ast.unparse(spec.returns)}" if spec.returns else ""
    stage = " (first result)" if any("firstresult=True" in ast.unparse(mark) for mark in spec.decorator_list) else ""
    text, _, example = (ast.get_docstring(spec) or "").partition("\nExample:\n")
    prose = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))
    code = textwrap.dedent(example).strip("\n")
    lines = [f"### {spec.name}", f"`{spec.name}({ast.unparse(spec.args)}){returns}`{stage}", prose]
    return "\n\n".join([*lines, f"```python\n{_imports(code)}\n\n{code}\n```"])


def _imports(code: str) -> str:
    """The import statement for the public names of rollstock that an example uses where it is defined."""
    names = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    used = [name for name in rollstock.__all__ if name in names]
    return f"from rollstock import {', '.join(sorted(used, key=lambda name: (name[0].islower(), name)))}\n"


def options() -> str:
    """The sections of a config: the core's own, then those of each built-in plugin."""
    types = field_types(RunConfig)
    top, own = [], []
    for field in fields(RunConfig):
        if not field.init:
            continue
        kind = next((kind for kind in KINDS.values() if kind.section == field.name), None)
        default = _plugin_default(field.name) if kind else "required" if field.name == "model" else "see below"
        holds = (
            f"a list of {kind.name} plugins"
            if kind and kind.many
            else f"a plugin: {kind.name}"
            if kind
            else "a section"
        )
        top.append((f"`{field.name}`", holds, default, str(field.metadata["rollstock.option"]["help"])))
        if kind is None and field.name != "roles":
            about = (inspect.getdoc(types[field.name]) or "").splitlines()[0]
            own += [f"### {field.name}", about, _table(describe_options(types[field.name]))]
    own += [
        "### roles",
        _rows(("role", "what it is"), [(f"`{role}`", about) for role, about in CORE_ROLES.items()]),
        "Extensions may bring others. Each may have:",
        _table(describe_options(RoleSection)),
    ]
    parts = [
        NOTE,
        "# Options",
        "A config is a YAML file of these sections. On the command line, `section.option=value` overrides a value. "
        "`rollstock config CONFIG` prints all values, and where each came from.",
        _rows(("section", "what it holds", "default", "meaning"), top),
        "The section of a plugin is `{name: ..., <its options>}`; a name alone is short for `{name: ...}`.",
        "## Sections of the core",
        *own,
        "## Options of the built-in plugins",
        *(part for entry in _built_in() for part in _plugin(entry)),
    ]
    return "\n\n".join(parts) + "\n"


def _plugin_default(section: str) -> str:
    """The plugins of a section that a config does not mention."""
    if section not in DEFAULT_PLUGINS:
        optional = any(kind.optional and kind.section == section for kind in KINDS.values())
        return "`[]`" if section == "extensions" else "`none`" if optional else "required"
    default = DEFAULT_PLUGINS[section]
    return f"`[{', '.join(default)}]`" if isinstance(default, list) else f"`{default}`"


def _plugin(entry: PluginEntry) -> list[str]:
    described = describe_statically(entry)
    if described is None:
        raise ValueError(f"the options of {entry.id} cannot be told from its source")
    return [f"### {entry.id}", f"{entry.summary}.", _table(described) if described else "It has no options."]


def plugins() -> str:
    """All kinds, and all built-in plugins with what they say of themselves."""
    kinds = [
        (f"`{kind.name}`", kind.role, f"`{kind.section}`" if kind.section else "none yet", f"`{kind.group}`",
         f"`rollstock.{kind.interface}`")
        for kind in KINDS.values()
    ]  # fmt: skip
    rows = [(f"[`{entry.id}`](options.md#{entry.id.replace(':', '')})", entry.summary) for entry in _built_in()]
    parts = [
        NOTE,
        "# Plugins",
        "`rollstock plugins` lists what is installed, from other packages too; `rollstock plugins show KIND:NAME` "
        "describes one.",
        "## Kinds",
        _rows(("kind", "in the loop it", "section of the config", "entry-point group", "interface"), kinds),
        "## Built in",
        "Where a plugin needs a package that is not installed, the error says which extra brings it.",
        _rows(("plugin", "what it is"), rows),
        *(f"### {entry.id}\n\n{docstring(entry)}" for entry in _built_in()),
    ]
    return "\n\n".join(parts) + "\n"


def _built_in() -> list[PluginEntry]:
    return [entry for entry in discover().values() if entry.distribution == "rollstock"]


def _table(described: Iterable[Option]) -> str:
    rows = []
    for option in described:
        default = option.shown_default if option.required else f"`{option.shown_default}`"
        bounds = f" ({option.bounds})" if option.bounds else ""
        rows.append((f"`{option.name}`", f"`{option.type}`", default, f"{option.help}{bounds}"))
    return _rows(("option", "type", "default", "meaning"), rows)


def _rows(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a bar inside a cell is escaped, as GitHub wants it even within code."""
    lines = ["|".join(["", *(f" {cell} " for cell in headers), ""]), "|" + "---|" * len(headers)]
    for row in rows:
        cells = [" ".join(cell.split()).replace("|", "\\|") for cell in row]
        lines.append("|".join(["", *(f" {cell} " for cell in cells), ""]))
    return "\n".join(lines)


def commands() -> str:
    """The help of every command, as a terminal of 80 columns shows it."""
    parts = [
        NOTE,
        "# Commands",
        "Every command takes `--json`. Exit codes: 0 done, 1 the run failed, 2 the input is wrong.",
    ]
    for name in ["", *command_names()]:
        words = ["rollstock", *([name] if name else []), "--help"]
        parts += [f"## rollstock {name}".rstrip(), f"```console\n$ {' '.join(words)}\n{_help(words[1:])}\n```"]
    return "\n\n".join(parts) + "\n"


def _help(arguments: list[str]) -> str:
    printed = io.StringIO()
    before = dict(os.environ)
    os.environ |= {"COLUMNS": COLUMNS, "NO_COLOR": "1"}
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            command_line(arguments)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return re.sub(r"[ \t]+$", "", printed.getvalue(), flags=re.M).strip("\n")


PAGES: dict[str, Callable[[], str]] = {
    "hooks.md": hooks, "options.md": options, "plugins.md": plugins, "cli.md": commands,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args(arguments).check
    stale = []
    for name, write in PAGES.items():
        path, text = REFERENCE / name, write()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(f"docs/reference/{name}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"{'not up to date, run make docs' if check else 'wrote'}: {', '.join(stale)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
