"""Episodes: tasks played to their end by the rollout role and the environment, turn by turn.

For the generate stage and for evaluation. All unfinished episodes take their turns together, so that the engine sees
full batches. What a trajectory is worth is left to the score stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rollstock.batch import Trajectory
from rollstock.errors import noted
from rollstock.interfaces.environment import Environment, Message, Sample, Task
from rollstock.interfaces.rollout import Completion, GenerationRequest, GenerationResult, Sampling
from rollstock.metrics import Metric, Metrics, merge_metrics
from rollstock.prompts import PromptCounts, Prompts
from rollstock.routing import filled
from rollstock.tokens import decode, encode_reply, end_ids

Generate = Callable[[Sequence[GenerationRequest], Sampling], GenerationResult]


@dataclass
class Episode:
    """One task in play: what was given, what was said so far, as tokens and as text."""

    task: Task
    group: int
    seed: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[Message] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = ""
    routed: torch.Tensor | None = None

    def take(self, completion: Completion, text: str) -> None:
        """Append one turn of the policy."""
        self.tokens += completion.tokens
        if completion.routed_experts is not None:
            # A later turn reads the earlier ones again; what they were sampled with is what counts.
            known = 0 if self.routed is None else len(self.routed)
            new = completion.routed_experts[known:]
            self.routed = new if self.routed is None else torch.cat([self.routed, new])
        self.mask += [True] * len(completion.tokens)
        self.logprobs += completion.logprobs
        self.versions += completion.versions
        self.turns.append({"role": "assistant", "content": text})
        self.finish_reason = completion.finish_reason

    def observe(self, reply: str, tokens: Sequence[int]) -> None:
        """Append one turn of the other side; its tokens are masked."""
        self.tokens += tokens
        self.mask += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)
        self.turns.append({"role": "user", "content": reply})

    def trajectory(self) -> Trajectory:
        """The episode as columns want it."""
        length = len(self.prompt) + len(self.tokens)
        return Trajectory(
            prompt=torch.tensor(self.prompt, dtype=torch.int64),
            response=torch.tensor(self.tokens, dtype=torch.int64),
            action_mask=torch.tensor(self.mask, dtype=torch.bool),
            rollout_logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            versions=torch.tensor(self.versions, dtype=torch.int64),
            group=self.group,
            task_id=self.task.id,
            finish_reason=self.finish_reason,
            routed_experts=None if self.routed is None else filled(self.routed, length),
            metadata={"sample": self.sample()},
        )

    def sample(self) -> Sample:
        """The episode as rewards see it."""
        said = [turn["content"] for turn in self.turns if turn["role"] == "assistant"]
        return Sample(
            task=self.task,
            response=said[-1] if said else "",
            turns=self.turns if len(self.turns) > 1 else [],
            num_tokens=sum(self.mask),
            finish_reason=self.finish_reason,
            state=self.state,
        )


class Player:
    """Plays episodes. `max_new_tokens` of the sampling bounds a whole response, replies of the other side included."""

    def __init__(
        self,
        generate: Generate,
        environment: Environment[Any],
        tokenizer: Any,
        *,
        max_prompt_tokens: int | None,
        overlong: str,
    ) -> None:
        """`overlong` says what becomes of a prompt over `max_prompt_tokens`: `error`, `skip` or `truncate_left`."""
        self._generate = generate
        self._environment = environment
        self._tokenizer = tokenizer
        self.prompts = Prompts(tokenizer=tokenizer, limit=max_prompt_tokens, overlong=overlong)
        self._ends = set(end_ids(tokenizer))

    def play(
        self, tasks: Sequence[Task], *, samples: int, sampling: Sampling, seed_of: Callable[[int, int], int]
    ) -> tuple[list[Episode], Metrics]:
        """Play every task `samples` times; `seed_of(task's place, sample)` gives each its seed.

        Returns the episodes, those of a task side by side with the task's place as group, and what was measured. Raises
        UserError for a prompt that is too long, if that is how `overlong` has it.
        """
        episodes: list[Episode] = []
        counts = PromptCounts()
        for group, task in enumerate(tasks):
            prompt = self.prompts.encode(task, counts)
            if prompt is not None:
                episodes += [Episode(task, group, seed_of(group, k), prompt, state={}) for k in range(samples)]
        parts: list[Metrics] = []
        turn, active = 0, episodes
        while active:
            result = self._generate([self._request(e, turn, sampling) for e in active], sampling)
            parts.append(result.metrics)
            active = [
                e
                for e, completion in zip(active, result.completions, strict=True)
                if self._goes_on(e, completion, sampling)
            ]
            turn += 1
        played = {"rollout/max_turns": Metric(turn, 1.0, "max")}
        return episodes, merge_metrics([*parts, counts.metrics(), played, length_metrics(episodes)])

    def _request(self, episode: Episode, turn: int, sampling: Sampling) -> GenerationRequest:
        left = sampling.max_new_tokens - len(episode.tokens)
        return GenerationRequest(
            prompt=tuple(episode.prompt + episode.tokens), seed=episode.seed + turn, max_new_tokens=left
        )

    def _goes_on(self, episode: Episode, completion: Completion, sampling: Sampling) -> bool:
        """Take a turn; True if the episode has another one."""
        episode.take(completion, decode(self._tokenizer, completion.tokens))
        if completion.finish_reason == "length":
            return False
        environment = self._environment.plugin_name
        with noted(f"environment {environment!r} raised this in respond, for task {episode.task.id!r}"):
            reply = self._environment.respond(episode.task, episode.turns, episode.state)
        if reply is None:
            return False
        ended = bool(completion.tokens) and completion.tokens[-1] in self._ends
        chat = not isinstance(episode.task.prompt, str)
        tokens = encode_reply(self._tokenizer, reply, chat=chat, ended=ended)
        if len(episode.tokens) + len(tokens) >= sampling.max_new_tokens:
            episode.finish_reason = "length"
            return False
        episode.observe(reply, tokens)
        return True


def greedy(sampling: Sampling) -> Sampling:
    """The same limits and stops, but the likeliest token always, and experts without noise."""
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=0, exploring=False)


def length_metrics(episodes: Sequence[Episode]) -> Metrics:
    """Lengths of prompts and responses in tokens, and the share of responses that the limit cut; nothing of nothing."""
    if not episodes:
        return {}
    lengths, prompts, total = [sum(e.mask) for e in episodes], [len(e.prompt) for e in episodes], len(episodes)
    return {
        "prompt_length/mean": Metric(sum(prompts) / total, total),
        "prompt_length/max": Metric(max(prompts), 1.0, "max"),
        "response_length/mean": Metric(sum(lengths) / total, total),
        "response_length/max": Metric(max(lengths), 1.0, "max"),
        "response_length/min": Metric(min(lengths), 1.0, "min"),
        "response_length/clip_ratio": Metric(sum(e.finish_reason == "length" for e in episodes) / total, total),
    }
