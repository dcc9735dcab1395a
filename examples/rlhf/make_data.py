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


CHARACTERS = "0123456789,="


def largest() -> Iterable[dict[str, str]]:
    """Name the largest of three digits. The rejected response is another digit (a neighbour of the right one, or any),
    the right one with something after it, or any text at all.

    Whatever pairs do not show, a reward model makes up. With digits of the prompt alone as rejected ones it learned
    that large digits are good, and a policy that trained on it answered 8 to everything; without empty responses among
    them it found those the best of all.
    """
    generator = random.Random(0)
    digits = [(a, b, c) for a in range(10) for b in range(10) for c in range(10)]
    generator.shuffle(digits)
    for place, three in enumerate(digits):
        right = str(max(three))
        if place % 4 == 0:
            wrong = right + generator.choice(CHARACTERS)
        elif place % 4 == 1:
            wrong = "".join(generator.choices(CHARACTERS, k=generator.choice((0, 2, 3))))
        else:
            reach = 1 if place % 4 == 2 else 9
            wrong = generator.choice([d for d in "0123456789" if 0 < abs(int(d) - int(right)) <= reach])
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
