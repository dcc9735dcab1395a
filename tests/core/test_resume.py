"""A run that is killed and resumed equals one that was never interrupted, to the bit."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollstock.checkpoint import CheckpointStore
from rollstock.config import load_config
from rollstock.launch import resume, train

CONFIG = """
model:
  config: {{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
           num_key_value_heads: 1, max_position_embeddings: 32}}
  tokenizer: {{characters: "0123456789+="}}
algorithm: {{name: {algorithm}, group_size: 4{more}}}
environment: {{name: arithmetic, chat: false, prompt: "{{a}}{{op}}{{b}}="}}
sampling: {{max_new_tokens: 3}}
train: {{steps: 8, prompts_per_step: 4, mini_batches: 2, epochs: 2, seed: 3}}
backend: {{name: torch, learning_rate: 1.0e-2}}
evaluation: {{prompts: 4, every: 3}}
checkpoint: {{every_steps: 2, keep: 2}}
trackers: [jsonl]
"""


@pytest.fixture(params=["grpo", "ppo"])
def config_file(request, tmp_path):
    more = ", kl_reward_coef: 0.1, kl_control: horizon, kl_horizon: 50" if request.param == "ppo" else ", kl_coef: 0.01"
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(algorithm=request.param, more=more))
    return path


def launch(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "rollstock", *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(str(arguments[1])).parent,
    )


@pytest.fixture
def uninterrupted(config_file, tmp_path, one_thread):
    outcome = train(load_config(config_file, [f"run.directory={tmp_path / 'straight'}"]))
    assert outcome.status == "finished"
    return outcome.directory


@pytest.mark.slow
def test_a_run_killed_again_and_again_equals_an_uninterrupted_one(
    config_file, uninterrupted, tmp_path, assert_same_run
):
    run = tmp_path / "killed"
    rng = random.Random(5)
    process = launch("train", config_file, f"run.directory={run}")
    kills = 0
    for _attempt in range(20):
        seen = _lines(run) if (run / "metrics.jsonl").exists() else 0
        if kills < 3:
            # wait until it is in its steps, then a random moment: in a stage, an update or a checkpoint
            deadline = time.monotonic() + 120
            while process.poll() is None and time.monotonic() < deadline:
                if (run / "metrics.jsonl").exists() and _lines(run) > seen:
                    break
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.4))
        else:
            process.wait(timeout=120)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        output, _ = process.communicate()
        if process.returncode == 0 or "has finished its 8 steps" in output:  # killed after its last checkpoint
            break
        assert process.returncode == -signal.SIGKILL, output
        process = launch("resume", run)
    assert kills >= 2
    assert_same_run(run, uninterrupted)


def _lines(run):
    return (run / "metrics.jsonl").read_bytes().count(b"\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config_file", "number"), [("grpo", signal.SIGTERM), ("ppo", signal.SIGINT)], indirect=["config_file"]
)
def test_a_signal_leaves_a_checkpoint_and_says_how_to_resume(
    config_file, uninterrupted, tmp_path, number, assert_same_run
):
    run = tmp_path / "stopped"
    process = launch("train", config_file, f"run.directory={run}")
    while not (run / "metrics.jsonl").exists() or _lines(run) < 2:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert f"rollstock resume {run}" in output
    assert "Traceback" not in output
    assert CheckpointStore(run / "checkpoints").steps()
    again = launch("resume", run)
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0, output
    assert_same_run(run, uninterrupted)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_seed_another(
    config_file, uninterrupted, tmp_path, assert_same_run
):
    again = train(load_config(config_file, [f"run.directory={tmp_path / 'again'}"]))
    assert_same_run(again.directory, uninterrupted)
    other = train(load_config(config_file, [f"run.directory={tmp_path / 'other'}", "train.seed=4"]))
    first = "rollouts/step-000001.jsonl"
    assert (other.directory / first).read_text() != (uninterrupted / first).read_text()


def test_a_finished_run_cannot_be_resumed(config_file, uninterrupted):
    from rollstock.errors import UserError

    with pytest.raises(UserError, match="has finished its 8 steps"):
        resume(uninterrupted)
