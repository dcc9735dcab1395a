"""Folders made for something are unmade when nothing comes of it."""

from pathlib import Path

import pytest

from rollstock.folders import folder_for, make_folder, remove_empty


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
