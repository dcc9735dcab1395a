"""`rollstock doctor`, `report` and `new`: what helps before, after and around a run."""

from __future__ import annotations

import argparse
import dataclasses

from rollstock.cli.output import Output
from rollstock.errors import UserError


def report(options: argparse.Namespace, output: Output) -> int:
    """Write a run's report."""
    from rollstock.report import write_report

    path = write_report(options.run, options.out)
    if output.as_json:
        output.json({"path": str(path)})
    output.line(f"wrote {path}")
    return 0


def doctor(options: argparse.Namespace, output: Output) -> int:
    """Look at machine, packages and plugins, and at a config; exit code 2 if something will fail."""
    from rollstock.cli.runs import prepare_environment
    from rollstock.config import load_config
    from rollstock.doctor import diagnose

    prepare_environment()
    config = None if options.config is None else load_config(options.config, options.overrides)
    findings = diagnose(config)
    if output.as_json:
        output.json({"findings": [dataclasses.asdict(finding) for finding in findings]})
    marks = {"error": "ERROR", "warning": "warning", "info": "info", "ok": "ok"}
    rows = [
        (
            marks[finding.severity],
            finding.subject,
            finding.message + (f" -> {finding.advice}" if finding.advice else ""),
        )
        for finding in findings
    ]
    output.table(("", "SUBJECT", "FINDING"), rows)
    return UserError.exit_code if any(finding.is_bad for finding in findings) else 0


def new(options: argparse.Namespace, output: Output) -> int:
    """Write a plugin package."""
    from rollstock.kinds import get_kind
    from rollstock.scaffold import new_plugin

    path = new_plugin(get_kind(options.kind).name, options.name, options.dir)
    if output.as_json:
        output.json({"path": str(path)})
    output.line(f"wrote {path}; next: cd {path} && pip install -e '.[dev]' && pytest")
    return 0
