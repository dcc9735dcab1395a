"""The best and worst trajectories of some steps, cut to a size that a page can carry."""

from __future__ import annotations

import json
from typing import Any

from rollstock.report.reading import RunFiles
from rollstock.secrets import mask_text

MAX_STEPS = 40
NUM_EACH = 3
MAX_CHARACTERS = 3000


def build_samples(run: RunFiles) -> list[dict[str, Any]]:
    """For at most `MAX_STEPS` steps, spread evenly from the first to the last: `step`, `count`, `best`, `worst`."""
    steps = run.rollout_steps()
    if len(steps) > MAX_STEPS:
        steps = [steps[round(index * (len(steps) - 1) / (MAX_STEPS - 1))] for index in range(MAX_STEPS)]
    chosen = []
    for step in steps:
        rows = run.rollouts(step)
        if rows:
            chosen.append({"step": step, "count": len(rows), **_best_and_worst(rows)})
    return chosen


def _best_and_worst(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """At most `NUM_EACH` of either end, none in both; what has no reward comes after the worst, so that it is seen."""
    scored = [row for row in rows if isinstance(row.get("reward"), (int, float))]
    unscored = [row for row in rows if not isinstance(row.get("reward"), (int, float))]
    ranked = sorted(scored, key=lambda row: -row["reward"])
    best = ranked[:NUM_EACH]
    worst = ranked[len(best) :][-NUM_EACH:][::-1] + unscored[:1]
    return {"best": [_shown(row) for row in best], "worst": [_shown(row) for row in worst]}


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    rewards = row.get("rewards")
    return {
        "reward": row.get("reward"),
        "rewards": rewards if isinstance(rewards, dict) and len(rewards) > 1 else {},
        "advantage": row.get("advantage"),
        "finish_reason": str(row.get("finish_reason", "")),
        "num_tokens": row.get("num_tokens"),
        "task_id": str(row.get("task_id", "")),
        "group": row.get("group"),
        "prompt": _text(row.get("prompt")),
        "response": _text(row.get("response")),
    }


def _text(value: Any) -> str:
    """A prompt may be a text or chat messages; both become something to read."""
    if isinstance(value, list) and all(isinstance(turn, dict) and "content" in turn for turn in value):
        value = "\n\n".join(f"[{turn.get('role', '')}]\n{turn['content']}" for turn in value)
    elif value is None:
        value = ""
    text = mask_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
