"""Offline training: trajectories made of the responses that tasks themselves hold, and the loss on held-out ones.

For the generate stage and the evaluation of offline algorithms, such as fine-tuning on demonstrations or on pairs.
What the data may look like is the environment's, what is made of it the algorithm's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rollstock.batch import Batch, Trajectory
from rollstock.episodes import Episode, length_metrics
from rollstock.errors import UserError, noted
from rollstock.interfaces.algorithm import Algorithm
from rollstock.interfaces.environment import Task
from rollstock.interfaces.rollout import Completion
from rollstock.metrics import Metric, Metrics, merge_metrics, metric_values
from rollstock.micro import Totals
from rollstock.prompts import PromptCounts, Prompts
from rollstock.tokens import encode_text, end_ids

if TYPE_CHECKING:
    from rollstock.run import Run


def recorded_batch(run: Run, tasks: Sequence[Task], *, version: int) -> Batch:
    """What the generate stage makes of tasks for an offline algorithm; scores included, since nobody is asked.

    version: of the policy that reads them, which is the step in training, and -1 in evaluation.
    """
    limit = run.sampling.max_new_tokens
    trajectories, metrics = read_responses(tasks, run.algorithm, run.player.prompts, limit=limit, version=version)
    run.record(metrics)
    batch = Batch.from_trajectories(trajectories)
    batch.whole_groups = run.algorithm.whole_groups
    return batch


def heldout_loss(run: Run, count: int) -> tuple[dict[str, float], float | None]:
    """The loss and the algorithm's metrics on the first `count` held-out tasks, as `eval/...`, and minus the loss."""
    batch = recorded_batch(run, run.tasks.heldout(count), version=-1)
    if len(batch) == 0:
        return {"eval/num_samples": 0.0}, None
    run.manager.hook.rollstock_prepare(run=run, batch=batch)
    run.manager.hook.rollstock_advantages(run=run, batch=batch)
    totals = Totals.of(batch, response_limit=run.sampling.max_new_tokens)
    found = metric_values(run.roles["actor"].call("measure", batch, totals, run.algorithm.state()))
    values = {f"eval/{name.removeprefix('actor/')}": value for name, value in found.items()}
    return {"eval/num_samples": float(len(batch)), **values}, -found["loss"]


def read_responses(
    tasks: Sequence[Task], algorithm: Algorithm[Any], prompts: Prompts, *, limit: int, version: int = -1
) -> tuple[list[Trajectory], Metrics]:
    """One trajectory for each response that the algorithm takes, those of a task side by side with its place as group.

    A response is its text as tokens and the token that ends one, cut to `limit` tokens (finish reason `length`). Raises
    UserError for a task with too few responses, and for a prompt that is too long if that is an error.
    """
    counts = PromptCounts()
    episodes: list[Episode] = []
    scores: list[float] = []
    for group, task in enumerate(tasks):
        texts = chosen_responses(task, algorithm)
        prompt = prompts.encode(task, counts)
        if prompt is None:
            continue
        for place, text in enumerate(texts):
            episode = Episode(task, group, 0, prompt)
            episode.take(_completion(encode_response(prompts.tokenizer, text, task), limit, version), text)
            episodes.append(episode)
            scores.append((len(texts) - 1 - place) / (len(texts) - 1) if len(texts) > 1 else 1.0)
    cut = sum(episode.finish_reason == "length" for episode in episodes)
    metrics = merge_metrics(
        [
            counts.metrics(),
            length_metrics(episodes),
            {"response_length/num_truncated": Metric(cut, 1.0, "sum")},
        ]
    )
    made = [
        dataclasses.replace(episode.trajectory(), reward=score) for episode, score in zip(episodes, scores, strict=True)
    ]
    return made, metrics


def chosen_responses(task: Task, algorithm: Algorithm[Any]) -> list[str]:
    """Those of a task's responses that the algorithm trains on. Raises UserError if the task has not what it needs."""
    wanted, found = algorithm.samples_per_prompt, len(task.responses)
    if found == wanted or (found > wanted and not algorithm.whole_groups):
        return task.responses[:wanted]
    exactly = "exactly " if algorithm.whole_groups else ""
    needed = f"{exactly}{wanted} response{'s' if wanted > 1 else ''}"
    raise UserError(
        f"task {task.id!r} holds {found or 'no'} response{'' if found == 1 else 's'}, and algorithm "
        f"{algorithm.plugin_name!r} trains on {needed} of each task, which the environment takes from its data "
        "(`Task.responses`, the best first): set its options for that, or choose an algorithm that samples"
    )


def encode_response(tokenizer: Any, text: str, task: Task) -> list[int]:
    """A response as a policy would sample it: the ids of its text, and the one that ends a response where there is one.

    Raises UserError, with the task in its notes, for a text that the tokenizer cannot encode.
    """
    with noted(f"in a response of task {task.id!r}"):
        return [*encode_text(tokenizer, text), *end_ids(tokenizer)[:1]]


def _completion(tokens: list[int], limit: int, version: int) -> Completion:
    """No policy sampled this, so there are no log-probs (0)."""
    kept = tokens[:limit]
    return Completion(
        tokens=kept,
        logprobs=[0.0] * len(kept),
        finish_reason="stop" if len(kept) == len(tokens) else "length",
        versions=[version] * len(kept),
    )
