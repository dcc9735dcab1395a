"""Curves over sizes as a small SVG, both axes logarithmic if wanted: for the pictures of `scaling.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 46, 44
INK, FRAME = "#24292f", "#d0d7de"
COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#8250df", "#bc4c00")


@dataclass(frozen=True)
class Curve:
    """One line: what was measured at each size."""

    label: str
    sizes: Sequence[float]
    values: Sequence[float]


def picture(curves: Sequence[Curve], *, title: str, label: str, logarithmic: bool) -> str:
    """The SVG; `label`: of the sizes."""
    sizes = sorted({size for curve in curves for size in curve.sizes})
    values = [value for curve in curves for value in curve.values if value > 0 or not logarithmic]
    scale = math.log10 if logarithmic else float
    low, high = (min(values), max(values)) if logarithmic else (0.0, 1.1 * max(values))
    if logarithmic:
        low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high))

    def place(size: float, value: float) -> tuple[float, float]:
        x = LEFT + (scale(size) - scale(sizes[0])) / (scale(sizes[-1]) - scale(sizes[0])) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (scale(value) - scale(low)) / (scale(high) - scale(low)) * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' role='img' "
        f"font-family='system-ui, sans-serif' font-size='12' fill='{INK}'>",
        f"<title>{escape(title)}</title>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>",
        f"<text x='{LEFT}' y='18' font-weight='600'>{escape(title)}</text>",
    ]
    for value in _ticks(low, high, logarithmic):
        (x, y), (end, _) = place(sizes[0], value), place(sizes[-1], value)
        parts.append(f"<path d='M{x} {y}H{end}' stroke='{FRAME}'/>")
        parts.append(f"<text x='{x - 8}' y='{y + 4}' text-anchor='end'>{value:g}</text>")
    for size in sizes:
        parts.append(f"<text x='{place(size, low)[0]}' y='{HEIGHT - 24}' text-anchor='middle'>{size:g}</text>")
    parts.append(f"<text x='{WIDTH / 2}' y='{HEIGHT - 7}' text-anchor='middle'>{escape(label)}</text>")
    offset = float(LEFT)
    for curve, colour in zip(curves, COLOURS, strict=False):
        places = [place(size, max(value, low)) for size, value in zip(curve.sizes, curve.values, strict=True)]
        line = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f"<polyline points='{line}' fill='none' stroke='{colour}' stroke-width='2'/>")
        parts += [f"<circle cx='{x}' cy='{y}' r='3' fill='{colour}'/>" for x, y in places]
        parts.append(f"<path d='M{offset:g} 34h16' stroke='{colour}' stroke-width='2'/>")
        parts.append(f"<text x='{offset + 22:g}' y='38'>{escape(curve.label)}</text>")
        offset += 44 + 6.3 * len(curve.label)
    return "\n".join([*parts, "</svg>\n"])


def _ticks(low: float, high: float, logarithmic: bool) -> list[float]:
    if not logarithmic:
        return [high * part / 4 for part in range(5)]
    return [10.0**power for power in range(round(math.log10(low)), round(math.log10(high)) + 1)]
