"""Say what a run changed: its first and its last evaluation on held-out tasks, side by side.

For the end of `make demo`: `python examples/before_after.py runs/demo`. Curves and samples are `rollstock report`'s.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

SHOWN = {
    "eval/greedy/solved": "held-out exact match, greedy",
    "eval/sampled/solved": "held-out exact match, sampled",
    "eval/greedy/reward_mean": "held-out reward, greedy",
}


def evaluations(run: Path) -> list[dict[str, Any]]:
    """The evaluation rows of a run, oldest first."""
    rows = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "evaluation" in row]


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code, 2 if the run has no two evaluations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="directory of a run")
    run = parser.parse_args(arguments).run
    if not (run / "metrics.jsonl").is_file():
        print(f"error: {run} is not the directory of a run: it has no metrics.jsonl", file=sys.stderr)
        return 2
    found = evaluations(run)
    if len(found) < 2:
        print(f"error: the run in {run} was evaluated {len(found)} times, not before and after", file=sys.stderr)
        return 2
    first, last = found[0], found[-1]
    print(f"{'':32}{'step ' + str(first['step']):>10}{'step ' + str(last['step']):>10}")
    for name, label in SHOWN.items():
        if name in first["evaluation"] and name in last["evaluation"]:
            before, after = first["evaluation"][name], last["evaluation"][name]
            shown = [f"{value:.0%}" if name.endswith("/solved") else f"{value:.2f}" for value in (before, after)]
            print(f"{label:32}{shown[0]:>10}{shown[1]:>10}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
