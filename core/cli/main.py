"""Where the command line begins: arguments parsed, a command called, and whatever goes wrong turned into one
message.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys
import traceback
from collections.abc import Sequence

from rollstock.cli.output import Output
from rollstock.cli.parser import parse
from rollstock.errors import RollstockError, RunError, UserError

INTERRUPTED = 1
_UNUSABLE_PATH = {
    *(errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; `arguments` default to the process's own. Returns the exit code."""
    _open_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    output = Output(as_json="--json" in given)
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
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _UNUSABLE_PATH and error.filename is not None:
            return _fail(output, _unusable_path(error), debug)
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


def _open_streams() -> None:
    """Let output go nowhere if the process was started with it closed (`>&-`): Python has None in its place."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # it stays open as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _unusable_path(error: OSError) -> UserError:
    """A path that the user gave and the system refuses, in words; whatever was noted beneath it is kept."""
    told = UserError(f"the path {str(error.filename)!r} cannot be used: {error.strerror}; choose another")
    for note in getattr(error, "__notes__", ()):
        told.add_note(note)
    return told


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
