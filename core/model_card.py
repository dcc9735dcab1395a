"""The README of an exported model: what it is, how it was trained, and how well that went.

For `rollstock export`. Every number comes from the run's files; secrets are masked.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rollstock.report.reading import Row, RunFiles, finite
from rollstock.report.series import evaluation_rank
from rollstock.secrets import mask_secrets

if TYPE_CHECKING:
    from rollstock.checkpoint import Checkpoint

NUM_ROWS = 10
LANGUAGE_MODEL = "AutoModelForCausalLM"
_USE = """```python
from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
```"""
_SCORING = """

Its one logit is the score of a conversation that ends with the token that ends a response. Where the config has no
padding token, because that token is also the padding, score one conversation at a time, or choose another padding token
for model and tokenizer first."""


def model_card(run: RunFiles, checkpoint: Checkpoint) -> str:
    """The card as Markdown with the front matter that model hubs read."""
    algorithm = run.name_of("algorithm") or "unknown"
    rewarded = any("reward/mean" in row for row in run.metrics.values())  # not by an offline algorithm
    tags = [*(["reinforcement-learning"] if rewarded else []), "rollstock", algorithm]
    loader = auto_class(run.directory.model)
    scores = loader != LANGUAGE_MODEL
    task = "text-classification" if scores else "text-generation"
    front = yaml.safe_dump({"library_name": "transformers", "pipeline_tag": task, "tags": tags})
    way = " by reinforcement learning" if rewarded else ""
    what = "A reward model trained" if scores else f"A language model trained{way}"
    parts = [
        f"---\n{front}---",
        f"# {run.directory.path.resolve().name}",
        f"{what} with rollstock: `{algorithm}` on `{run.name_of('environment') or 'unknown'}`, {_base_model(run)}.",
        f"## Use\n\n{_USE.format(auto_class=loader)}{_SCORING if scores else ''}",
        f"## Training\n\n{_facts(run, checkpoint)}",
        _curves(run, checkpoint.step),
        f"## Config\n\n```yaml\n{_config(run)}```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def auto_class(model: Path) -> str:
    """The class of transformers that loads the directory of a model: a language model, or a reward model."""
    path = model / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    scores = any("SequenceClassification" in str(name) for name in config.get("architectures") or [])
    return "AutoModelForSequenceClassification" if scores else LANGUAGE_MODEL


def _base_model(run: RunFiles) -> str:
    model = run.config.get("model")
    path = model.get("path") if isinstance(model, dict) else None
    return f"starting from `{Path(path).name}`" if isinstance(path, str) and path else "starting from random weights"


def _facts(run: RunFiles, checkpoint: Checkpoint) -> str:
    score = "" if checkpoint.score is None else f", held-out score {checkpoint.score:.4g}"
    train = run.config.get("train")
    seed = train.get("seed") if isinstance(train, dict) else None
    packages = run.manifest.get("packages", {})
    versions = [f"{name} {packages[name]}" for name in ("torch", "transformers") if name in packages]
    data = [f"`{name}`: `{print_}`" for name, print_ in run.manifest.get("data", {}).items() if print_]
    rows = [
        ("checkpoint", f"step {checkpoint.step} of {run.planned_steps or run.last_step}{score}"),
        ("seed", "" if seed is None else str(seed)),
        ("versions", ", ".join([f"rollstock {run.manifest.get('rollstock', 'unknown')}", *versions])),
        ("data", ", ".join(data)),
        ("started", str(run.manifest.get("created") or "")),
    ]
    return "\n".join(f"- {name}: {_one_line(value)[:200]}" for name, value in rows if value)


def _curves(run: RunFiles, step: int) -> str:
    """Rewards and held-out results up to the exported step, as tables."""
    rewards = {at: row for at, row in run.metrics.items() if at <= step and "reward/mean" in row}
    evaluations = {at: row for at, row in run.evaluations.items() if at <= step}
    names = sorted({name for row in evaluations.values() for name in row}, key=evaluation_rank)
    names = [name for name in names if "num_" not in name and "length" not in name][:4]
    tables = [
        ("Mean reward in training", _table(["reward/mean"], _averaged(rewards))),
        ("Held-out results", _table(names, _averaged(evaluations, width=1))),
    ]
    shown = [f"{title}:\n\n{table}" for title, table in tables if table]
    return "## Results\n\n" + "\n\n".join(shown) if shown else ""


def _averaged(rows: Mapping[int, Row], width: int = 0) -> list[tuple[str, list[Row]]]:
    """At most `NUM_ROWS` spans of neighbouring steps, each with its rows; of `width` 1, single steps picked evenly."""
    steps = list(rows)
    count = min(len(steps), NUM_ROWS)
    if width == 1:
        picked = sorted({steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)})
        return [(str(step), [rows[step]]) for step in picked]
    cuts = [round(i * len(steps) / count) for i in range(count + 1)] if count else []
    spans = [steps[start:end] for start, end in itertools.pairwise(cuts)]
    return [
        (str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}", [rows[step] for step in span])
        for span in spans
    ]


def _table(names: Sequence[str], spans: list[tuple[str, list[Row]]]) -> str:
    if not spans or not names:
        return ""
    lines = ["| step | " + " | ".join(f"`{_one_line(name)}`" for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    for label, rows in spans:
        values = [finite([row[name] for row in rows if name in row]) for name in names]
        lines.append(f"| {label} | " + " | ".join(f"{sum(v) / len(v):.4g}" if v else "" for v in values) + " |")
    return "\n".join(lines)


def _config(run: RunFiles) -> str:
    told = {name: section for name, section in run.config.items() if name != "run"}  # local paths help nobody
    masked: dict[str, Any] = mask_secrets(told)
    text = yaml.safe_dump(masked, sort_keys=False, allow_unicode=True)
    return re.sub(r"^```", "` ` `", text, flags=re.MULTILINE)  # nothing in the config may close the block


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")
