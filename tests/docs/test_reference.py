"""The generated reference: up to date, complete, and with examples that the plugin manager takes."""

import inspect
import re
import tomllib
from pathlib import Path
from types import ModuleType

import generate
import pluggy
import pytest

from rollstock import hookspecs
from rollstock.discovery import discover
from rollstock.kinds import KINDS

HOOKS = [name for name in vars(hookspecs) if name.startswith("rollstock_")]
REFERENCE = Path(generate.REFERENCE)
ROOT = REFERENCE.parent.parent


@pytest.mark.parametrize("page", generate.PAGES)
def test_what_is_committed_is_what_would_be_written(page: str) -> None:
    committed = (REFERENCE / page).read_text(encoding="utf-8")
    assert committed == generate.PAGES[page](), f"docs/reference/{page} is not up to date: run `make docs`"


def section(page: str, heading: str) -> str:
    """What a page says under a heading."""
    parts = re.split(r"^#+ (.+)$", (REFERENCE / page).read_text(encoding="utf-8"), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[heading]


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented_with_its_exact_signature(hook: str) -> None:
    function = getattr(hookspecs, hook)
    parameters = ", ".join(f"{p.name}: {p.annotation}" for p in inspect.signature(function).parameters.values())
    said = section("hooks.md", hook)
    assert f"`{hook}({parameters}) -> {inspect.signature(function).return_annotation}`" in said
    assert ("(first result)" in said) == function.rollstock_spec["firstresult"]
    prose = " ".join(function.__doc__.partition("Example:")[0].split())
    assert prose in " ".join(said.split())
    assert "Called " in prose
    assert re.search("return|first result|is refused", prose, re.I)


@pytest.mark.parametrize("hook", HOOKS)
def test_the_example_of_every_hook_can_be_registered(hook: str) -> None:
    [example] = re.findall(r"```python\n(.*?)```", section("hooks.md", hook), flags=re.S)
    module = ModuleType(hook)
    exec(compile(example, hook, "exec"), vars(module))
    manager = pluggy.PluginManager("rollstock")
    manager.add_hookspecs(hookspecs)
    manager.register(module)
    manager.check_pending()
    assert [caller.name for caller in manager.get_hookcallers(module) or ()] == [hook]


def test_every_built_in_plugin_and_kind_is_described() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    ids = {f"{group.removeprefix('rollstock.')}:{name}" for group, names in declared.items() for name in names}
    ids = {id for id in ids if not id.startswith("pytest11")}
    assert ids == {entry.id for entry in discover().values() if entry.distribution == "rollstock"}, (
        "install rollstock anew"
    )
    options, plugins = ((REFERENCE / page).read_text(encoding="utf-8") for page in ("options.md", "plugins.md"))
    for id in ids:
        assert f"\n### {id}\n" in options
        assert f"\n### {id}\n" in plugins
    for kind in KINDS:
        assert f"\n| `{kind}` |" in plugins


def test_default_dependencies_are_justified() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    names = [re.match(r"[\w-]+", requirement)[0] for requirement in declared]
    page = (ROOT / "docs" / "explanation" / "dependencies.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `([\w-]+)` \|(.*)\|$", page, flags=re.M)
    assert [name for name, _ in table] == names
    for name, rest in table:
        cells = [cell.strip() for cell in rest.split("|")]
        assert len(cells) == 3, name
        assert all(cells), name
