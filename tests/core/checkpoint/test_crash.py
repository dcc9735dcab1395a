"""kill -9 in the middle of writing, and disks that are really full."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollstock.checkpoint import CheckpointStore, CheckpointWriteError, DiskFullError

WRITER = Path(__file__).with_name("crash_writer.py")


def expected_parts(step: int) -> dict[str, dict[str, torch.Tensor]]:
    noise = torch.rand(200_000, generator=torch.Generator().manual_seed(step))
    return {"actor/model": {"weight": noise}, "actor/optimizer": {"moment": noise * 2, "step": torch.tensor(step)}}


def assert_whole(store: CheckpointStore, step: int) -> None:
    loaded = store.load(step)
    assert loaded.state == {"step": step}
    for part, named in expected_parts(step).items():
        assert all(torch.equal(loaded.tensors[part][name], tensor) for name, tensor in named.items())


def test_a_writer_killed_at_random_moments_always_leaves_its_last_checkpoint(tmp_path: Path) -> None:
    chance = random.Random(7)
    root = tmp_path / "checkpoints"
    command = [sys.executable, str(WRITER), str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        newest = -1
        remains_seen = 0
        kills = 0
        while kills < 20 or (remains_seen < 5 and kills < 200):  # enough of them must hit a writer at work
            kills += 1
            program.stdin.write("\n")
            pid = int(program.stdout.readline().removeprefix("writer "))
            if newest < 0:
                newest = int(program.stdout.readline().removeprefix("saved "))
            time.sleep(chance.uniform(0.0, 0.12))
            os.kill(pid, signal.SIGKILL)
            while (line := program.stdout.readline()) != "ended\n":
                newest = int(line.removeprefix("saved "))
            remains_seen += any(path.name.startswith((".tmp", ".old", ".trash")) for path in root.iterdir())
            store = CheckpointStore(root)
            found = store.load().step
            assert newest <= found <= newest + 1, "what was reported as saved, or seen before, is there"
            newest = found  # a save that was killed before it could report itself counts all the same
            for step in store.steps():
                assert_whole(store, step)
        program.stdin.close()
    assert remains_seen >= 5, "too few kills hit a writer at work to have proved anything"
    store = CheckpointStore(root, notice=lambda _: None)
    store.acquire()
    assert {path.name.split("-")[0] for path in root.iterdir()} <= {".lock", "step"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small filesystem can be mounted by root only; the file size limit test covers the rest")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def noise(num_bytes: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"actor/model": {"weight": torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)}}


def test_a_checkpoint_that_cannot_fit_is_refused_before_a_byte_is_written(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints")
    store.save(1, tensors=noise(1 << 20), state={}, score=None)
    with pytest.raises(DiskFullError, match=r"step 2: about 6.* MiB needed, 2.* MiB free"):
        store.save(2, tensors=noise(6 << 20), state={}, score=None)
    assert sorted(path.name for path in store.root.iterdir()) == [".lock", "step-000001"]


def test_a_disk_that_fills_up_while_writing_leaves_the_older_ones_alone(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(small_disk / "checkpoints")
    store.save(1, tensors=noise(1 << 20), state={}, score=None)
    monkeypatch.setattr(store, "_check_room", lambda content: None)
    with pytest.raises(DiskFullError, match=r"no room for the checkpoint of step 2.*free") as caught:
        store.save(2, tensors=noise(6 << 20), state={}, score=None)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert sorted(path.name for path in store.root.iterdir()) == [".lock", "step-000001"]
    assert store.load().step == 1
    store.save(2, tensors=noise(1 << 20), state={}, score=None)
    assert store.steps() == [1, 2]
    store.release()


def test_a_limit_on_file_size_is_reported_like_a_full_disk(tmp_path: Path) -> None:
    code = f"""
import resource, torch
from pathlib import Path
from rollstock.checkpoint import CheckpointStore, DiskFullError
store = CheckpointStore(Path({str(tmp_path)!r}))
save = lambda step, size: store.save(step, tensors={{"a": {{"w": torch.randint(0, 256, (size,), dtype=torch.uint8)}}}},
                                     state={{}}, score=None)
save(1, 1000)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    save(2, 4 << 20)
except DiskFullError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "no room for the checkpoint of step 2: about 4" in done.stdout
    assert "The system says: File too large; it is a limit on files" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-000001"]


def test_any_other_failure_of_the_disk_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointWriteError, match="Not a directory"):
        CheckpointStore(tmp_path / "file" / "checkpoints").save(1, tensors={}, state={}, score=None)
