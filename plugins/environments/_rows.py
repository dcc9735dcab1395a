"""Rows of a data file, one at a time: JSON lines and parquet, read once from end to end and then by position.

For the `jsonl` environment. A file is never held in memory: an index of 16 bytes a row finds a JSON line again, and
of a parquet file a few row groups are kept. Every error names the file and the row (1-based; the line, for JSON
lines).
"""

from __future__ import annotations

import functools
import hashlib
import json
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rollstock import ConfigError, RunError, import_optional, nearest, suggest

Row: TypeAlias = dict[str, Any]
KEPT_ROW_GROUPS = 4


class RowError(ConfigError):
    """Something is wrong with one row of a data file."""

    def __init__(self, path: Path, row: int, reason: str) -> None:
        super().__init__(f"{path}, row {row}: {reason}")


class Rows(ABC):
    """A file of rows. Positions are 0-based and leave out blank lines; row numbers are what an editor shows."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def scan(self) -> Iterator[Row]:
        """Every row in order; to be exhausted before anything else is asked for. Raises RowError."""

    @abstractmethod
    def number(self, position: int) -> int:
        """The row number of a position."""

    @abstractmethod
    def get(self, position: int) -> Row:
        """The row at a position. Raises RunError if the file is no longer the one that was read."""

    @abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 of the file's bytes, in hexadecimal."""


class JsonLines(Rows):
    """One JSON object a line, in UTF-8."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._offsets = array("Q")
        self._numbers = array("Q")
        self._digest = ""

    def scan(self) -> Iterator[Row]:
        """Every line that is not blank."""
        digest = hashlib.sha256()
        offset = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                digest.update(line)
                if line.strip():
                    self._offsets.append(offset)
                    self._numbers.append(number)
                    yield parse_line(self.path, number, line)
                offset += len(line)
        self._digest = digest.hexdigest()

    def number(self, position: int) -> int:
        """The line of a position."""
        return self._numbers[position]

    def get(self, position: int) -> Row:
        """Read one line again."""
        with self.path.open("rb") as file:
            file.seek(self._offsets[position])
            line = file.readline()
        try:
            return parse_line(self.path, self.number(position), line)
        except RowError as error:
            raise RunError(f"{self.path} was changed while the run used it: {error}") from error

    def fingerprint(self) -> str:
        """Of the bytes that `scan` read."""
        return self._digest


class Parquet(Rows):
    """A parquet file, of which only `columns` are read (those of `optional` if it has them).

    Random access costs a row group: small ones are faster.
    """

    def __init__(self, path: Path, columns: Sequence[str], owner: object, optional: Sequence[str] = ()) -> None:
        super().__init__(path)
        self._parquet = import_optional("pyarrow.parquet", needed_by=owner)
        try:
            self._file = self._parquet.ParquetFile(path)
        except Exception as error:  # pyarrow has a dozen kinds
            raise ConfigError(f"{path} is not a parquet file: {error}") from error
        known = self._file.schema_arrow.names
        columns = [column for column in columns if column in known or column not in optional]
        for column in columns:
            if column not in known:
                raise ConfigError(f"{path} has no column {column!r}. {suggest(column, known)}")
        self._columns = columns
        self._starts = [0]
        for group in range(self._file.num_row_groups):
            self._starts.append(self._starts[-1] + self._file.metadata.row_group(group).num_rows)
        self._group = functools.lru_cache(KEPT_ROW_GROUPS)(self._read_group)

    def scan(self) -> Iterator[Row]:
        """Every row, a batch at a time."""
        for batch in self._file.iter_batches(batch_size=1024, columns=self._columns):
            yield from batch.to_pylist()

    def number(self, position: int) -> int:
        """Rows count from 1."""
        return position + 1

    def get(self, position: int) -> Row:
        """Read one row, and its row group if that is not at hand."""
        group = bisect_right(self._starts, position) - 1
        row: Row = self._group(group).slice(position - self._starts[group], 1).to_pylist()[0]
        return row

    def fingerprint(self) -> str:
        """Of the whole file, other columns included."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _read_group(self, group: int) -> Any:
        try:
            return self._file.read_row_group(group, columns=self._columns)
        except Exception as error:  # pyarrow has a dozen kinds
            raise RunError(f"{self.path}: row group {group} cannot be read: {error}") from error


def parse_line(path: Path, number: int, line: bytes) -> Row:
    """A line as a row. Raises RowError."""
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        raise RowError(path, number, f"not UTF-8 text: {error}") from error
    except ValueError as error:
        hint = " (the file looks like one JSON array: write one object a line)" if line.lstrip()[:1] == b"[" else ""
        raise RowError(path, number, f"not JSON: {error}{hint}") from error
    if not isinstance(row, dict):
        raise RowError(path, number, f"a row is an object with fields, not {type(row).__name__}")
    return row


def data_file(option: str, text: str) -> Path:
    """The file that an option names. Raises ConfigError if there is none, with the nearest name beside it."""
    path = Path(text).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"{option}: {path} is a directory, not a file")
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest(path.name, beside)
    guess = f" Did you mean {str(path.parent / near[0])!r}?" if near else ""
    where = "" if path.is_absolute() else f", looked for in {Path.cwd()}"
    raise ConfigError(f"{option}: there is no file {text!r}{where}.{guess}")


def open_rows(option: str, path: Path, columns: Sequence[str], owner: object, *, optional: Sequence[str] = ()) -> Rows:
    """The rows of a file, by its suffix; `columns` are read of it, and may be missing where they are `optional`.

    Raises ConfigError for an unknown suffix or a missing column, PluginError without pyarrow.
    """
    match path.suffix.lower():
        case ".jsonl" | ".ndjson" | ".json":
            return JsonLines(path)
        case ".parquet" | ".pq":
            return Parquet(path, columns, owner, optional)
        case suffix:
            raise ConfigError(f"{option}: {path} ends in {suffix!r}; rows are read from .jsonl and .parquet files")


def look_up(row: Row, field: str) -> Any:
    """The value at a dotted path (`extra.answer`, `messages.0.content`). Raises LookupError saying what is there."""
    if field in row:  # a name that holds a dot
        return row[field]
    value: Any = row
    for part in field.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            known = value if isinstance(value, dict) else {}
            raise LookupError(f"no field {field!r}. {suggest(part, [str(key) for key in known])}")
    return value
