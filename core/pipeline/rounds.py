"""A round: the tasks of one call of the generate stage, on their way from the first token to the score.

For the pipelines that generate ahead, and for their checkpoints: a round is written as tensors and JSON, and read back.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rollstock.episodes import Episode, Play
from rollstock.interfaces.environment import Sample, Task
from rollstock.metrics import Metric, Metrics
from rollstock.prompts import PromptCounts
from rollstock.roles.reward import Scores

if TYPE_CHECKING:
    from torch import Tensor

    from rollstock.interfaces.rollout import Sampling

_COLUMNS: Mapping[str, torch.dtype] = {
    "prompt": torch.int64,
    "tokens": torch.int64,
    "mask": torch.bool,
    "logprobs": torch.float64,  # as engines give them: Python's numbers
    "versions": torch.int64,
}
_PLAIN = ("group", "seed", "turns", "state", "finish_reason", "num_turns", "turn_start")


@dataclass
class Round:
    """position: of its first task among all that the run hands out; number: its place among the rounds, from 1;
    is_generated: whether every episode is finished; is_taken: whether the step under way trains on it; samples: as they
    were scored."""

    position: int
    number: int
    tasks: list[Task]
    play: Play
    is_generated: bool = False
    is_taken: bool = False
    samples: list[Sample] | None = None
    scores: Scores | None = None

    @property
    def end(self) -> int:
        """The position of the first task behind it."""
        return self.position + len(self.tasks)

    def take_samples(self) -> list[Sample]:
        """The finished episodes as rewards see them, and as nothing that happens to the batch will change them."""
        return [
            dataclasses.replace(sample, turns=copy.deepcopy(sample.turns), state=copy.deepcopy(sample.state))
            for sample in (episode.sample() for episode in self.play.episodes)
        ]


def pack(rounds: Sequence[Round]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Rounds as JSON data, and as tensors: a column of all episodes, end to end, with the length of each."""
    episodes = [episode for each in rounds for episode in each.play.episodes]
    tensors: dict[str, Tensor] = {}
    for name, kind in _COLUMNS.items():
        parts = [getattr(episode, name) for episode in episodes]
        tensors[name] = torch.tensor([value for part in parts for value in part], dtype=kind)
        tensors[f"{name}_lengths"] = torch.tensor([len(part) for part in parts], dtype=torch.int64)
    routed = [episode.routed for episode in episodes if episode.routed is not None]
    if routed:
        tensors["routed"] = torch.cat(routed)
        lengths = [-1 if episode.routed is None else len(episode.routed) for episode in episodes]
        tensors["routed_lengths"] = torch.tensor(lengths, dtype=torch.int64)
    return [_plain(each) for each in rounds], tensors if episodes else {}


def _plain(each: Round) -> dict[str, Any]:
    scores = each.scores
    active = {id(episode) for episode in each.play.active}
    return {
        "position": each.position,
        "number": each.number,
        "num_tasks": len(each.tasks),
        "partial_tokens": each.play.partial_tokens,
        "counts": dataclasses.asdict(each.play.counts),
        "parts": [_plain_metrics(part) for part in each.play.parts],
        "episodes": [
            {**{name: getattr(e, name) for name in _PLAIN}, "is_active": id(e) in active} for e in each.play.episodes
        ],
        "scores": None
        if scores is None
        else {"totals": scores.totals, "parts": scores.parts, "metrics": _plain_metrics(scores.metrics)},
    }


def unpack(
    kept: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor], tasks: Mapping[int, Task], sampling: Sampling
) -> list[Round]:
    """The rounds that `pack` wrote; `tasks`: by their position."""
    columns = {name: _cut(tensors, name) for name in _COLUMNS} if tensors else {}
    routed = _cut(tensors, "routed") if "routed" in tensors else None
    rounds, first = [], 0
    for plain in kept:
        mine = [tasks[plain["position"] + place] for place in range(plain["num_tasks"])]
        episodes = []
        for place, values in enumerate(plain["episodes"], start=first):
            listed = {name: columns[name][place].tolist() for name in _COLUMNS}
            own = {name: values[name] for name in _PLAIN}
            captured = None if routed is None else routed[place]
            episodes.append(Episode(task=mine[values["group"]], routed=captured, **listed, **own))
        first += len(episodes)
        rounds.append(_unpack_one(plain, mine, episodes, sampling))
    return rounds


def _unpack_one(plain: Mapping[str, Any], tasks: list[Task], episodes: list[Episode], sampling: Sampling) -> Round:
    play = Play(
        episodes=episodes,
        sampling=sampling,
        partial_tokens=plain["partial_tokens"],
        counts=PromptCounts(**plain["counts"]),
        active=[e for e, values in zip(episodes, plain["episodes"], strict=True) if values["is_active"]],
        parts=[_metrics(part) for part in plain["parts"]],
    )
    made = Round(plain["position"], plain["number"], tasks, play, is_generated=not play.active)
    if plain["scores"] is not None:
        said = plain["scores"]
        made.samples = made.take_samples()
        made.scores = Scores(said["totals"], said["parts"], _metrics(said["metrics"]))
    return made


def _cut(tensors: Mapping[str, Tensor], name: str) -> list[Any]:
    """A column's part of each episode; None where it has none."""
    lengths = tensors[f"{name}_lengths"].tolist()
    parts = iter(tensors[name].split([length for length in lengths if length >= 0]))
    return [next(parts) if length >= 0 else None for length in lengths]


def _plain_metrics(metrics: Metrics) -> dict[str, list[Any]]:
    return {name: [float(metric.value), float(metric.weight), metric.reducer] for name, metric in metrics.items()}


def _metrics(plain: Mapping[str, Sequence[Any]]) -> Metrics:
    return {name: Metric(value, weight, reducer) for name, (value, weight, reducer) in plain.items()}
