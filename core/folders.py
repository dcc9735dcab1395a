"""Folders that are made for something, and unmade when nothing comes of it; and paths that the system refuses.

For whatever writes where the user says: a command that fails leaves nothing that was not there before, and says
whether another path or a tidier disk is the cure.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rollstock.errors import RollstockError, RunError, UserError

REFUSED = frozenset(
    {errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP}
    | {errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY}
)
"""Error numbers with which the system refuses a path, so that another one is the cure."""

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a disk that is full, or whose share for this user is."""


def path_error(error: OSError, message: str, advice: str) -> RollstockError:
    """What to raise for a path that could not be used: a UserError with `advice` if the path is refused, else a
    RunError, since the path is sound. Notes of `error` are kept.
    """
    reason = error.strerror or str(error)
    refused = error.errno in REFUSED
    told = UserError(f"{message}: {reason}; {advice}") if refused else RunError(f"{message}: {reason}")
    for note in getattr(error, "__notes__", ()):
        told.add_note(note)
    return told


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
