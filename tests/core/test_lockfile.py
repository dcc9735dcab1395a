"""One holder at a time, told by name; a dead holder is none."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollstock.lockfile import LockedError, LockFile

HOLD = """
import os, sys
from pathlib import Path
from rollstock.lockfile import LockFile
lock = LockFile(Path(sys.argv[1]), "the thing")
lock.acquire()
if "fork" in sys.argv and os.fork() == 0:
    import time
    os.close(1)
    time.sleep(60)
print("held", os.getpid(), flush=True)
sys.stdin.read()
"""


def hold(path: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", HOLD, str(path), *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("held")
    return process


def test_a_second_process_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    with hold(tmp_path / "lock") as process:
        with pytest.raises(LockedError, match=f"the thing is in use by process {process.pid} on "):
            LockFile(tmp_path / "lock", "the thing").acquire()
        process.kill()
    with LockFile(tmp_path / "lock", "the thing") as lock:
        assert lock.held


def test_a_lock_left_by_a_killed_process_is_taken_and_mentioned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with hold(tmp_path / "lock") as process:
        process.kill()
    with caplog.at_level(logging.WARNING):
        LockFile(tmp_path / "lock", "the thing").acquire()
    assert f"left locked by process {process.pid}" in caplog.text


def test_a_child_that_outlives_the_holder_does_not_keep_the_lock(tmp_path: Path) -> None:
    process = hold(tmp_path / "lock", "fork")
    try:
        process.kill()
        process.wait()
        with LockFile(tmp_path / "lock", "the thing") as lock:
            assert lock.held
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def test_two_objects_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    first, second = (LockFile(tmp_path / "lock", "the thing") for _ in range(2))
    first.acquire()
    first.acquire()
    with pytest.raises(LockedError, match="this very process"):
        second.acquire()
    first.release()
    first.release()
    second.acquire()
    del second
    LockFile(tmp_path / "lock", "the thing").acquire()


def test_a_file_that_its_holder_removes_is_never_locked_by_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    real, opened = os.open, []

    def open_and_lose(*arguments: Any) -> int:
        """The first time, the holder removes the file between the opening and the locking."""
        descriptor = real(*arguments)
        opened.append(descriptor)
        if len(opened) == 1:
            path.unlink()
        return descriptor

    monkeypatch.setattr(os, "open", open_and_lose)
    lock = LockFile(path, "the thing")
    lock.acquire()
    assert len(opened) == 2
    assert os.path.samestat(os.fstat(opened[-1]), path.stat())
    lock.release(remove=True)
    assert not path.exists()
    assert not lock.held


def test_a_garbled_lock_file_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("not json")
    with LockFile(tmp_path / "lock", "the thing") as lock:
        assert lock.held
