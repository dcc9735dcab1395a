"""Puts the page together: facts and curves as one JSON block, a style sheet and a script in the same file.

Nothing of a run becomes HTML by being pasted: what the script shows it sets as text, what is in the page itself is
escaped, and the page's security policy allows no script but its own (by hash) and no network at all.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import json
import time
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from rollstock.errors import UserError
from rollstock.folders import folder_for, path_error
from rollstock.report.health import build_health
from rollstock.report.reading import RunFiles, finite, read_run
from rollstock.report.samples import build_samples
from rollstock.report.series import build_charts, evaluation_rank
from rollstock.secrets import mask_secrets
from rollstock.units import format_bytes, format_count, format_seconds


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page of the run in `run_dir` to `out` (by default `report.html` inside it) and return where it is.

    Raises `UserError` if the directory holds no run, or the file cannot be written.
    """
    run = read_run(run_dir)
    target = out or run.directory.report
    if target.is_dir():
        raise UserError(f"{target} is a directory: name the file to write, such as {target / 'report.html'}")
    page = build_report(run)
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        with folder_for(target.parent):
            temporary.write_text(page, encoding="utf-8")
            temporary.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise path_error(error, f"the report cannot be written to {target}", "choose another --out FILE") from error
    return target


def build_report(run: RunFiles) -> str:
    """The whole page as HTML."""
    folder = files("rollstock.report")
    style, script = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    page = folder.joinpath("page.html").read_text(encoding="utf-8")
    data = {
        "charts": build_charts(run),
        "samples": build_samples(run),  # before health: reading the samples counts their damaged lines
        "health": [asdict(item) for item in build_health(run)],
        "checkpoints": [
            {"step": one.step, "score": one.score, "created": one.created, "size": format_bytes(one.stored_bytes)}
            for one in run.checkpoints
        ],
    }
    config = yaml.safe_dump(mask_secrets(run.config), sort_keys=False, allow_unicode=True) if run.config else ""
    values = {
        "TITLE": html.escape(run.directory.path.resolve().name),
        "STATUS": html.escape(run.status),
        "SUBTITLE": html.escape(_subtitle(run)),
        "TILES": _tiles(run),
        "CONFIG": html.escape(config or "config.yaml is missing or damaged."),
        "MANIFEST": html.escape(json.dumps(mask_secrets(run.manifest), indent=2, ensure_ascii=False)),
        "DATA": _safe_json(data),
        "STYLE": style,
        "SCRIPT": script,
        "STYLE_HASH": _hash(style),
        "SCRIPT_HASH": _hash(script),
        "WRITTEN": time.strftime("%Y-%m-%d %H:%M"),
    }
    # One pass over the template: a value that happens to contain a placeholder is left as it is.
    pieces = page.split("%%")
    return "".join(piece if index % 2 == 0 else values[piece] for index, piece in enumerate(pieces))


def _safe_json(data: Any) -> str:
    """JSON that cannot end its script element early, whatever the samples contain; NaN does not occur in it."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=str)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _subtitle(run: RunFiles) -> str:
    model = run.config.get("model")
    path = model.get("path") if isinstance(model, dict) else None
    backend, device = run.name_of("backend"), run.name_of("device")
    parts = [
        run.name_of("algorithm"),
        Path(path).name if isinstance(path, str) and path else "model from a config block" if model else "",
        run.name_of("environment"),
        f"{backend} on {device}" if backend and device else "",
        f"started {run.manifest['created']}" if run.manifest.get("created") else "",
    ]
    return " · ".join(part for part in parts if part)


def _tiles(run: RunFiles) -> str:
    """The numbers that a reader looks for first."""
    planned = run.planned_steps
    tiles = [("steps", f"{run.last_step}" + (f" of {planned}" if planned else ""), "")]
    rewards = finite([row["reward/mean"] for row in run.metrics.values() if "reward/mean" in row])
    if rewards:
        few = max(1, len(rewards) // 10)
        first, last = sum(rewards[:few]) / few, sum(rewards[-few:]) / few
        tiles.append(("mean reward", f"{last:.3g}", f"{first:.3g} at first"))
    evaluation = _headline(run)
    if evaluation is not None:
        tiles.append(evaluation)
    scored = [one for one in run.checkpoints if one.score is not None]
    if scored:
        best = max(scored, key=lambda one: (one.score or 0.0, one.step))
        tiles.append(("best checkpoint", f"step {best.step}", f"score {best.score:.3g}"))
    seconds = sum(finite([row.get("timing_s/step", 0.0) for row in run.metrics.values()]))
    if seconds:
        tiles.append(("time in steps", format_seconds(seconds), f"{format_seconds(seconds / len(run.metrics))} a step"))
    tokens = sum(finite([row.get("perf/total_num_tokens", 0.0) for row in run.metrics.values()]))
    if tokens:
        tiles.append(("tokens", format_count(tokens), f"{format_count(tokens / seconds)} a second" if seconds else ""))
    return "".join(
        f'<div class="tile"><span class="label">{html.escape(label)}</span>'
        f'<span class="number">{html.escape(value)}</span><span class="note">{html.escape(note)}</span></div>'
        for label, value, note in tiles
    )


def _headline(run: RunFiles) -> tuple[str, str, str] | None:
    """The first and the last number of the evaluation's leading metric."""
    names = {name for row in run.evaluations.values() for name in row}
    if not names:
        return None
    name = min(names, key=evaluation_rank)
    values = finite([row[name] for row in run.evaluations.values() if name in row])
    label = "held-out " + name.removeprefix("eval/").replace("/", ", ").replace("_", " ")
    return (label, f"{values[-1]:.3g}", f"{values[0]:.3g} at first") if values else None
