"""What overlap is worth: the three pipelines on the tiny model, with rewards that wait as a remote sandbox would.

Each mode runs in a process of its own, one after the other and over again. Printed are seconds a step, the ratio to
`sync`, how busy the cores were (core-seconds of the run's processes, rewards included, over core-seconds of the clock)
and what the trainer waited. Every reward sleeps; nothing else differs between the modes.

    python benchmarks/pipelines.py
    python benchmarks/pipelines.py --learn     # trains examples/tiny.yaml in each mode, until its reward is 0.9
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODES: dict[str, list[str]] = {
    "sync": [],
    "double_buffer": [],
    "async": ["pipeline.max_staleness=2", "pipeline.partial_tokens=16"],
}
"""Each with its options; two updates ahead let generation, rewards and training overlap, all three."""
TARGET, WINDOW = 0.9, 10

WAITS = '''
"""Waits as long as a program in a sandbox would run, then says whether the response has an even length."""
import time
from dataclasses import dataclass
from rollstock import Reward, hookimpl, option


@dataclass(kw_only=True)
class WaitsConfig:
    seconds: float = option(0.1, "how long")


class Waits(Reward[WaitsConfig]):
    def score(self, sample):
        time.sleep(self.config.seconds)
        return float(len(sample.response) % 2 == 0)


@hookimpl
def rollstock_reward():
    return Waits
'''


def config_of(mode: str, directory: str, arguments: argparse.Namespace) -> Any:
    """The tiny model, sampled for as many tokens as are asked for."""
    from rollstock.config import load_config

    overrides = [
        f"pipeline={mode}",
        *MODES[mode],
        f"rewards=[{{name: waits, seconds: {arguments.wait}}}]",
        f"reward_limits.workers={arguments.reward_workers}",
        f"train.steps={arguments.steps}",
        f"train.prompts_per_step={arguments.prompts}",
        f"sampling.max_new_tokens={arguments.tokens}",
        f"sampling.min_new_tokens={arguments.tokens}",
        "evaluation={at_start: false, at_end: false}",
        "checkpoint={every_minutes: 0, keep_best: false}",
        "trackers=[jsonl]",
        f"run.directory={directory}",
    ]
    return load_config(ROOT / "examples" / "tiny.yaml", overrides)


def measure(mode: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Train in this process; the first steps, in which things are filled and warmed, are left out."""
    from rollstock import Extension, NoOptions, hookimpl
    from rollstock.launch import train
    from rollstock.testing import installed

    marks: list[tuple[float, float]] = []

    class Clock(Extension[NoOptions]):
        @hookimpl
        def rollstock_step_end(self, run: Any, step: int, metrics: Any) -> None:
            if step in (arguments.warmup, arguments.steps - 2):  # behind them nothing is generated ahead any more
                marks.append((time.monotonic(), busy_seconds(os.getpid())))

    with tempfile.TemporaryDirectory() as directory, installed("reward", "waits", WAITS):
        config = config_of(mode, f"{directory}/run", arguments)
        with installed("extension", "clock", Clock):
            config.extensions = [*config.extensions, clock_section()]
            train(config)
        rows = [json.loads(line) for line in (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()]
    (began, busy), (ended, busier) = marks
    steps = arguments.steps - 2 - arguments.warmup
    metrics = [row["metrics"] for row in rows if "metrics" in row][arguments.warmup : -2]
    wall = ended - began
    return {
        "step_s": wall / steps,
        "utilisation": (busier - busy) / (wall * (os.cpu_count() or 1)),
        **{
            name: statistics.fmean(row.get(f"perf/{name}", 0.0) for row in metrics)
            for name in ("trainer_wait_s", "generator_wait_s")
        },
        "gen_s": statistics.fmean(row.get("perf/generation_s", row["timing_s/gen"]) for row in metrics),
        "reward_s": statistics.fmean(row.get("perf/scoring_s", row["timing_s/reward"]) for row in metrics),
        "update_s": statistics.fmean(row["timing_s/update"] for row in metrics),
        "staleness": statistics.fmean(row.get("pipeline/staleness_mean", 0.0) for row in metrics),
    }


def clock_section() -> Any:
    """The section of the extension that looks at the clock."""
    from rollstock.section import Section

    return Section({"name": "clock"}, place="extensions.0")


def busy_seconds(pid: int) -> float:
    """Processor seconds of a process and of all that it started, living or ended and waited for."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            parents[int(entry.name)] = int(fields[1])
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    mine, found = {pid}, True
    while found:
        found = {child for child, parent in parents.items() if parent in mine} - mine
        mine |= found
    return sum(ticks.get(each, 0) for each in mine) / os.sysconf("SC_CLK_TCK")


def compare(arguments: argparse.Namespace) -> None:
    """Alternate the modes, and print the medians."""
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    passed_on = [f"--{name}={getattr(arguments, name)}" for name in NUMBERS]
    for _ in range(arguments.repeats):
        for mode in MODES:
            command = [sys.executable, __file__, "--one", mode, *passed_on]
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment())
            found[mode].append(json.loads(done.stdout.splitlines()[-1]))
    medians = {
        mode: {name: statistics.median(row[name] for row in rows) for name in rows[0]} for mode, rows in found.items()
    }
    print(
        "| pipeline | s a step | times `sync` | cores busy | generation | rewards | update | trainer waited | stale |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for mode, row in medians.items():
        print(
            f"| `{mode}` | {row['step_s']:.3f} | {medians['sync']['step_s'] / row['step_s']:.2f} | "
            f"{row['utilisation']:.0%} | {row['gen_s']:.3f} | {row['reward_s']:.3f} | {row['update_s']:.3f} | "
            f"{row['trainer_wait_s']:.3f} | {row['staleness']:.2f} |"
        )


def learn(arguments: argparse.Namespace) -> None:
    """Train the tiny task in each mode, and print when it was learnt."""
    print("| pipeline | steps to 0.9 | reward of the last ten steps | held-out tasks solved | largest staleness |")
    print("|---|---|---|---|---|")
    for mode in MODES:
        with tempfile.TemporaryDirectory() as directory:
            command = [
                sys.executable,
                "-m",
                "rollstock",
                "train",
                "examples/tiny.yaml",
                f"run.directory={directory}/run",
            ]
            overrides = [f"pipeline={mode}", *(option for option in MODES[mode] if "partial" not in option)]
            overrides += [f"train.steps={arguments.learn_steps}", "trackers=[jsonl]", f"train.seed={arguments.seed}"]
            subprocess.run([*command, *overrides], check=True, capture_output=True, cwd=ROOT, env=environment())
            lines = (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        metrics = [row["metrics"] for row in rows if "metrics" in row]
        rewards = [row["reward/mean"] for row in metrics]
        reached = next(
            (i for i in range(WINDOW, len(rewards) + 1) if statistics.fmean(rewards[i - WINDOW : i]) >= TARGET), None
        )
        solved = [row["evaluation"]["eval/greedy/solved"] for row in rows if "evaluation" in row][-1]
        age = max(row.get("pipeline/staleness_max", 0) for row in metrics)
        print(f"| `{mode}` | {reached or 'not'} | {statistics.fmean(rewards[-WINDOW:]):.3f} | {solved:.0%} | {age:g} |")


def environment() -> dict[str, str]:
    """One thread for each that computes: trainer and generator have a core each."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}


NUMBERS = {"steps": 18, "warmup": 4, "prompts": 8, "tokens": 32, "wait": 0.05, "reward_workers": 8}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", choices=MODES, help="run one mode, in this process, and print what came of it")
    parser.add_argument("--learn", action="store_true", help="train the tiny task instead")
    parser.add_argument("--learn-steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments)))
    elif arguments.learn:
        learn(arguments)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
