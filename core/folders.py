"""Folders that are made for something, and unmade when nothing comes of it.

For whatever writes where the user says: a command that fails leaves nothing that was not there before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def make_folder(path: Path) -> list[Path]:
    """Make a folder and the parents that it lacks; returns what was made, deepest first, for `remove_empty`.

    Raises OSError, and then has made nothing.
    """
    made: list[Path] = []
    try:
        for folder in [*reversed(path.parents), path]:
            if not folder.is_dir():
                folder.mkdir(exist_ok=True)
                made.insert(0, folder)
    except OSError:
        remove_empty(made)
        raise
    return made


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders, given deepest first, as far as they are empty."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:  # something was put there meanwhile, or somebody else has removed it
            return


@contextmanager
def folder_for(path: Path) -> Iterator[None]:
    """A folder to write in; if that fails, whatever had to be made for it and is still empty is removed again."""
    made = make_folder(path)
    try:
        yield
    except BaseException:
        remove_empty(made)
        raise
