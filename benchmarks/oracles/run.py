"""Draw random batches, ask rollstock and its peers for the same quantities, and print the largest differences.

    python benchmarks/oracles/run.py --verl-python /opt/verl/bin/python --trl-python /opt/trl/bin/python

Each peer lives in an environment of its own, which README.md says how to make; a peer that is left out is not compared.
`--fixtures` also stores the batches of seed 0, the peers' answers to them, and a new tiny model, which the tests
read. The exit code is 1 if a difference is larger than its case allows.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import compare
import draws
import rollstock_side
import trl_cases
import verl_cases

HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parent.parent / "tests" / "algorithms" / "fixtures"
CASES = {"verl": verl_cases, "trl": trl_cases}
NAMES = {"verl": "verl", "trl": "TRL"}
SEEDS = 10


def main() -> int:
    """Read the command line, run, and print."""
    options = _options()
    drawn = draws.draw_all(options.seeds)
    too_far: list[str] = []
    with tempfile.TemporaryDirectory(prefix="rollstock-oracles-") as folder:
        source = Path(folder) / "draws.safetensors"
        draws.save(source, drawn)
        if options.fixtures:
            rollstock_side.save_model(rollstock_side.MODEL)
        shutil.copytree(rollstock_side.MODEL, source.with_name("model"))
        for peer, python in (("verl", options.verl_python), ("trl", options.trl_python)):
            if python:
                theirs, told = _ask(peer, python, source)
                too_far += _report(peer, told["version"], drawn, theirs)
                if options.fixtures:
                    first = {name: found for name, found in theirs.items() if name.endswith("@0")}
                    draws.save(FIXTURES / f"{peer}.safetensors", first, told)
    if options.fixtures:
        first_draws = {name: columns for name, columns in drawn.items() if name.endswith("@0")}
        draws.save(FIXTURES / "draws.safetensors", first_draws)
    print("\ntoo far: " + ", ".join(too_far) if too_far else "\nall within what is allowed")
    return int(bool(too_far))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl-python", help="the Python of verl's environment")
    parser.add_argument("--trl-python", help="the Python of TRL's environment")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"random batches of each sort (default {SEEDS})")
    parser.add_argument("--fixtures", action="store_true", help=f"store batches and answers in {FIXTURES}")
    return parser.parse_args()


def _ask(peer: str, python: str, source: Path) -> tuple[dict[str, draws.Columns], dict[str, str]]:
    """A peer's answers to all draws, and what it says of itself."""
    target = source.with_name(f"{peer}.safetensors")
    environment = {**os.environ, "PYTHONPATH": str(HERE), "PYTHONWARNINGS": "ignore"}
    subprocess.run([python, str(HERE / f"{peer}_side.py"), str(source), str(target)], check=True, env=environment)
    return draws.load(target), draws.metadata(target)


def _report(peer: str, version: str, drawn: dict[str, draws.Columns], theirs: dict[str, draws.Columns]) -> list[str]:
    """Print a peer's two tables; returns the cases of the first that differ by more than they may."""
    label, cases = f"{NAMES[peer]} {version}", CASES[peer]
    rows = compare.compare(cases.CASES, drawn, theirs, rollstock_side.answer)
    print(f"\n{compare.table(label, rows)}")
    others = compare.compare(cases.DIFFERENT, drawn, theirs, rollstock_side.answer)
    print(f"\nDifferent on purpose:\n\n{compare.table(label, others, reasons=True)}")
    return [
        f"{label}: {row.case.name}" for row in rows if max(row.value or 0.0, row.gradient or 0.0) > row.case.tolerance
    ]


if __name__ == "__main__":
    sys.exit(main())
