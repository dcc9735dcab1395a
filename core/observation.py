"""What a step records of its batch: metrics of scores, lengths and advantages, and the trajectories as rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollstock.batch import Batch
from rollstock.metrics import Metric, Metrics
from rollstock.tokens import decode


def score_metrics(batch: Batch) -> Metrics:
    """The scores of a generated batch, before anything is dropped; samples without a score are left out."""
    scores = batch.scores[batch.scored]
    if len(scores) == 0:
        return {}
    return {
        "reward/mean": Metric(float(scores.mean()), len(scores)),
        "reward/max": Metric(float(scores.max()), 1.0, "max"),
        "reward/min": Metric(float(scores.min()), 1.0, "min"),
        "reward/std": Metric(float(scores.std(unbiased=False)), len(scores)),
        "reward/uniform_groups": _uniform_groups(batch),
    }


def batch_metrics(batch: Batch) -> Metrics:
    """Advantages and lengths of the batch that was trained on."""
    mask = batch.mask
    count = int(mask.sum())
    lengths = batch.total_lengths()
    metrics: Metrics = {
        "sequence_length/min": Metric(min(lengths), 1.0, "min"),
        "sequence_length/max": Metric(max(lengths), 1.0, "max"),
        "sequence_length/mean": Metric(sum(lengths) / len(lengths), len(lengths)),
        "train/num_trajectories": Metric(len(batch), 1.0, "sum"),
        "train/num_action_tokens": Metric(count, 1.0, "sum"),
        "response_length/num_empty": Metric(int((batch.lengths == 0).sum()), 1.0, "sum"),
    }
    for name in ("advantages", "returns", "values"):
        if name in batch and count:
            picked = batch[name][mask]
            key = {"advantages": "critic/advantages", "returns": "critic/returns", "values": "critic/values"}[name]
            metrics[f"{key}/mean"] = Metric(float(picked.mean()), count)
            metrics[f"{key}/max"] = Metric(float(picked.max()), 1.0, "max")
            metrics[f"{key}/min"] = Metric(float(picked.min()), 1.0, "min")
    return metrics


def rollout_rows(batch: Batch, step: int, tokenizer: Any, limit: int) -> list[Mapping[str, Any]]:
    """One row a trajectory, for the run's files; `limit` 0 means all of them."""
    count = len(batch) if limit == 0 else min(limit, len(batch))
    num_tokens = _sums(batch, batch.flat("action_mask"))
    advantages: Sequence[float | None] = [None] * len(batch)
    if "advantages" in batch:
        advantages = (_sums(batch, batch.flat("advantages")) / num_tokens.clamp(min=1)).tolist()
    responses = batch.flat("response").split(batch.lengths.tolist())
    groups, scores, scored = (column.tolist() for column in (batch.groups, batch.scores, batch.scored))
    prompts: dict[bytes, str] = {}
    rows: list[Mapping[str, Any]] = []
    for i, counted in enumerate(num_tokens.tolist()[:count]):
        sample, prompt = batch.metadata[i].get("sample"), batch.prompts[i].numpy().tobytes()
        if prompt not in prompts:
            prompts[prompt] = decode(tokenizer, batch.prompts[i].tolist())
        text = batch.metadata[i].get("text")
        rows.append(
            {
                "step": step,
                "group": groups[i],
                "task_id": batch.task_ids[i],
                "prompt": prompts[prompt],
                "response": decode(tokenizer, responses[i].tolist()) if text is None else text,
                "answer": None if sample is None else sample.task.answer,
                "reward": scores[i] if scored[i] else None,
                "rewards": batch.metadata[i].get("rewards", {}),
                "finish_reason": batch.finish_reasons[i],
                "num_tokens": counted,
                "advantage": advantages[i],
            }
        )
    return rows


def _sums(batch: Batch, column: Tensor) -> Tensor:
    """[B]: what a flat column of tokens comes to in each trajectory."""
    kind = column.dtype if column.is_floating_point() else torch.int64
    return torch.zeros(len(batch), dtype=kind).index_add_(0, batch.rows(), column.to(kind))


def _uniform_groups(batch: Batch) -> Metric:
    """The share of groups whose scores are all equal: they carry no signal for group-relative methods."""
    by_group: dict[int, set[float]] = {}
    for group, score in zip(batch.groups[batch.scored].tolist(), batch.scores[batch.scored].tolist(), strict=True):
        by_group.setdefault(group, set()).add(score)
    return Metric(sum(len(found) == 1 for found in by_group.values()) / len(by_group), len(by_group))
