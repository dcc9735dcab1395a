"""Checkpoints in the background: what is kept is what was there, failures are told, and a kill leaves the older one."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstock import Extension, NoOptions, hookimpl
from rollstock.checkpoint import CheckpointStore, CheckpointWriter, DiskFullError
from rollstock.checkpoint.writer import copied
from rollstock.launch import resume, train
from rollstock.testing import installed


class Gate:
    """Holds back a store's writing until it is opened."""

    def __init__(self, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.begun = threading.Event(), threading.Event()
        self.order: list[int] = []
        save = store.save

        def held(step: int, **content: Any) -> Path:
            self.begun.set()
            assert self.opened.wait(60)
            self.order.append(step)
            return save(step, **content)

        monkeypatch.setattr(store, "save", held)


def parts(value: float) -> dict[str, dict[str, torch.Tensor]]:
    weight = torch.full((1000,), value)
    return {"actor/model": {"a": weight, "tied": weight}, "actor/optimizer": {"m": weight * 2}}


def write(writer: CheckpointWriter, step: int, tensors: dict[str, dict[str, torch.Tensor]], live: bool = True) -> None:
    writer.write(step, tensors=tensors, state={"step": step}, score=None, live=live)


def test_what_changes_while_it_is_written_is_kept_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    gate, writer = Gate(store, monkeypatch), CheckpointWriter(store, background=True)
    tensors = parts(1.0)
    write(writer, 1, tensors)
    assert gate.begun.wait(60)
    assert writer.take_complete() == []
    tensors["actor/model"]["a"].fill_(9.0)
    gate.opened.set()
    writer.wait()
    assert writer.take_complete() == [(1, tmp_path / "step-000001")]
    found = store.load().tensors["actor/model"]
    assert torch.equal(found["a"], torch.full((1000,), 1.0))
    assert found["a"].data_ptr() == found["tied"].data_ptr()


def test_copies_share_memory_as_their_tensors_did() -> None:
    tensors = parts(1.0)
    made = copied(tensors)["actor/model"]
    assert made["a"] is made["tied"]
    assert made["a"].data_ptr() != tensors["actor/model"]["a"].data_ptr()


def test_the_next_one_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    gate, writer = Gate(store, monkeypatch), CheckpointWriter(store, background=True)
    gate.opened.set()
    for step in range(1, 5):
        write(writer, step, parts(float(step)))
    writer.wait()
    assert gate.order == [1, 2, 3, 4]
    assert [step for step, _ in writer.take_complete()] == [1, 2, 3, 4]
    assert store.steps() == [4]


def test_a_failure_is_told_once_at_the_next_occasion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    writer = CheckpointWriter(store, background=True)
    write(writer, 1, parts(1.0))
    writer.wait()
    monkeypatch.setattr("rollstock.checkpoint.store.shutil.disk_usage", lambda _path: Usage())
    write(writer, 2, parts(2.0))
    with pytest.raises(DiskFullError, match="no room for the checkpoint of step 2") as caught:
        writer.wait()
    assert "while the checkpoint of step 2 was written in the background" in caught.value.__notes__
    assert writer.take_complete() == [(1, tmp_path / "step-000001")]
    assert store.load().step == 1


class Usage:
    free = 0


def test_in_the_foreground_it_is_complete_at_once(tmp_path: Path) -> None:
    writer = CheckpointWriter(CheckpointStore(tmp_path), background=False)
    write(writer, 1, parts(1.0))
    assert writer.take_complete() == [(1, tmp_path / "step-000001")]


class Listener(Extension[NoOptions]):
    """Remembers which checkpoints were there when it was told of them."""

    heard: list[int] = []  # noqa: RUF012  # shared on purpose

    @hookimpl
    def rollstock_checkpoint_saved(self, run: Any, step: int, path: Path) -> None:
        assert (path / "manifest.json.sha256").is_file()
        self.heard.append(step)


def test_a_run_that_writes_in_the_background_equals_one_that_waits(
    small_run: Any, assert_same_run: Any, tmp_path: Path
) -> None:
    every = ["checkpoint.every_steps=1", "checkpoint.keep=9"]
    with installed("extension", "listener", Listener):
        train(small_run(tmp_path / "waits", *every, extensions=["listener"]))
        Listener.heard.clear()
        train(small_run(tmp_path / "run", *every, "checkpoint.background=true", extensions=["listener"]))
        assert Listener.heard == [1, 2, 3]
        assert_same_run(tmp_path / "run", tmp_path / "waits")
        resume(tmp_path / "run", step=1)
        assert_same_run(tmp_path / "run", tmp_path / "waits")


def test_a_run_whose_last_checkpoint_cannot_be_written_has_failed(
    small_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = CheckpointStore.save

    def full(self: CheckpointStore, step: int, **content: Any) -> Path:
        if step == 3:
            raise DiskFullError("no room")
        return save(self, step, **content)

    monkeypatch.setattr(CheckpointStore, "save", full)
    with pytest.raises(DiskFullError):
        train(small_run(tmp_path / "run", "checkpoint.every_steps=1", "checkpoint.background=true"))
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [1, 2]


KILLED = """
import sys, time, torch
from pathlib import Path
from rollstock.checkpoint import CheckpointStore, CheckpointWriter, store
root = Path(sys.argv[1])
made = CheckpointStore(root)
writer = CheckpointWriter(made, background=True)
tensors = {"actor/model": {"w": torch.ones(1000)}}
writer.write(1, tensors=tensors, state={}, score=None, live=True)
writer.wait()
def slow(folder, manifest=None):  # written, and not renamed yet
    print("written", flush=True)
    time.sleep(600)
store.verify = slow
writer.write(2, tensors=tensors, state={}, score=None, live=True)
time.sleep(600)
"""


def test_a_kill_in_the_middle_leaves_the_older_one(tmp_path: Path) -> None:
    program = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "written\n"
    finally:
        os.kill(program.pid, signal.SIGKILL)
        program.wait()
        program.stdout.close()
    assert [path.name for path in sorted(tmp_path.iterdir()) if path.name.startswith(".tmp")]
    assert CheckpointStore(tmp_path).load().step == 1
