"""The largest differences between two packages' answers, and the table of them.

For `run.py` and the tests. Only unmasked slots count: what stands in the others is nobody's promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from cases import Case, takes
from draws import Columns
from torch import Tensor

Results = Mapping[str, Tensor]


@dataclass(frozen=True)
class Row:
    """The largest differences of one case over all draws: of values, and of gradients (None where there are none).

    Differences are relative to the largest number of the peer's answer, where that is above 1.
    """

    case: Case
    value: float | None
    gradient: float | None
    num_draws: int


def difference(ours: Tensor, theirs: Tensor, mask: Tensor) -> float:
    """The largest difference of two answers, over unmasked slots where they have slots; infinite for NaN."""
    ours, theirs = ours.double(), theirs.double()
    if ours.shape[: mask.dim()] == mask.shape:
        ours, theirs = ours[mask], theirs[mask]
    gap = (ours - theirs).abs() / theirs.abs().max().clamp_min(1.0)
    return float(torch.nan_to_num(gap, nan=torch.inf).max())


def differences(case: Case, ours: Results, theirs: Results, mask: Tensor) -> dict[str, float]:
    """By output; KeyError where one side lacks what the other has."""
    if ours.keys() != theirs.keys():
        raise KeyError(f"{case.name}: outputs differ: ours {sorted(ours)}, theirs {sorted(theirs)}")
    return {name: difference(ours[name], theirs[name], mask) for name in case.outputs or theirs}


def of_case(case: Case, answers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of one case among all answers to a draw."""
    return {name.removeprefix(f"{case.name}/"): x for name, x in answers.items() if name.startswith(f"{case.name}/")}


def compare(
    cases: Iterable[Case],
    draws: Mapping[str, Columns],
    theirs: Mapping[str, Mapping[str, Tensor]],
    answer: Callable[[Columns, Case], Results],
) -> list[Row]:
    """Run our side of every case on every draw that it takes."""
    rows = []
    for case in cases:
        found: dict[str, float] = {}
        chosen = [name for name in draws if takes(case, name)]
        for name in chosen:
            columns = draws[name]
            gaps = differences(case, answer(columns, case), of_case(case, theirs[name]), columns["mask"])
            for output, gap in gaps.items():
                found[output] = max(gap, found.get(output, 0.0))
        gradient = found.pop("gradient", None)
        rows.append(Row(case, max(found.values(), default=None), gradient, len(chosen)))
    return rows


def table(peer: str, rows: Iterable[Row], *, reasons: bool = False) -> str:
    """The rows as a Markdown table; `reasons`: with those for which they differ on purpose, in place of counts."""
    lines = [
        f"| {peer} | rollstock | values | gradients | {'why' if reasons else 'batches'} |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.case.name} | `{row.case.ours}` | {_number(row.value)} | {_number(row.gradient)} | "
        f"{row.case.why if reasons else row.num_draws} |"
        for row in rows
    ]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.0e}"
