"""Output that cannot be written: a full disk, a reader that has seen enough, a closed terminal."""

import io
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from rollstock.cli.streams import guarded_streams
from rollstock.testing import read_metrics

ROLLSTOCK = f"{shlex.quote(sys.executable)} -m rollstock"
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, which takes nothing")


def bash(command: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run a shell command, `ROLLSTOCK` standing for the command line."""
    command = command.replace("ROLLSTOCK", ROLLSTOCK)
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=cwd, check=False, timeout=120)


@needs_full
@pytest.mark.parametrize("arguments", ["plugins", "plugins --json", "--help", "train --help", "--version"])
def test_a_full_standard_output_is_one_message_and_exit_code_1(arguments: str) -> None:
    done = bash(f"ROLLSTOCK {arguments} >/dev/full")
    assert done.returncode == 1
    assert done.stderr == "error: standard output cannot be written: No space left on device; some of it is missing\n"


@needs_full
def test_the_users_mistake_keeps_its_exit_code_where_nothing_can_be_said() -> None:
    done = bash("ROLLSTOCK train nowhere.yaml --json >/dev/full")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert bash("ROLLSTOCK train nowhere.yaml >/dev/full 2>/dev/full").returncode == 2
    assert bash("ROLLSTOCK train nowhere.yaml 2>/dev/full").returncode == 2


@needs_full
def test_a_full_standard_error_costs_nothing_else() -> None:
    done = bash("ROLLSTOCK plugins algorithm --json 2>/dev/full")
    assert done.returncode == 0
    assert "grpo" in {plugin["name"] for plugin in json.loads(done.stdout)["plugins"]}


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_stream_that_is_closed_from_the_start_is_no_error(closed: str) -> None:
    done = bash(f"ROLLSTOCK plugins algorithm {closed}")
    assert (done.returncode, done.stderr) == (0, "")
    assert bash(f"ROLLSTOCK plugins algoritm {closed}").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "code"),
    [("plugins", 0), ("plugins --json", 0), ("--help", 0), ("train nowhere.yaml", 2), ("plugins algoritm --json", 2)],
)
def test_a_reader_that_has_seen_enough_changes_nothing(arguments: str, code: int) -> None:
    done = bash(f"ROLLSTOCK {arguments} | true; echo ${{PIPESTATUS[0]}}")
    assert done.stdout == f"{code}\n"
    assert "Traceback" not in done.stderr
    assert "standard output" not in done.stderr


@needs_full
@pytest.mark.slow
@pytest.mark.parametrize(("output", "code"), [("> /dev/full", 1), ("| true", 0), ("2> /dev/full", 0)])
def test_a_run_goes_on_whatever_becomes_of_its_output(small_run, tmp_path: Path, output: str, code: int) -> None:
    values = small_run(tmp_path / "run", "train.steps=2", trackers=["console", "jsonl"]).to_dict()
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(values))
    done = bash(f"ROLLSTOCK train small.yaml {output}; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    steps = [row["metrics"] for row in read_metrics(tmp_path / "run") if "metrics" in row]
    assert [metrics["tracker/num_failed"] for metrics in steps] == [0, 0]


def test_a_slow_reader_of_a_pipe_that_does_not_block_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    got = bytearray()

    def read() -> None:
        time.sleep(0.2)
        while piece := os.read(ours, 1 << 12):
            got.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    with open(theirs, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with guarded_streams() as streams:
            print("x" * (1 << 20))
            assert streams.lost == ""
        assert sys.stdout is stream
    reader.join()
    os.close(ours)
    assert got == b"x" * (1 << 20) + b"\n"


def test_a_stream_that_is_no_file_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setattr(sys, "stdout", text)
    with guarded_streams() as streams:
        assert sys.stdout is text
        assert streams.lost == ""
