"""Draw random batches, ask rollstock and its peers for the same quantities, and print the largest differences.

    python benchmarks/oracles/run.py --verl-python /opt/verl/bin/python --trl-python /opt/trl/bin/python

Each peer lives in an environment of its own, which README.md says how to make; a peer that is left out is not compared.
`--fixtures` also stores the batches of seed 0 and the peers' answers to them, which the tests read. The exit code is 1
if a difference is larger than `--tolerance`.
"""

from __future__ import annotations

import argparse
import os
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
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="rollstock-oracles-") as folder:
        source = Path(folder) / "draws.safetensors"
        draws.save(source, drawn)
        for peer, python in (("verl", options.verl_python), ("trl", options.trl_python)):
            if python:
                theirs, told = _ask(peer, python, source)
                worst = max(worst, _report(peer, told["version"], drawn, theirs))
                if options.fixtures:
                    first = {name: found for name, found in theirs.items() if name.endswith("@0")}
                    draws.save(FIXTURES / f"{peer}.safetensors", first, told)
    if options.fixtures:
        first_draws = {name: columns for name, columns in drawn.items() if name.endswith("@0")}
        draws.save(FIXTURES / "draws.safetensors", first_draws)
    print(f"\nlargest difference: {worst:.1e}")
    return int(worst > options.tolerance)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl-python", help="the Python of verl's environment")
    parser.add_argument("--trl-python", help="the Python of TRL's environment")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"random batches of each sort (default {SEEDS})")
    parser.add_argument("--tolerance", type=float, default=1e-6, help="largest difference allowed (default 1e-6)")
    parser.add_argument("--fixtures", action="store_true", help=f"store batches and answers in {FIXTURES}")
    return parser.parse_args()


def _ask(peer: str, python: str, source: Path) -> tuple[dict[str, draws.Columns], dict[str, str]]:
    """A peer's answers to all draws, and what it says of itself."""
    target = source.with_name(f"{peer}.safetensors")
    environment = {**os.environ, "PYTHONPATH": str(HERE), "PYTHONWARNINGS": "ignore"}
    subprocess.run([python, str(HERE / f"{peer}_side.py"), str(source), str(target)], check=True, env=environment)
    return draws.load(target), draws.metadata(target)


def _report(peer: str, version: str, drawn: dict[str, draws.Columns], theirs: dict[str, draws.Columns]) -> float:
    """Print a peer's two tables; returns the largest difference of the first."""
    label, cases = f"{NAMES[peer]} {version}", CASES[peer]
    rows = compare.compare(cases.CASES, drawn, theirs, rollstock_side.answer)
    print(f"\n{compare.table(label, rows)}")
    others = compare.compare(cases.DIFFERENT, drawn, theirs, rollstock_side.answer)
    print(f"\nDifferent on purpose:\n\n{compare.table_of_reasons(label, others)}")
    return max(gap for row in rows for gap in (row.value, row.gradient) if gap is not None)


if __name__ == "__main__":
    sys.exit(main())
