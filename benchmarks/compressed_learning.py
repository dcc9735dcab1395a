"""Whether compressed gradients learn as well: `examples/tiny.yaml` in two processes, with each compressor and seed.

Trains by `backend: fsdp` and `executor: ray`, the config otherwise as it is, and writes a table of what was reached and
of the bytes that gradients took, and a picture of the curves. A run that is already there is not repeated. Needs Ray.

    python benchmarks/compressed_learning.py --picture docs/images/compressed_learning.svg
    python benchmarks/compressed_learning.py --compressors hybrid:0.2 --seeds 0 --steps 20 --runs /tmp/compressed
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH keeps it out

import outputs
from learning import ROOT, TARGET, WINDOW, Result, picture, read

PROCESSES = 2
OVERRIDES = [
    "backend.name=fsdp",
    "backend.sharding_strategy=NO_SHARD",
    "executor={name: ray, dashboard: false, object_store_memory: 100000000}",
    f"roles.actor.count={PROCESSES}",
    "roles.rollout.colocate_with=actor",
    "roles.reward.colocate_with=actor",
    "checkpoint.keep=1",
    "checkpoint.keep_best=false",
]


def train(compressor: str, seed: int, steps: int, runs: Path) -> Result:
    """Train, unless that run is there and finished, and read it."""
    directory = runs / f"{compressor}-{seed}"
    result = read(compressor, seed, directory)
    if result is not None and len(result.rewards) >= steps:
        return result
    name, _, share = compressor.partition(":")
    chosen = f"{{name: {name}, share: {share}}}" if share else name
    own = [f"compressor={chosen}", f"train.seed={seed}", f"train.steps={steps}", f"run.directory={directory}"]
    ended = subprocess.run(
        [sys.executable, "-m", "rollstock", "train", "examples/tiny.yaml", "--overwrite", *OVERRIDES, *own],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
    )
    result = read(compressor, seed, directory)
    if ended.returncode or result is None:
        raise SystemExit(f"error: {compressor} with seed {seed} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    print(f"{compressor} seed {seed}: {result.steps_to(TARGET)} steps, last {result.final:.2f}", flush=True)
    return result


def sent_share(directory: Path) -> float:
    """Bytes of a run's gradients, relative to those without compression."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [row["metrics"] for row in rows if "metrics" in row]
    sent, raw = (sum(step[f"network/gradient_{kind}"] for step in steps) for kind in ("bytes", "raw_bytes"))
    return sent / raw


def table(results: Sequence[Result], runs: Path) -> str:
    """A Markdown table, a row for each compressor."""
    lines = [
        f"| compressor | bytes of gradients | steps to {TARGET}, by seed | reward of the last {WINDOW} steps "
        "| held-out solved |",
        "|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(result.algorithm for result in results):
        found = [result for result in results if result.algorithm == name]
        share = statistics.fmean(sent_share(runs / f"{name}-{result.seed}") for result in found)
        steps = ", ".join(str(result.steps_to(TARGET) or "not reached") for result in found)
        finals = ", ".join(f"{result.final:.2f}" for result in found)
        heldout = ", ".join(f"{result.heldout:.2f}" for result in found)
        lines.append(f"| `{name}` | {share:.1%} | {steps} | {finals} | {heldout} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--compressors", nargs="+", default=["none", "hybrid:0.5", "hybrid:0.1"], help="names, or NAME:SHARE"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=120, help="steps of each run")
    parser.add_argument("--runs", type=Path, default=Path("runs/compressed"), help="where the runs are kept")
    parser.add_argument("--picture", type=outputs.file, help="draw the curves there, as an SVG")
    options = parser.parse_args(arguments)
    runs = options.runs.resolve()
    results = [train(name, seed, options.steps, runs) for seed in options.seeds for name in options.compressors]
    print(table(results, runs))
    if options.picture:
        title = "Mean reward with each compressor over the steps of training, one line a seed"
        options.picture.write_text(picture(results, title=title), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
