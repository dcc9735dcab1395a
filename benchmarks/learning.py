"""How soon each algorithm learns: every online one on `examples/tiny.yaml`, with several seeds.

Trains with each algorithm by name alone, the config otherwise as it is (`OVERRIDES` has the exceptions), and writes a
table of the steps until the mean reward of ten steps in a row reached 0.9, and a picture of the curves. A result
depends on the seed and the number of threads, not on how busy the machine is; a run that is already there is not
repeated.

    python benchmarks/learning.py --jobs 2
    python benchmarks/learning.py --algorithms grpo rloo --seeds 0 --runs /tmp/learning
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH keeps it out

import outputs

ROOT = Path(__file__).resolve().parent.parent
TARGET = 0.9
WINDOW = 10
OVERRIDES: dict[str, list[str]] = {}
COLUMNS, CELL_WIDTH, CELL_HEIGHT = 4, 190, 130
COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#8250df", "#9a6700")
FRAME, INK = "#d0d7de", "#24292f"


@dataclass(frozen=True)
class Result:
    """One run: the mean reward of each step, and the share of held-out tasks solved greedily at the end."""

    algorithm: str
    seed: int
    rewards: list[float]
    heldout: float

    def steps_to(self, target: float) -> int | None:
        """The first step at which the mean over `WINDOW` steps reached the target; None if none did."""
        for step in range(WINDOW, len(self.rewards) + 1):
            if statistics.fmean(self.rewards[step - WINDOW : step]) >= target:
                return step
        return None

    @property
    def final(self) -> float:
        """The mean reward of the last `WINDOW` steps."""
        return statistics.fmean(self.rewards[-WINDOW:])


def online_algorithms() -> list[str]:
    """The names of all installed algorithms that sample."""
    from rollstock import Algorithm
    from rollstock.manager import make_manager

    manager = make_manager()
    command = [sys.executable, "-m", "rollstock", "plugins", "algorithm", "--json"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True, env=_environment())
    names = sorted(plugin["name"] for plugin in json.loads(listed.stdout)["plugins"])
    return [name for name in names if not manager.create_as(Algorithm, {"name": name}).offline]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}


def train(algorithm: str, seed: int, steps: int, runs: Path) -> Result:
    """Train, unless that run is there and finished, and read it."""
    directory = runs / f"{algorithm}-{seed}"
    result = read(algorithm, seed, directory)
    if result is not None and len(result.rewards) >= steps:
        return result
    command = [sys.executable, "-m", "rollstock", "train", "examples/tiny.yaml", "--overwrite"]
    overrides = [
        f"algorithm.name={algorithm}",
        f"train.seed={seed}",
        f"train.steps={steps}",
        f"run.directory={directory}",
        "checkpoint.keep=1",
        *OVERRIDES.get(algorithm, []),
    ]
    ended = subprocess.run([*command, *overrides], cwd=ROOT, env=_environment(), capture_output=True, text=True)
    result = read(algorithm, seed, directory)
    if ended.returncode or result is None:
        raise SystemExit(f"error: {algorithm} with seed {seed} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    print(f"{algorithm} seed {seed}: {result.steps_to(TARGET)} steps, last {result.final:.2f}", flush=True)
    return result


def read(algorithm: str, seed: int, directory: Path) -> Result | None:
    """What a run's metrics say; None where there are none."""
    path = directory / "metrics.jsonl"
    if not path.exists():
        return None
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rewards = [row["metrics"]["reward/mean"] for row in rows if "metrics" in row]
    evaluations = [row["evaluation"] for row in rows if "evaluation" in row]
    heldout = [values["eval/greedy/solved"] for values in evaluations if "eval/greedy/solved" in values]
    return Result(algorithm, seed, rewards, heldout[-1]) if rewards and heldout else None


def table(results: Sequence[Result]) -> str:
    """A Markdown table, a row for each algorithm, the soonest first."""
    by_name: dict[str, list[Result]] = {}
    for result in results:
        by_name.setdefault(result.algorithm, []).append(result)

    def order(name: str) -> tuple[int, float]:
        reached = [steps for r in by_name[name] if (steps := r.steps_to(TARGET)) is not None]
        return len(by_name[name]) - len(reached), statistics.fmean(reached) if reached else -by_name[name][0].final

    lines = [
        f"| algorithm | steps to {TARGET}, by seed | reward of the last {WINDOW} steps | held-out solved |",
        "|---|---|---|---|",
    ]
    for name in sorted(by_name, key=order):
        found = sorted(by_name[name], key=lambda result: result.seed)
        steps = ", ".join(str(result.steps_to(TARGET) or "not reached") for result in found)
        finals = ", ".join(f"{result.final:.2f}" for result in found)
        lines.append(f"| `{name}` | {steps} | {finals} | {', '.join(f'{result.heldout:.2f}' for result in found)} |")
    return "\n".join(lines) + "\n"


def picture(
    results: Sequence[Result],
    *,
    title: str = "Mean reward of each algorithm over the steps of training, one line a seed",
) -> str:
    """An SVG of small curves, one frame an algorithm, one line a seed: the mean reward of ten steps."""
    names = sorted({result.algorithm for result in results})
    rows = -(-len(names) // COLUMNS)
    width, height = min(COLUMNS, len(names)) * CELL_WIDTH, rows * CELL_HEIGHT + 20
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img' fill='{INK}' "
        "font-family='system-ui, sans-serif' font-size='11'>",
        f"<title>{escape(title)}</title>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
    ]
    for place, name in enumerate(names):
        left, top = place % COLUMNS * CELL_WIDTH + 26, place // COLUMNS * CELL_HEIGHT + 24
        mine = sorted((r for r in results if r.algorithm == name), key=lambda result: result.seed)
        parts += _frame(name, left, top, max(len(result.rewards) for result in mine))
        for result, colour in zip(mine, COLOURS, strict=False):
            parts.append(_line(result.rewards, left, top, colour))
    return "\n".join([*parts, "</svg>\n"])


def _frame(name: str, left: int, top: int, steps: int) -> list[str]:
    wide, high = CELL_WIDTH - 40, CELL_HEIGHT - 46
    parts = [f"<text x='{left}' y='{top - 6}' font-weight='600'>{escape(name)}</text>"]
    for value in (0.0, 0.5, 1.0):
        y = top + high * (1 - value)
        parts.append(f"<path d='M{left} {y:g}h{wide}' stroke='{FRAME}'/>")
        parts.append(f"<text x='{left - 5}' y='{y + 4:g}' text-anchor='end'>{value:g}</text>")
    parts.append(f"<text x='{left + wide}' y='{top + high + 13}' text-anchor='end'>{steps} steps</text>")
    return parts


def _line(rewards: Sequence[float], left: int, top: int, colour: str) -> str:
    wide, high = CELL_WIDTH - 40, CELL_HEIGHT - 46
    means = [statistics.fmean(rewards[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(rewards))]
    points = " ".join(
        f"{left + wide * i / max(len(means) - 1, 1):.1f},{top + high * (1 - min(max(mean, 0), 1)):.1f}"
        for i, mean in enumerate(means)
    )
    return f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='1.5'/>"


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithms", nargs="+", help="names; default: every installed one that samples")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=240, help="steps of each run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, of one thread each")
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"), help="where the runs are kept")
    parser.add_argument("--table", type=outputs.file, help="write the table there as well")
    parser.add_argument("--picture", type=outputs.file, help="draw the curves there, as an SVG")
    options = parser.parse_args(arguments)
    names = options.algorithms or online_algorithms()
    runs = options.runs.resolve()
    with ThreadPoolExecutor(options.jobs) as pool:
        pending = [pool.submit(train, name, seed, options.steps, runs) for name in names for seed in options.seeds]
        results = [future.result() for future in pending]
    print(table(results))
    if options.table:
        options.table.write_text(table(results), encoding="utf-8")
    if options.picture:
        options.picture.write_text(picture(results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
