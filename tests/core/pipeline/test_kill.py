"""Runs that are ahead and are killed: a double buffer comes back to the bit, an asynchronous run with all its tasks."""

import random
import signal
import time

import pytest

from rollstock.config import load_config
from rollstock.launch import train

from ...conftest import assert_same, steady_rows
from ..test_resume import CONFIG, launch

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def config_file(tmp_path, request):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(algorithm="grpo", more="") + request.param)
    return path


def killed_again_and_again(config_file, run):
    """Train, kill -9 at three random moments, and resume each time until it is done."""
    rng, kills = random.Random(7), 0
    process = launch("train", config_file, f"run.directory={run}")
    for _attempt in range(20):
        seen = _lines(run)
        while kills < 3 and process.poll() is None and _lines(run) == seen:
            time.sleep(0.005)  # until it is in its steps
        if kills < 3:
            time.sleep(rng.uniform(0, 0.4))
        else:
            process.wait()
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        output, _ = process.communicate()
        if process.returncode == 0 or "has finished its 8 steps" in output:
            break
        assert process.returncode == -signal.SIGKILL, output
        process = launch("resume", run)
    assert kills >= 2


def _lines(run):
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("config_file", ["pipeline: double_buffer\n"], indirect=True)
def test_a_double_buffer_that_is_killed_again_and_again_equals_an_undisturbed_one(config_file, tmp_path):
    straight = train(load_config(config_file, [f"run.directory={tmp_path / 'straight'}"])).directory
    killed_again_and_again(config_file, tmp_path / "killed")
    assert_same(tmp_path / "killed", straight)


@pytest.mark.parametrize(
    "config_file", ["pipeline: {mode: async, max_staleness: 2, partial_tokens: 1}\n"], indirect=True
)
def test_an_asynchronous_run_that_is_killed_trains_on_every_task_once(config_file, tmp_path):
    run = tmp_path / "killed"
    killed_again_and_again(config_file, run)
    metrics = [row["metrics"] for row in steady_rows(run) if "metrics" in row]
    assert [row["train/num_trajectories"] for row in metrics] == [16] * 8
    assert metrics[-1]["train/position"] == 8 * 4
    assert max(row["pipeline/staleness_max"] for row in metrics) <= 2
