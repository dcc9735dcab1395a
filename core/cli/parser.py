"""The arguments of every command, and the help texts that go with them."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rollstock.errors import UserError, suggest
from rollstock.kinds import KINDS

_DASHED_OVERRIDE = re.compile(r"--?\w+(\.\w+)+=.*", re.DOTALL)

Command = Callable[[argparse.Namespace, Any], int]


class _Parser(argparse.ArgumentParser):
    """argparse, with its errors in the house style."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command line; `command` among them is the function to call. Raises UserError.

    `--help` and `--version` print and exit.
    """
    parser, commands = _build()
    words = [argument for argument in arguments if not argument.startswith("-")]
    if not arguments:
        arguments = ["--help"]
    elif words and words[0] not in commands:
        raise UserError(f"there is no command {words[0]!r}. {suggest(words[0], commands)}")
    options, rest = parser.parse_known_args(arguments)
    # argparse takes no positional arguments after an option once it has seen some: `CONFIG --dry-run key=value`
    late = [argument for argument in rest if not argument.startswith("-")]
    if late and hasattr(options, "overrides"):
        options.overrides += late
        rest = [argument for argument in rest if argument.startswith("-")]
    dashed = [argument.lstrip("-") for argument in rest if _DASHED_OVERRIDE.fullmatch(argument)]
    if dashed and hasattr(options, "overrides"):
        parser.error(f"a value is overridden without dashes: {dashed[0]}")
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options


def command_names() -> list[str]:
    """The commands, in the order in which `--help` lists them."""
    return _build()[1]


def _build() -> tuple[_Parser, list[str]]:
    parser = _Parser(prog="rollstock", description="Reinforcement learning of language models and control policies.")
    parser.add_argument("--version", action="version", version=f"rollstock {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    common = _Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON")
    common.add_argument("--debug", action="store_true", help="show the traceback of an error, and everything logged")

    def add(name: str, function: str, help: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help, parents=[common])
        command.set_defaults(command=_lazy(function))
        return command

    _add_runs(add)
    _add_looks(add)
    _add_new(add("new", "tools:new", "write a plugin package that installs, passes its tests and trains"))
    return parser, list(commands.choices)


def _add_runs(add: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    train = add("train", "runs:train", "train, as a config says")
    _add_config(train)
    train.add_argument("--dry-run", action="store_true", help="make every part of the run, take no step, write nothing")
    train.add_argument("--overwrite", action="store_true", help="throw away the run that is in the directory")
    _add_profile(train)
    resume = add("resume", "runs:resume", "go on with a run from its newest checkpoint")
    resume.add_argument("run", metavar="RUN", type=Path, help="the run's directory")
    resume.add_argument("--step", type=int, help="go on from the checkpoint of this step")
    _add_profile(resume)
    evaluate = add("eval", "runs:evaluate", "evaluate a run's checkpoint on held-out tasks")
    evaluate.add_argument("run", metavar="RUN", type=Path, help="the run's directory")
    evaluate.add_argument("--step", type=int, help="evaluate the checkpoint of this step")
    export = add("export", "runs:export", "write a run's model in Hugging Face format")
    export.add_argument("run", metavar="RUN", type=Path, help="the run's directory")
    export.add_argument("--to", metavar="DIR", type=Path, required=True, help="the directory to write")
    export.add_argument("--step", type=_step, help="export the checkpoint of this step, or `best`; default: the newest")
    export.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="of the weights")


def _add_looks(add: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    plugins = add("plugins", "plugins:plugins", "list plugins; show one with its options; check that they work")
    plugins.usage = "rollstock plugins [KIND] | plugins show KIND:NAME | plugins check [NAME]"
    plugins.add_argument("query", metavar="KIND | show KIND:NAME | check [NAME]", nargs="*", help=", ".join(KINDS))
    _add_config(add("config", "config:config", "print a config in full, with where each value came from"))
    doctor = add("doctor", "tools:doctor", "look at machine, packages and plugins, and at what in a config will hurt")
    doctor.add_argument("config", metavar="CONFIG", nargs="?", type=Path, help="a config file")
    doctor.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="values put over the file's")
    report = add("report", "tools:report", "write a run's report, one HTML page")
    report.add_argument("run", metavar="RUN", type=Path, help="the run's directory")
    report.add_argument("--out", metavar="FILE", type=Path, help="where to write it; default: report.html in the run")


def _add_new(new: argparse.ArgumentParser) -> None:
    new.add_argument("what", metavar="plugin", choices=["plugin"], help="what to write: plugin")
    new.add_argument("kind", metavar="KIND", help=", ".join(KINDS))
    new.add_argument("name", metavar="NAME", help="the plugin's name, such as my_algo")
    new.add_argument("--dir", metavar="DIR", type=Path, default=Path(), help="where to put the package; default: here")


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", type=Path, help="a config file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="values put over the file's")


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile",
        action="store_true",
        help="show where the time and memory of a step go; writes profile/",
    )
    parser.add_argument(
        "--profile-steps",
        metavar="STEPS",
        help="those to profile, such as 3 or 2-3; default: the second that is run",
    )


def _step(text: str) -> int | str:
    """A step by number, or the words for the newest and the best."""
    if text in ("best", "last"):
        return text
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step's number nor `best` nor `last`")
    return int(text)


def _lazy(function: str) -> Command:
    """A command whose module is imported when it is called, so that `--help` need not."""
    module, _, name = function.partition(":")

    def call(options: argparse.Namespace, output: Any) -> int:
        code: int = getattr(importlib.import_module(f"rollstock.cli.{module}"), name)(options, output)
        return code

    return call


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("rollstock")
    except PackageNotFoundError:
        return "(not installed)"
