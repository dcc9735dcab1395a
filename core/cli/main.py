"""Where the command line begins: arguments parsed, a command called, and whatever goes wrong turned into one
message.
"""

from __future__ import annotations

import argparse
import errno
import logging
import sys
import traceback
from collections.abc import Sequence

from rollstock.cli.output import Output
from rollstock.cli.parser import parse
from rollstock.cli.streams import guarded_streams
from rollstock.errors import RollstockError, RunError, UserError
from rollstock.folders import NO_ROOM, REFUSED, path_error

INTERRUPTED = 1
_OF_PATHS = (REFUSED - {errno.ENOENT}) | NO_ROOM  # what is missing may be a bug's: then the traceback is wanted


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; `arguments` default to the process's own. Returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with guarded_streams() as streams:
        output = Output(as_json="--json" in given)
        try:
            code = _run(given, output)
        except SystemExit as exit:  # argparse has answered, with help
            if not streams.lost:
                raise
            code = exit.code if isinstance(exit.code, int) else 0
        if streams.lost:
            print(f"error: standard output cannot be written: {streams.lost}; some of it is missing", file=sys.stderr)
            code = code or RunError.exit_code
    return code


def _run(given: Sequence[str], output: Output) -> int:
    debug = "--debug" in given
    try:
        options = parse(given)
        _set_up_logging(debug)
        return _call(options, output)
    except argparse.ArgumentError as error:
        return _fail(output, UserError(str(error)), debug)
    except RollstockError as error:
        return _fail(output, error, debug)
    except KeyboardInterrupt:
        output.error("interrupted", "Interrupted")
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None and error.errno in _OF_PATHS:
            told = path_error(error, f"the path {str(error.filename)!r} cannot be used", "choose another")
            return _fail(output, told, debug)
        traceback.print_exc()  # a bug, or a plugin's: here the traceback is the message
        output.error(f"{type(error).__name__}: {error}", type(error).__name__, notes=getattr(error, "__notes__", ()))
        return RunError.exit_code


def _call(options: argparse.Namespace, output: Output) -> int:
    """Run the command. A plugin, or a file that it loads, that calls `sys.exit` must not end it without a word."""
    try:
        code: int = options.command(options, output)
    except SystemExit as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        failure = RunError(f"{place.filename}:{place.lineno} called exit({error.code!r}), which ended the command")
        for note in getattr(error, "__notes__", ()):
            failure.add_note(note)
        raise failure from error
    return code


def _fail(output: Output, error: RollstockError, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    output.error(str(error), type(error).__name__, notes=getattr(error, "__notes__", ()))
    return error.exit_code


class _OneLine(logging.Formatter):
    """Leaves tracebacks to the log file: what the user did wrong is said in a sentence at the end."""

    def format(self, record: logging.LogRecord) -> str:
        bare = logging.makeLogRecord({**vars(record), "exc_info": None, "exc_text": None})
        return super().format(bare)


def _set_up_logging(debug: bool) -> None:
    """Warnings go to standard error in one line each; `--debug` shows everything that rollstock logs."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.DEBUG if debug else logging.WARNING)
    handler.setFormatter((logging.Formatter if debug else _OneLine)("%(levelname)s: %(message)s"))
    log = logging.getLogger("rollstock")
    log.setLevel(logging.DEBUG if debug else logging.INFO)
    log.handlers[:] = [handler]
