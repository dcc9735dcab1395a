"""`rollstock train`, `resume`, `eval` and `export`: a run begun, gone on with, evaluated, or turned into a model to
keep.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstock.cli.output import Output
from rollstock.errors import RunError, UserError

if TYPE_CHECKING:
    from rollstock.launch import Outcome
    from rollstock.profile import ProfileSettings

_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",  # its threads and the reward processes, which are forked, do not go together
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # a broken driver package must not end a run on another chip
}


def train(options: argparse.Namespace, output: Output) -> int:
    """Begin a run."""
    profile = _profile(options)
    if profile is not None and options.dry_run:
        raise UserError("--dry-run takes no step, so there is nothing to profile; leave out one of the two")
    prepare_environment()
    from rollstock.config import load_config

    config = load_config(options.config, options.overrides)
    from rollstock.launch import train as launch

    with output.others():
        outcome = launch(config, dry_run=options.dry_run, overwrite=options.overwrite, profile=profile)
    return _end(outcome, output)


def resume(options: argparse.Namespace, output: Output) -> int:
    """Go on with a run."""
    profile = _profile(options)
    _expect_run(options.run)
    prepare_environment()
    from rollstock.launch import resume as launch

    with output.others():
        outcome = launch(options.run, step=options.step, profile=profile)
    return _end(outcome, output)


def evaluate(options: argparse.Namespace, output: Output) -> int:
    """Evaluate a run's checkpoint."""
    _expect_run(options.run)
    prepare_environment()
    from rollstock.launch import evaluate as launch

    with output.others():
        outcome = launch(options.run, step=options.step)
    for name, value in sorted(outcome.evaluation.items()):
        output.line(f"{name}: {value:.4g}")
    return _end(outcome, output)


def export(options: argparse.Namespace, output: Output) -> int:
    """Write a run's model in Hugging Face format."""
    prepare_environment()
    from rollstock.export import export as write
    from rollstock.model_card import auto_class

    with output.others():
        path = write(options.run, options.to, step=options.step, dtype=options.dtype)
    if output.as_json:
        output.json({"path": str(path)})
    output.line(f"wrote {path}; load it with transformers.{auto_class(path)}.from_pretrained({str(path)!r})")
    return 0


def _profile(options: argparse.Namespace) -> ProfileSettings | None:
    """What to profile; naming steps asks for it too."""
    if not options.profile and options.profile_steps is None:
        return None
    from rollstock.profile import ProfileSettings, parse_steps

    return ProfileSettings(steps=None if options.profile_steps is None else parse_steps(options.profile_steps))


def _expect_run(path: Path) -> None:
    """Refuse what is no run before torch is imported, which takes seconds."""
    from rollstock.rundir import RunDirectory

    RunDirectory.open(path)


def prepare_environment() -> None:
    """Set what torch and its companions read when they are imported, where the user has not."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not sys.stderr.isatty():  # a bar that is redrawn in a file is a page of control characters
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _end(outcome: Outcome, output: Output) -> int:
    """Say how a run ended; the exit code."""
    if output.as_json:
        output.json(dataclasses.asdict(outcome))
    if outcome.profile:
        _print_profile(outcome.profile, output)
    if outcome.status != "checked":
        output.line(f"{outcome.status} after step {outcome.step} in {outcome.seconds:.1f} s: {outcome.directory}")
    if outcome.message:
        output.line(outcome.message)
    return RunError.exit_code if outcome.status == "interrupted" else 0


def _print_profile(summary: Mapping[str, Any], output: Output) -> None:
    """The tables of a profile, and what must be known to read them."""
    from rollstock.profile.table import tables

    for title, headings, rows in tables(summary):
        output.table(headings, rows, title=title)
        output.line()
    for note in summary["notes"]:
        output.line(f"- {note}")
