"""A plugin package written to disk: names checked, templates filled in, and all of it there or nothing."""

from __future__ import annotations

import keyword
import re
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from rollstock.defaults import DEFAULT_PLUGINS
from rollstock.discovery import discover
from rollstock.errors import PluginError, UserError
from rollstock.folders import folder_for, path_error
from rollstock.interfaces.transport import Transport
from rollstock.kinds import Kind, get_kind
from rollstock.scaffold.example import example_config
from rollstock.sources import find_module

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_PLACE = re.compile(r"<<(\w+)>>")


def new_plugin(kind: str, name: str, directory: Path | str = ".") -> Path:
    """Write the package `rollstock-NAME` into `directory`: a small working plugin, its test, an example config.

    Returns the package's directory. Raises UserError for a kind that does not exist, a name that is no lower-case
    identifier or is taken, a directory that exists, and a disk that refuses.
    """
    found = get_kind(kind)
    _check_name(found, name)
    values = _values(found, name)
    target = Path(directory) / values["distribution"]
    if target.exists():
        raise UserError(f"{target} exists already: choose another name, or another place with --dir")
    try:
        with (
            folder_for(Path(directory)),
            tempfile.TemporaryDirectory(prefix=".rollstock-", dir=directory) as folder,
        ):
            made = Path(folder) / target.name
            _write(made, found, values)
            made.rename(target)
    except OSError as error:
        raise path_error(
            error, f"the package cannot be written to {target}", "choose another place with --dir"
        ) from error
    return target


def _check_name(kind: Kind, name: str) -> None:
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        folded = re.sub(r"\W+", "_", name).strip("_").lower()
        usable = _NAME.fullmatch(folded) and not keyword.iskeyword(folded)
        hint = f": how about {folded!r}?" if usable else ", such as 'my_algo'"
        raise PluginError(
            f"{name!r} cannot be a plugin's name: it is a lower-case word of letters, digits and underscores{hint}"
        )
    catalogue = discover()
    id = f"{kind.name}:{name}"
    if id in catalogue.conflicts:
        raise PluginError(catalogue.conflicts[id], id)
    if id in catalogue:
        raise PluginError(f"the name {id} is taken by {catalogue[id].provenance}: choose another", id)
    module = _module_name(name)
    if find_module(module) is not None:
        raise PluginError(f"there is a module {module!r} already, which a plugin {name!r} would hide: choose another")


def _module_name(name: str) -> str:
    return f"rollstock_{name}"


def _values(kind: Kind, name: str) -> dict[str, str]:
    """What the templates' places are filled with."""
    config = example_config(kind, name)
    needs_processes = kind.interface == Transport.__name__
    used = f" `transport: {name}` chooses it in runs whose workers have processes of their own." * needs_processes
    return {
        "name": name,
        "kind": kind.name,
        "interface": kind.interface,
        "role": kind.role,
        "group": kind.group,
        "provider": kind.provider,
        "class": "".join(part.capitalize() for part in name.split("_") if part),
        "module": _module_name(name),
        "distribution": f"rollstock-{name.replace('_', '-')}",
        "version": _own_version(),
        "article": "an" if kind.name[0] in "aeiou" else "a",
        "default_device": str(DEFAULT_PLUGINS["device"]),
        "config": config,
        "used": used,
    }


def _own_version() -> str:
    try:
        return version("rollstock")
    except PackageNotFoundError:  # run from a source tree
        return "0"


def _write(root: Path, kind: Kind, values: dict[str, str]) -> None:
    templates = files("rollstock.scaffold") / "templates"
    package = root / "src" / values["module"]
    package.mkdir(parents=True)
    (root / "tests").mkdir()
    common, own = templates / "common", templates / kind.name
    places = {
        common / "pyproject.toml.in": root / "pyproject.toml",
        common / "README.md.in": root / "README.md",
        common / "gitignore.in": root / ".gitignore",
        common / "example.yaml.in": root / "example.yaml",
        own / "module.py.in": package / "__init__.py",
        own / "test.py.in": root / "tests" / f"test_{values['name']}.py",
    }
    for template, path in places.items():
        path.write_text(_fill(template, values), encoding="utf-8")
    (package / "py.typed").touch()


def _fill(template: Traversable, values: dict[str, str]) -> str:
    return _PLACE.sub(lambda place: values[place[1]], template.read_text(encoding="utf-8"))
