"""A plugin's options and needs, read from its source without importing it.

For `rollstock plugins show` and the generated reference: a plugin can be described where its packages are missing, or
its import is slow. It follows names through `from ... import` and base classes; what a module builds at run time it
cannot know, and says so.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollstock.discovery import PluginEntry
from rollstock.extras import extra_for, extras_of
from rollstock.kinds import KINDS
from rollstock.options import REQUIRED, Option
from rollstock.plugin import API_CONSTANT
from rollstock.sources import constant, find_module, literal, parse, read_source

_IMPORTERS = frozenset({"import_optional", "import_module", "find_spec"})


class Source(str):
    """A default that is no literal, as it stands in the source."""

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class _Found:
    """A definition, and the module that it stands in."""

    module: str
    node: ast.stmt


def describe_statically(entry: PluginEntry) -> list[Option] | None:
    """The options of a plugin, as `describe_options` has them for its imported class; None if its source does not
    tell.
    """
    provider = _resolve(entry.module, KINDS[entry.kind].provider)
    if provider is None or not isinstance(provider.node, ast.FunctionDef):
        return None
    for statement in ast.walk(provider.node):
        if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Name):
            name = statement.value.id
            local = _look_up(provider.node.body, provider.module, name, frozenset())  # imported by the provider itself
            plugin = local or _resolve(provider.module, name)
            if plugin is not None and isinstance(plugin.node, ast.ClassDef):
                config = _config_class(plugin)
                return [] if config is None else list(_options(config).values())
    return None


def docstring(entry: PluginEntry) -> str:
    """The whole docstring of a plugin's module; empty if it has none."""
    tree = parse(entry.module)
    return (ast.get_docstring(tree) or "") if tree else ""


def missing_extras(entry: PluginEntry) -> list[str]:
    """The extras (`rollstock[wandb]`) that a plugin's module imports packages of, and that are not installed."""
    packages = set().union(*extras_of(entry.distribution).values())
    source = read_source(entry.module) or ""
    spellings = [package.replace("-", mark) for package in packages for mark in "_.-"]
    if not any(spelling in source for spelling in spellings):
        return []  # spares the parsing
    missing = set()
    for module in _imported(entry.module):
        extra = extra_for(module, [entry.distribution])
        if extra is not None and importlib.util.find_spec(module.partition(".")[0]) is None:
            missing.add(extra)
    return sorted(missing)


def stated_api(entry: PluginEntry) -> object:
    """The plugin API that a plugin's module states; None if it states none, or not as a literal."""
    if API_CONSTANT not in (read_source(entry.module) or ""):
        return None  # spares the parsing
    return constant(entry.module, API_CONSTANT)


def _imported(module: str) -> Iterator[str]:
    """Every module that a module imports, anywhere in it, by statement or by a function that imports what it is
    told.
    """
    for node in ast.walk(parse(module) or ast.Module([], [])):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and _name_of(node.func) in _IMPORTERS:
            name = literal(node.args[0])
            if isinstance(name, str):
                yield name


def _name_of(function: ast.expr) -> str:
    """The last name of what is called, `import_module` for `importlib.import_module`."""
    return str(getattr(function, "id", getattr(function, "attr", "")))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those within `if` and `try` among them."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements(node.body + node.orelse)
        elif isinstance(node, ast.Try):
            yield from _statements(node.body + [s for handler in node.handlers for s in handler.body] + node.orelse)


def _resolve(module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> _Found | None:
    """Where `name`, as `module` uses it, is defined: a class, a function or an assignment; imports are followed."""
    tree = parse(module)
    if tree is None or (module, name) in seen:
        return None
    return _look_up(tree.body, module, name, seen | {(module, name)})


def _look_up(body: list[ast.stmt], module: str, name: str, seen: frozenset[tuple[str, str]]) -> _Found | None:
    """Where the statements of a module or a function get `name` from."""
    for node in _statements(body):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return _Found(module, node)
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return _Found(module, node)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _resolve(_absolute(module, node), alias.name, seen)
    return None


def _refer(module: str, node: ast.expr) -> _Found | None:
    """What an expression refers to: a name, or a name in another module, `F.Kind`."""
    if isinstance(node, ast.Name):
        return _resolve(module, node.id)
    if isinstance(node, ast.Attribute):
        home = _module_named(module, ast.unparse(node.value))
        return None if home is None else _resolve(home, node.attr)
    return None


def _module_named(module: str, name: str) -> str | None:
    """The module that `module` has imported under `name`."""
    tree = parse(module)
    for node in _statements(tree.body) if tree else ():
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found = f"{_absolute(module, node)}.{alias.name}"
                if (alias.asname or alias.name) == name and find_module(found) is not None:
                    return found
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return alias.name
    return None


def _is_dataclass(node: ast.stmt) -> bool:
    decorators = node.decorator_list if isinstance(node, ast.ClassDef) else []
    return any(_name_of(d.func if isinstance(d, ast.Call) else d) == "dataclass" for d in decorators)


def _absolute(module: str, node: ast.ImportFrom) -> str:
    """The module that a `from` names, relative ones made absolute."""
    if node.level == 0:
        return node.module or ""
    path = find_module(module)
    parts = module.split(".")
    depth = node.level - 1 if path is not None and path.name == "__init__.py" else node.level
    return ".".join([*parts[: len(parts) - depth], *([node.module] if node.module else [])])


def _config_class(plugin: _Found) -> _Found | None:
    """The dataclass in the first base of a plugin class that binds one, looked for in its bases too; None for no
    options.
    """
    assert isinstance(plugin.node, ast.ClassDef)
    for base in plugin.node.bases:
        if isinstance(base, ast.Subscript):
            config = _refer(plugin.module, base.slice)
            if config is not None and isinstance(config.node, ast.ClassDef):
                return config
        parent = _refer(plugin.module, base.value if isinstance(base, ast.Subscript) else base)
        if parent is not None and isinstance(parent.node, ast.ClassDef):
            found = _config_class(parent)
            if found is not None:
                return found
    return None


def _options(config: _Found, prefix: str = "", given: dict[str, Any] | None = None) -> dict[str, Option]:
    """The options of a dataclass, those of its bases first, as `dataclasses` orders them; `given` are defaults that
    differ.
    """
    assert isinstance(config.node, ast.ClassDef)
    options: dict[str, Option] = {}
    for base in reversed(config.node.bases):
        parent = _refer(config.module, base)
        if parent is not None and isinstance(parent.node, ast.ClassDef):
            options |= _options(parent, prefix, given)
    for node in config.node.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = f"{prefix}{node.target.id}"
            inner = _refer(config.module, node.annotation)
            if inner is not None and _is_dataclass(inner.node):
                options |= _options(inner, f"{name}.", _keywords(config.module, _arguments(node.value).get("default")))
                continue
            option = _option(config.module, name, node.annotation, node.value)
            changed = (given or {}).get(node.target.id, option.default)
            options[name] = dataclasses.replace(option, default=changed)
    return options


def _arguments(value: ast.expr | None) -> dict[str, ast.expr]:
    """The arguments of a call of `option`, by name."""
    if not isinstance(value, ast.Call) or _name_of(value.func) != "option":
        return {}
    given = dict(zip(("default", "help"), value.args, strict=False))
    return given | {keyword.arg: keyword.value for keyword in value.keywords if keyword.arg}


def _keywords(module: str, node: ast.expr | None) -> dict[str, Any]:
    """The keyword arguments of a call such as `LoRAConfig(rank=8)`."""
    keywords = node.keywords if isinstance(node, ast.Call) else []
    return {keyword.arg: _value(module, keyword.value) for keyword in keywords if keyword.arg}


def _option(module: str, name: str, annotation: ast.expr, value: ast.expr | None) -> Option:
    known = {key: _value(module, node) for key, node in _arguments(value).items()}
    if value is not None and not known:  # a plain default, without `option`
        known = {"default": _value(module, value)}
    choices = known.get("choices")
    return Option(
        name=name,
        type=_type_name(module, annotation),
        default=known.get("default", REQUIRED),
        help=str(known.get("help", "")),
        minimum=known.get("minimum"),
        maximum=known.get("maximum"),
        choices=tuple(choices) if isinstance(choices, (list, tuple)) else None,
    )


def _value(module: str, node: ast.expr) -> Any:
    """A literal, `REQUIRED`, or the literal that a module-level name stands for; else the source text."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        pass  # no literal: a name, or something to be shown as it is written
    if _name_of(node) == "REQUIRED":
        return REQUIRED
    found = _refer(module, node)
    if found is not None and isinstance(found.node, (ast.Assign, ast.AnnAssign)) and found.node.value is not None:
        return _value(found.module, found.node.value)
    return Source(ast.unparse(node))


def _type_name(module: str, node: ast.expr) -> str:
    """A type as `rollstock.options.type_name` spells it; aliases are followed to what they stand for."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            return _type_name(module, ast.parse(node.value, mode="eval").body)
        return "none" if node.value is None else "..." if node.value is Ellipsis else repr(node.value)
    if isinstance(node, ast.BinOp):
        return f"{_type_name(module, node.left)} | {_type_name(module, node.right)}"
    if isinstance(node, ast.Subscript):
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        name = ast.unparse(node.value).rpartition(".")[2]
        if name == "Literal":
            return " | ".join(ast.unparse(item) for item in items)
        shown = [_type_name(module, item) for item in items]
        return f"{shown[0]} | none" if name == "Optional" else f"{name}[{', '.join(shown)}]"
    found = _refer(module, node)
    if found is not None and isinstance(found.node, (ast.Assign, ast.AnnAssign)) and found.node.value is not None:
        return _type_name(found.module, found.node.value)
    name = ast.unparse(node).rpartition(".")[2]
    return {"None": "none", "Any": "any"}.get(name, name)
