"""`rollstock plugins`: what is installed, what one of them can be told, and whether they work.

Listing and showing import no plugin; `check` imports those that it checks.
"""

from __future__ import annotations

import argparse
from typing import Any

from rollstock.blocking import block_rules, blocked_by
from rollstock.cli.output import Output
from rollstock.discovery import Catalogue, PluginEntry, discover
from rollstock.errors import PluginError, UserError
from rollstock.kinds import KINDS
from rollstock.options import Option
from rollstock.plugin import PLUGIN_API
from rollstock.static import describe_statically, docstring, missing_extras, stated_api


def plugins(options: argparse.Namespace, output: Output) -> int:
    """List the plugins, of one kind or all; or `show KIND:NAME`, or `check [NAME]`."""
    match options.query:
        case [] | [_] if options.query not in (["show"], ["check"]):
            return _list(options.query[0] if options.query else None, output)
        case ["show", name]:
            return _show(name, output)
        case ["check", *names] if len(names) < 2:
            return _check(names[0] if names else None, output)
    raise UserError(
        "write rollstock plugins [KIND], rollstock plugins show KIND:NAME, or rollstock plugins check [NAME]"
    )


def _list(kind: str | None, output: Output) -> int:
    catalogue = discover()
    entries = list(catalogue.values()) if kind is None else list(catalogue.of_kind(kind).values())
    conflicts = {id: why for id, why in catalogue.conflicts.items() if kind is None or id.startswith(f"{kind}:")}
    rules = block_rules()
    if output.as_json:
        output.json(
            {"plugins": [_facts(entry, rules) for entry in entries], "conflicts": conflicts, "strays": catalogue.strays}
        )
        return 0
    rows = [(entry.id, entry.provenance, _status(entry, rules) or entry.summary) for entry in entries]
    output.table(("PLUGIN", "FROM", "WHAT IT IS"), rows)
    for reason in conflicts.values():
        output.line(f"\nCONFLICT: {reason}")
    for stray in catalogue.strays:
        output.line(f"\nNOT A PLUGIN: {stray}")
    if not entries:
        output.line(f"No plugin{f' of the kind {kind}' if kind else ''} is installed.")
    return 0


def _facts(entry: PluginEntry, rules: dict[str, str]) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "name": entry.name,
        "module": entry.module,
        "distribution": entry.distribution,
        "version": entry.version,
        "summary": entry.summary,
        "missing": missing_extras(entry),
        "blocked_by": blocked_by(rules, entry.kind, entry.name),
        "api": stated_api(entry),
    }


def _status(entry: PluginEntry, rules: dict[str, str]) -> str:
    """Why a plugin cannot be used as things are; empty if nothing is known to be in the way."""
    blocker = blocked_by(rules, entry.kind, entry.name)
    if blocker:
        return f"(blocked by {blocker}) {entry.summary}"
    api = stated_api(entry)
    if api not in (None, PLUGIN_API):
        return f"(written for plugin API {api}, and this is {PLUGIN_API}) {entry.summary}"
    missing = missing_extras(entry)
    return f"(needs: pip install '{missing[0]}') {entry.summary}" if missing else ""


def _show(query: str, output: Output) -> int:
    entry = _one(discover(), query)
    described = describe_statically(entry)
    if output.as_json:
        found = None if described is None else [_option_facts(option) for option in described]
        output.json({**_facts(entry, block_rules()), "description": docstring(entry), "options": found})
        return 0
    output.line(f"{entry.id}  ({entry.provenance}, module {entry.module})")
    status = _status(entry, block_rules())
    if status:
        output.line(status)
    output.line(f"\n{docstring(entry)}\n")
    if described is None:
        output.line("Its options cannot be told from its source.")
    elif not described:
        output.line("It has no options.")
    else:
        output.line("Options:")
        for option in described:
            default = " (required)" if option.required else f" = {option.shown_default}"
            output.line(f"  {option.name}: {option.type}{default}")
            output.line(f"      {option.help}{f' ({option.bounds})' if option.bounds else ''}")
    kind = KINDS[entry.kind]
    if kind.section:
        section = f"{{name: {entry.name}}}"
        output.line(f"\nIn a config:\n  {kind.section}: {f'[{section}]' if kind.many else section}")
    return 0


def _one(catalogue: Catalogue, query: str) -> PluginEntry:
    """The one plugin that is meant; PluginError if there are several, or none."""
    found = [entry for entry in catalogue.select(query) if query != entry.kind or query == entry.name]
    if len(found) != 1:
        names = [entry.id for entry in found or catalogue.select(query)]
        raise PluginError(f"{query!r} is not one plugin: say which of {', '.join(names)}")
    return found[0]


def _option_facts(option: Option) -> dict[str, Any]:
    facts = {key: value for key, value in vars(option).items() if value is not None or key == "default"}
    return {**facts, "default": None if option.required else option.default, "required": option.required}


def _check(query: str | None, output: Output) -> int:
    from rollstock.manager import make_manager

    manager = make_manager()
    entries = list(manager.catalogue.values()) if query is None else manager.catalogue.select(query)
    reasons = {entry.id: manager.check(entry) for entry in entries}
    reasons |= manager.catalogue.conflicts if query is None else {}
    broken = {id: reason for id, reason in reasons.items() if reason is not None}
    if output.as_json:
        output.json({"checked": list(reasons), "broken": broken})
    else:
        output.table(("PLUGIN", "RESULT"), [(id, reason or "works") for id, reason in reasons.items()])
        output.line(f"\n{len(reasons) - len(broken)} of {len(reasons)} can be used")
    return PluginError.exit_code if broken else 0
