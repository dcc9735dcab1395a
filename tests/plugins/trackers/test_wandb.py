"""Weights & Biases offline: what lands in its files, what must not, and its resume by id."""

import subprocess
import sys

import pytest

from rollstock.plugins.trackers.wandb import Wandb, WandbConfig

wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))


def started(info, state=None, **options):
    tracker = Wandb(WandbConfig(mode="offline", **options))
    tracker.start(info, state or {})
    return tracker


def everything(directory):
    """All bytes that wandb wrote into the run's directory; its own process may still write after a run has finished."""
    wandb.teardown()
    files = [path for path in (directory / "wandb").rglob("*") if path.is_file()]
    assert files
    return b"".join(path.read_bytes() for path in files)


def test_an_offline_run_keeps_metrics_config_and_no_secret(info, rows, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef" * 2 + "01234567")
    monkeypatch.setattr(sys, "argv", ["rollstock", "train", "--password=sesame"])
    tracker = started(info(environment={"name": "arithmetic"}, remote={"api_key": "open sesame"}), samples_every=1)
    tracker.samples(1, rows(1))
    tracker.log(1, {"actor/loss": 0.5})
    tracker.evaluation(1, {"eval/greedy/solved": 0.25})
    tracker.log(2, {"actor/loss": 0.25})
    assert set(tracker.state()) == {"id"}
    tracker.finish("finished")
    written = everything(tmp_path)
    for text in (b"actor/loss", b"eval/greedy/solved", b"arithmetic"):
        assert text in written
    for secret in (b"0123456789abcdef", b"sesame"):
        assert secret not in written


def test_a_resumed_run_goes_on_under_its_id(info, tmp_path):
    tracker = started(info())
    tracker.log(1, {"loss": 1.0})
    state = tracker.state()
    tracker.finish("interrupted")
    resumed = started(info(resumed_at=1), state)
    resumed.log(2, {"loss": 0.5})
    assert resumed.state() == state
    resumed.finish("finished")
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{state['id']}"))) >= 1


def test_a_disabled_run_writes_nothing(info, tmp_path):
    tracker = Wandb(WandbConfig(mode="disabled"))
    tracker.start(info(), {})
    tracker.log(1, {"loss": 1.0})
    tracker.finish("finished")
    assert not list(tmp_path.rglob("*.wandb"))


def test_without_a_key_the_ways_out_are_named(tmp_path):
    # In a process of its own: wandb remembers for the life of a process whether there was a key.
    program = """
import pathlib, sys
from rollstock import ConfigError, RunInfo
from rollstock.plugins.trackers.wandb import Wandb, WandbConfig
try:
    directory = pathlib.Path(sys.argv[1])
    Wandb(WandbConfig()).start(RunInfo(name="demo", directory=directory, config={}, num_steps=1), {})
except ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "wandb refuses to start: No API key configured" in done.stdout
    assert "set trackers to {name: wandb, mode: offline}" in done.stdout
