"""Draw a run's curves as an SVG: the mean reward of each training step, and the score on held-out tasks.

For the pictures in README and docs, each made from the metrics of a real run:
`python docs/plot_run.py runs/demo docs/images/demo.svg --title "..."`. Whole runs are shown by `rollstock report`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 44, 44
FONT = "font-family='system-ui, sans-serif' font-size='12'"
INK, FRAME = "#24292f", "#d0d7de"
STYLES = (("#8c959f", 1.2), ("#0969da", 2.2), ("#cf222e", 2.2))


@dataclass(frozen=True)
class Curve:
    """One line of the picture: `points` are (step, value); a curve with `marks` shows each of them."""

    label: str
    points: list[tuple[int, float]]
    marks: bool = False


def read_curves(run: Path) -> list[Curve]:
    """The reward of training steps, and the share of held-out tasks solved greedily and sampled, as far as measured.

    Raises ValueError if the run has no steps.
    """
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [(row["step"], row["metrics"]["reward/mean"]) for row in rows if "reward/mean" in row.get("metrics", {})]
    if not steps:
        raise ValueError(f"{run} has no training steps to draw")
    curves = [Curve("training: mean reward", steps)]
    for mode in ("greedy", "sampled"):
        name = f"eval/{mode}/solved"
        points = [(row["step"], row["evaluation"][name]) for row in rows if name in row.get("evaluation", {})]
        if points:
            curves.append(Curve(f"held-out tasks solved, {mode}", points, marks=True))
    return curves


def draw(curves: Sequence[Curve], title: str) -> str:
    """The SVG. Values run from 0 to 1, or as far as they reach; steps from 0 to the last."""
    last = max(step for curve in curves for step, _ in curve.points)
    highest = max(1.0, *(value for curve in curves for _, value in curve.points))
    lowest = min(0.0, *(value for curve in curves for _, value in curve.points))

    def place(step: float, value: float) -> tuple[float, float]:
        x = LEFT + step / max(last, 1) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (value - lowest) / (highest - lowest) * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' role='img' {FONT} fill='{INK}'>",
        f"<title>{escape(title)}</title>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>",
        f"<text x='{LEFT}' y='18' font-weight='600'>{escape(title)}</text>",
    ]
    for quarter in range(5):
        value = lowest + (highest - lowest) * quarter / 4
        (x, y), (end, _) = place(0, value), place(last, value)
        parts.append(f"<path d='M{x} {y}H{end}' stroke='{FRAME}'/>")
        parts.append(f"<text x='{x - 8}' y='{y + 4}' text-anchor='end'>{value:.2g}</text>")
        step = round(last * quarter / 4)
        parts.append(f"<text x='{place(step, 0)[0]}' y='{HEIGHT - 24}' text-anchor='middle'>{step}</text>")
    parts.append(f"<text x='{WIDTH / 2}' y='{HEIGHT - 7}' text-anchor='middle'>step</text>")
    offset = float(LEFT)
    for curve, (colour, width) in zip(curves, STYLES, strict=False):
        places = [place(step, value) for step, value in curve.points]
        line = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f"<polyline points='{line}' fill='none' stroke='{colour}' stroke-width='{width}'/>")
        if curve.marks:
            parts += [f"<circle cx='{x}' cy='{y}' r='3' fill='{colour}'/>" for x, y in places]
        parts.append(f"<path d='M{offset:g} 32h16' stroke='{colour}' stroke-width='{width}'/>")
        parts.append(f"<text x='{offset + 22:g}' y='36'>{escape(curve.label)}</text>")
        offset += 44 + 6.3 * len(curve.label)
    return "\n".join([*parts, "</svg>\n"])


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code, 2 if there is nothing to draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="directory of a run")
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    parser.add_argument("--title", default="", help="what stands above the curves; default: the run's name")
    options = parser.parse_args(arguments)
    try:
        curves = read_curves(options.run)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    options.picture.write_text(draw(curves, options.title or options.run.name), encoding="utf-8")
    print(f"wrote {options.picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
