"""What a profile says: the numbers as JSON, a table for people, and the files of a run's `profile/` folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstock.profile.spans import ELSEWHERE, OUTSIDE, WORK_STAGES, Span, Spans, covered

if TYPE_CHECKING:
    from rollstock.profile.capture import Capture

BETWEEN = "(between stages)"
_TOP = 25
_NOTES = {
    "slower": "recording makes operators slower, small ones most: compare shares, and take times from the metrics "
    "`timing_s/...` of a step that was not profiled",
    "own": "a call's time holds what it costs to split the batch, to carry it and to gather the results",
    "rewards": "rewards and environments' scores run in processes of their own, of which only the waiting is seen",
    "others": "workers in other processes were recorded too; each process has a trace of its own",
    "memory": "memory by stage is known of workers in this process alone; of each other process there is one peak",
    "left_out": "the trace of a process has its first {limit} events; the table counts all of them",
    "overlap": "stages overlapped: their times add up to more than a step's",
}


@dataclass
class Summary:
    """A profile of some steps; seconds are those of a step on average.

    stages: by name seconds, those of them in which workers were busy, the loop's own (neither model, nor sampling, nor
    reward), and the memory at the peak in GiB (None: nobody knows). calls: of workers. operators: by time on the device
    and then on the CPU, without what they called. processes: what was recorded.
    """

    first_step: int
    last_step: int
    step_seconds: float
    own_seconds: float
    own_share: float
    stages: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    operators: list[dict[str, Any]] = field(default_factory=list)
    processes: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def summarise(
    spans: Spans,
    captures: Mapping[str, Capture],
    *,
    steps: tuple[int, int],
    peaks: Mapping[str, int],
    unseen: Sequence[str],
    in_this_process: bool,
) -> Summary:
    """Add up what was noted and recorded. peaks: bytes by stage; unseen: roles whose workers were not recorded;
    in_this_process: whether workers live where the loop does."""
    count = steps[1] - steps[0] + 1
    outside = [span for span in spans.stages if span.name in OUTSIDE]
    stages = [span for span in spans.stages if span.name not in OUTSIDE]
    start = min((span.start for span in spans.stages), default=0)
    end = max((span.end for span in spans.stages), default=0)
    whole = [Span("", start, end, "")]
    between = (covered(whole) - covered(spans.stages)) / count
    total = (covered(whole) - covered(outside)) / count
    work = [span for span in spans.calls if span.stage in (ELSEWHERE, *WORK_STAGES)]
    busy = (covered(work, stages)) / count
    rows = [_stage(name, stages, spans.calls, count, peaks) for name in dict.fromkeys(span.name for span in stages)]
    rows.append({"stage": BETWEEN, "seconds": between, "workers": 0.0, "own": between, "peak_gib": None})
    overlap = sum(span.seconds for span in stages) > 1.01 * covered(stages)
    own = max(0.0, total - busy)
    return Summary(
        first_step=steps[0],
        last_step=steps[1],
        step_seconds=total,
        own_seconds=own,
        own_share=own / total if total else 0.0,
        stages=rows,
        calls=_calls(spans, count),
        operators=_operators(captures, count),
        processes=[
            {
                "process": name,
                "where": found.process,
                "trace": trace_name(name),
                "num_events": found.num_events,
                "num_left_out": found.num_left_out,
                "peak_gib": None if found.peak_bytes is None else found.peak_bytes / 2**30,
            }
            for name, found in captures.items()
        ],
        notes=_notes(captures, unseen, in_this_process=in_this_process, overlap=overlap),
    )


def _stage(
    name: str, stages: Sequence[Span], calls: Sequence[Span], count: int, peaks: Mapping[str, int]
) -> dict[str, Any]:
    mine = [span for span in stages if span.name == name]
    seconds = sum(span.seconds for span in mine) / count
    # While a stage waits for what another thread has asked of workers, these are busy, too.
    workers = covered([call for call in calls if call.stage in (name, ELSEWHERE)], mine) / count
    peak = peaks.get(name)
    return {
        "stage": name,
        "seconds": seconds,
        "workers": workers,
        "own": seconds - workers if name in WORK_STAGES else seconds,
        "peak_gib": None if peak is None else peak / 2**30,
    }


def _calls(spans: Spans, count: int) -> list[dict[str, Any]]:
    found: dict[str, list[Span]] = {}
    for span in spans.calls:
        found.setdefault(span.name, []).append(span)
    rows = [
        {"call": name, "calls": len(mine) / count, "seconds": sum(span.seconds for span in mine) / count}
        for name, mine in found.items()
    ]
    return sorted(rows, key=lambda row: -float(row["seconds"]))


def _operators(captures: Mapping[str, Capture], count: int) -> list[dict[str, Any]]:
    rows = [
        {
            "operator": operator.name,
            "stage": operator.stage or BETWEEN,
            "process": name,
            "calls": operator.calls / count,
            "cpu_seconds": operator.cpu_ns / 1e9 / count,
            "device_seconds": operator.device_ns / 1e9 / count,
        }
        for name, found in captures.items()
        for operator in found.operators
    ]
    return sorted(rows, key=lambda row: (-float(row["device_seconds"]), -float(row["cpu_seconds"])))


def _notes(
    captures: Mapping[str, Capture], unseen: Sequence[str], *, in_this_process: bool, overlap: bool
) -> list[str]:
    keys = ["slower", "own", "rewards"]
    if not in_this_process:
        keys += ["memory"] if len(captures) == 1 else ["others", "memory"]
    left_out = [found for found in captures.values() if found.num_left_out]
    notes = [_NOTES[key] for key in keys]
    if unseen:
        notes.append(f"not recorded, since their workers are in other processes and cannot: {', '.join(unseen)}")
    if left_out:
        notes.append(_NOTES["left_out"].format(limit=left_out[0].num_events - left_out[0].num_left_out))
    return [*notes, *([_NOTES["overlap"]] if overlap else [])]


def trace_name(process: str) -> str:
    """The file of a process's trace."""
    return f"trace-{process}.json.gz"


def tables(summary: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """The summary, as plain data, for people: each table's title, headings and rows."""
    first, last, seconds = summary["first_step"], summary["last_step"], summary["step_seconds"]
    steps = f"step {first}" if first == last else f"steps {first} to {last}, on average"
    share = f"the loop's own part is {_ms(summary['own_seconds'])} ms, {100 * summary['own_share']:.1f}%"
    stages = [
        [row["stage"], _ms(row["seconds"]), _percent(row["seconds"], seconds), _ms(row["workers"]), _ms(row["own"]),
         "-" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"]
        for row in summary["stages"]
    ]  # fmt: skip
    calls = [[row["call"], f"{row['calls']:g}", _ms(row["seconds"])] for row in summary["calls"]]
    on_device = any(row["device_seconds"] for row in summary["operators"])
    several = len(summary["processes"]) > 1
    cpu = sum(row["cpu_seconds"] for row in summary["operators"])
    headings = ["OPERATOR", "STAGE", *(["PROCESS"] if several else []), "CALLS", "CPU MS", "%"]
    operators = [
        [
            _short(row["operator"]),
            row["stage"],
            *([row["process"]] if several else []),
            f"{row['calls']:g}",
            _ms(row["cpu_seconds"]),
            _percent(row["cpu_seconds"], cpu),
            *([_ms(row["device_seconds"])] if on_device else []),
        ]
        for row in summary["operators"][:_TOP]
    ]
    processes = [
        [row["process"], row["trace"], str(row["num_events"]),
         "-" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"]
        for row in summary["processes"]
    ]  # fmt: skip
    return [
        (
            f"{steps}: {seconds:.3f} s; {share}",
            ["STAGE", "MS", "%", "IN WORKERS", "LOOP'S OWN", "PEAK GIB"],
            stages,
        ),
        ("calls of workers", ["CALL", "CALLS", "MS"], calls),
        (
            "operators, without what they called",
            [*headings, *(["DEVICE MS"] if on_device else [])],
            operators,
        ),
        ("processes", ["PROCESS", "TRACE", "EVENTS", "PEAK GIB"], processes),
    ]


def as_text(summary: Mapping[str, Any]) -> str:
    """The tables as plain text, with the notes below them."""
    parts = []
    for title, headings, rows in tables(summary):
        cells = [headings, *rows]
        widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        parts.append("\n".join([title, *lines]))
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in summary["notes"])]) + "\n"


def write(folder: Path, summary: Summary, captures: Mapping[str, Capture]) -> None:
    """Write the files, in place of those of an earlier profile of the run."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    for name, found in captures.items():
        (folder / trace_name(name)).write_bytes(found.trace)
    plain = summary.as_dict()
    (folder / "profile.json").write_text(json.dumps(plain, indent=1), encoding="utf-8")
    (folder / "profile.txt").write_text(as_text(plain), encoding="utf-8")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"


def _short(name: str) -> str:
    return name if len(name) <= 56 else f"{name[:53]}..."
