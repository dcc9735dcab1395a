"""What commands print: tables and lines for people, JSON for scripts.

With rich on a terminal, in plain lines elsewhere; rich is imported only where there is a terminal. Errors go to
standard error, with `--json` as an object on standard output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any


class Output:
    """Standard output, in the form that was asked for."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self._rich = not as_json and sys.stdout.isatty()

    @contextmanager
    def others(self) -> Iterator[None]:
        """A stretch in which others print: with JSON asked for, to standard error, so that the output stays JSON."""
        with redirect_stdout(sys.stderr) if self.as_json else nullcontext():
            yield

    def json(self, data: Any) -> None:
        """Print data as JSON; what JSON has no word for is printed as text."""
        print(json.dumps(data, indent=2, ensure_ascii=False, default=str))

    def line(self, text: str = "") -> None:
        """Print a line, unless JSON was asked for."""
        if not self.as_json:
            print(text)

    def table(self, headers: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> None:
        """Print a table, unless JSON was asked for; the last column takes the room that is left."""
        if self.as_json:
            return
        if self._rich:
            self._rich_table(headers, list(rows), title)
            return
        cells = [list(headers), *([*row] for row in rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
        if title:
            print(title)
        for row in cells:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

    def _rich_table(self, headers: Sequence[str], rows: list[Sequence[str]], title: str) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for number, header in enumerate(headers):
            table.add_column(header, no_wrap=number == 0, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        Console().print(table)

    def error(self, message: str, kind: str, *, notes: Iterable[str] = ()) -> None:
        """Say what went wrong: a sentence on standard error, an object on standard output with `--json`."""
        sys.stdout.flush()
        if self.as_json:
            self.json({"error": {"type": kind, "message": message, "notes": list(notes)}})
            return
        lines = [f"error: {message}", *(f"  {note}" for note in notes)]
        if sys.stderr.isatty():
            lines[0] = f"\033[1;31merror:\033[0m {message}"
        print("\n".join(lines), file=sys.stderr)
