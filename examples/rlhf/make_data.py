"""Write the data of these examples into `data/`: demonstrations and preference pairs for two small tasks.

For everyone who wants to see where the files come from, or others like them: `python examples/rlhf/make_data.py`. Both
tasks have a rule that says what is right, so that what a run has learned can be measured; with data of people's
judgements nothing else in the configs changes.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

DATA = Path(__file__).resolve().parent / "data"


def largest() -> Iterable[dict[str, str]]:
    """Name the largest of three digits: the rejected response is another digit, or one digit too many."""
    generator = random.Random(0)
    digits = [(a, b, c) for a in range(10) for b in range(10) for c in range(10)]
    generator.shuffle(digits)
    for place, three in enumerate(digits):
        right = str(max(three))
        others = [str(digit) for digit in three if digit != max(three)]
        wrong = generator.choice(others) if others and place % 2 else right + str(generator.choice(three))
        yield {"prompt": f"{','.join(map(str, three))}=", "chosen": right, "rejected": wrong}


def sums() -> Iterable[dict[str, str]]:
    """Add two digits and say nothing else: each is asked twice, rejected are a sentence and a wrong number."""
    generator = random.Random(0)
    rows = []
    for a in range(1, 10):
        for b in range(1, 10):
            right = a + b
            wrong = generator.choice([n for n in range(max(1, right - 3), right + 4) if n != right])
            row = {"prompt": f"What is {a} + {b}? Answer with a number only.", "chosen": str(right)}
            rows += [
                {**row, "rejected": f"The sum of {a} and {b} is {right}."},
                {**row, "rejected": str(wrong)},
            ]
    generator.shuffle(rows)
    return rows


def write(folder: Path) -> None:
    """Write every file into `folder`, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for make in (largest, sums):
        lines = "".join(json.dumps(row) + "\n" for row in make())
        (folder / f"{make.__name__}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)
