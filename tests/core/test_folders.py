"""Folders made for something are unmade when nothing comes of it."""

import errno
import os
from pathlib import Path

import pytest

from rollstock.errors import RunError, UserError
from rollstock.folders import folder_for, make_folder, path_error, remove_empty


def test_what_was_made_is_told_and_can_be_removed_again(tmp_path: Path) -> None:
    made = make_folder(tmp_path / "a" / "b")
    assert made == [tmp_path / "a" / "b", tmp_path / "a"]
    assert make_folder(tmp_path / "a" / "b") == []
    (tmp_path / "a" / "kept").touch()
    remove_empty(made)
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "a", tmp_path / "a" / "kept"]


def test_a_folder_that_cannot_be_made_leaves_no_parents(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="long"):
        make_folder(tmp_path / "a" / "b" / ("long" * 100))
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        make_folder(tmp_path / "file" / "b")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_failure_inside_takes_the_folder_with_it_unless_it_was_there(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for place in ("new/deep", "there"):
        with pytest.raises(ZeroDivisionError), folder_for(tmp_path / place):
            assert (tmp_path / place).is_dir()
            raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == [tmp_path / "there"]
    with folder_for(tmp_path / "new"):
        pass
    assert (tmp_path / "new").is_dir()


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (errno.EROFS, UserError, "x cannot be written: Read-only file system; choose another"),
        (errno.ENOENT, UserError, "x cannot be written: No such file or directory; choose another"),
        (errno.ENOSPC, RunError, "x cannot be written: No space left on device"),
        (errno.EIO, RunError, "x cannot be written: Input/output error"),
    ],
)
def test_another_path_is_advised_where_it_is_the_cure(number: int, kind: type[Exception], said: str) -> None:
    error = OSError(number, os.strerror(number))
    error.add_note("while it was tried")
    told = path_error(error, "x cannot be written", "choose another")
    assert (type(told), str(told), told.__notes__) == (kind, said, ["while it was tried"])
