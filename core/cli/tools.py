"""`rollstock doctor`, `report` and `new`: what helps before, after and around a run."""

from __future__ import annotations

import argparse

from rollstock.cli.output import Output


def report(options: argparse.Namespace, output: Output) -> int:
    """Write a run's report."""
    from rollstock.report import write_report

    path = write_report(options.run, options.out)
    if output.as_json:
        output.json({"path": str(path)})
    output.line(f"wrote {path}")
    return 0
