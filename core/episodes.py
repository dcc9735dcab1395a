"""Episodes: tasks played to their end by the rollout role and the environment, turn by turn.

For the generate stage and for evaluation. All unfinished episodes take their turns together, so that the engine sees
full batches. A turn may be asked for in several requests, so that weights can change within it. What a trajectory is
worth is left to the score stage, how far generation runs ahead of training to `rollstock.pipeline`.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
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
    """One task in play: what was given, what was said so far, as tokens and as text.

    num_turns: of the policy's, how many are finished; turn_start: where in `tokens` its present one begins.
    """

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
    num_turns: int = 0
    turn_start: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens so far, the prompt included."""
        return len(self.prompt) + len(self.tokens)

    @property
    def turn(self) -> list[int]:
        """The tokens of the policy's present turn."""
        return self.tokens[self.turn_start :]

    def add(self, completion: Completion) -> None:
        """Append what the policy said: a turn, or the next part of one."""
        self.tokens += completion.tokens
        if completion.routed_experts is not None:
            # A later turn reads the earlier ones again; what they were sampled with is what counts.
            known = 0 if self.routed is None else len(self.routed)
            new = completion.routed_experts[known:]
            self.routed = new if self.routed is None else torch.cat([self.routed, new])
        self.mask += [True] * len(completion.tokens)
        self.logprobs += completion.logprobs
        self.versions += completion.versions
        self.finish_reason = completion.finish_reason

    def end_turn(self, text: str) -> None:
        """Take what was added since the other side spoke as one turn."""
        self.turns.append({"role": "assistant", "content": text})
        self.num_turns += 1

    def take(self, completion: Completion, text: str) -> None:
        """Append one whole turn of the policy."""
        self.add(completion)
        self.end_turn(text)

    def cut(self, length: int) -> None:
        """Let the response end after so many tokens, at a stop text that was complete there."""
        for column in (self.tokens, self.mask, self.logprobs, self.versions):
            del column[length:]
        if self.routed is not None:  # the last token was never read
            self.routed = self.routed[: len(self.prompt) + length - 1]
        self.finish_reason = "stop"

    def observe(self, reply: str, tokens: Sequence[int]) -> None:
        """Append one turn of the other side; its tokens are masked."""
        self.tokens += tokens
        self.mask += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)
        self.turns.append({"role": "user", "content": reply})
        self.turn_start = len(self.tokens)

    def trajectory(self) -> Trajectory:
        """The episode as columns want it."""
        return Trajectory(
            prompt=_column("q", self.prompt, torch.int64),
            response=_column("q", self.tokens, torch.int64),
            action_mask=_column("B", self.mask, torch.bool),
            rollout_logprobs=_column("f", self.logprobs, torch.float32),
            versions=_column("q", self.versions, torch.int64),
            group=self.group,
            task_id=self.task.id,
            finish_reason=self.finish_reason,
            routed_experts=None if self.routed is None else filled(self.routed, self.num_tokens),
            metadata={"sample": self.sample(), **self._text()},
        )

    def _text(self) -> dict[str, str]:
        """The text of the response under `text`, where one turn is all of it: nobody need decode it again."""
        return {"text": self.turns[0]["content"]} if len(self.turns) == 1 else {}

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


def _column(code: str, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    """[T]: a list as a tensor, by way of an array of that type code, which is several times as fast as by torch."""
    return torch.frombuffer(array(code, values), dtype=dtype) if values else torch.empty(0, dtype=dtype)


@dataclass(kw_only=True)
class Play:
    """Some tasks in play: all their episodes, those that go on, and what was measured so far.

    partial_tokens: how many tokens of a response are asked for at a time; None: all that it may have.
    """

    episodes: list[Episode]
    sampling: Sampling
    partial_tokens: int | None = None
    counts: PromptCounts = field(default_factory=PromptCounts)
    active: list[Episode] = field(default_factory=list)
    parts: list[Metrics] = field(default_factory=list)

    def metrics(self) -> Metrics:
        """What was measured, once no episode goes on."""
        num_turns = max((episode.num_turns for episode in self.episodes), default=0)
        played = {"rollout/max_turns": Metric(num_turns, 1.0, "max")}
        return merge_metrics([*self.parts, self.counts.metrics(), played, length_metrics(self.episodes)])


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
        context_length: int | None = None,
    ) -> None:
        """`overlong` says what becomes of a prompt over `max_prompt_tokens`: `error`, `skip` or `truncate_left`;
        context_length: how many tokens the model can read, None if nobody knows."""
        self._generate = generate
        self._environment = environment
        self._tokenizer = tokenizer
        self._context_length = context_length
        self._replying = Lock()
        self.before_request: Callable[[], None] | None = None
        """Called before each request, where something has to be waited for."""
        self.prompts = Prompts(tokenizer=tokenizer, limit=max_prompt_tokens, overlong=overlong)
        self._ends = set(end_ids(tokenizer))

    def for_thread(self, tokenizer: Any) -> Player:
        """The same for another thread, which has a tokenizer of its own; the environment answers one at a time."""
        other = copy.copy(self)
        other._tokenizer, other.prompts = tokenizer, replace(self.prompts, tokenizer=tokenizer)
        other.before_request = None
        return other

    def play(
        self, tasks: Sequence[Task], *, samples: int, sampling: Sampling, seed_of: Callable[[int, int], int]
    ) -> tuple[list[Episode], Metrics]:
        """Play every task `samples` times; `seed_of(task's place, sample)` gives each its seed.

        Returns the episodes, those of a task side by side with the task's place as group, and what was measured. Raises
        UserError for a prompt that is too long, if that is how `overlong` has it.
        """
        play = self.begin(tasks, samples=samples, sampling=sampling, seed_of=seed_of)
        while play.active:
            self.advance([play])
        return play.episodes, play.metrics()

    def begin(
        self,
        tasks: Sequence[Task],
        *,
        samples: int,
        sampling: Sampling,
        seed_of: Callable[[int, int], int],
        partial_tokens: int | None = None,
    ) -> Play:
        """The same, before anything is said; `advance` goes on until no episode is active."""
        play = Play(episodes=[], sampling=sampling, partial_tokens=partial_tokens)
        for group, task in enumerate(tasks):
            prompt = self.prompts.encode(task, play.counts)
            if prompt is not None:
                play.episodes += [Episode(task, group, seed_of(group, k), prompt, state={}) for k in range(samples)]
        play.active = list(play.episodes)
        return play

    def advance(self, plays: Iterable[Play]) -> None:
        """One request for every active episode of the plays, all together: a turn, or the next part of one.

        What the engine measured is the first play's.
        """
        together: dict[Sampling, list[tuple[Play, Episode]]] = {}
        for play in plays:
            for episode in play.active:
                together.setdefault(_sampling(episode, play.sampling), []).append((play, episode))
        for sampling, members in together.items():
            requests = [self._request(episode, play) for play, episode in members]
            if self.before_request is not None:
                self.before_request()
            result = self._generate(requests, sampling)
            members[0][0].parts.append(result.metrics)
            ended = {
                id(episode)
                for (play, episode), request, completion in zip(members, requests, result.completions, strict=True)
                if not self._goes_on(play, episode, request, completion)
            }
            for play in {id(play): play for play, _ in members}.values():
                play.active = [episode for episode in play.active if id(episode) not in ended]

    def _request(self, episode: Episode, play: Play) -> GenerationRequest:
        left = play.sampling.max_new_tokens - len(episode.tokens)
        return GenerationRequest(
            prompt=tuple(episode.prompt + episode.tokens),
            seed=episode.seed + episode.num_turns,
            max_new_tokens=left if play.partial_tokens is None else min(left, play.partial_tokens),
        )

    def _goes_on(self, play: Play, episode: Episode, request: GenerationRequest, completion: Completion) -> bool:
        """Take what was said; True if the episode has another request."""
        before = len(episode.turn)
        episode.add(completion)
        cut = self._stopped_across(episode, play.sampling, before) if before and play.sampling.stop else None
        if cut is not None:
            surplus = len(episode.tokens) - cut
            play.parts.append({"rollout/num_tokens_past_stop": Metric(surplus, 1.0, "sum")})
            episode.cut(cut)
        if self._is_unfinished(play, episode, request, completion):
            return True
        episode.end_turn(decode(self._tokenizer, episode.turn))
        return episode.finish_reason != "length" and self._is_answered(episode, play.sampling)

    def _is_unfinished(self, play: Play, episode: Episode, request: GenerationRequest, completion: Completion) -> bool:
        """Whether the turn was only cut for the size of a request; fewer tokens than that are the model's own end."""
        if episode.finish_reason != "length" or len(episode.tokens) >= play.sampling.max_new_tokens:
            return False
        has_room = self._context_length is None or episode.num_tokens < self._context_length
        return has_room and len(completion.tokens) == request.max_new_tokens

    def _stopped_across(self, episode: Episode, sampling: Sampling, before: int) -> int | None:
        """How long the response is where a stop text is complete that began in an earlier part of the turn, of `before`
        tokens. The engine, which sees the parts one by one, cannot tell; only the first tokens of a part can end one.
        """
        turn, longest = episode.turn, max(map(len, sampling.stop))
        window = 4 * longest + 8  # a character has up to four tokens; the rest is for the decoder
        said = self._spell(turn[max(0, before - window) : before])
        for end in range(before + 1, min(len(turn), before + window) + 1):
            text = self._spell(turn[max(0, before - window) : end])
            new = len(said.rstrip("\N{REPLACEMENT CHARACTER}"))
            if end > sampling.min_new_tokens and any(
                stop in text[max(0, new - len(stop) + 1) :] for stop in sampling.stop
            ):
                return episode.turn_start + end
            said = text
        return None

    def _spell(self, tokens: Sequence[int]) -> str:
        """Text as the tokens spell it, special ones too, as engines look for stop texts."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _is_answered(self, episode: Episode, sampling: Sampling) -> bool:
        """Let the other side reply to a finished turn; True if the episode has another one."""
        environment = self._environment.plugin_name
        with self._replying, noted(f"environment {environment!r} raised this in respond, for task {episode.task.id!r}"):
            reply = self._environment.respond(episode.task, episode.turns, episode.state)
        if reply is None:
            return False
        turn = episode.turn
        ended = bool(turn) and turn[-1] in self._ends
        chat = not isinstance(episode.task.prompt, str)
        tokens = encode_reply(self._tokenizer, reply, chat=chat, ended=ended)
        if len(episode.tokens) + len(tokens) >= sampling.max_new_tokens:
            episode.finish_reason = "length"
            return False
        episode.observe(reply, tokens)
        return True


def _sampling(episode: Episode, sampling: Sampling) -> Sampling:
    """The sampling of an episode's next request: what the turn has already counts towards its `min_new_tokens`."""
    said = len(episode.turn) if sampling.min_new_tokens else 0
    return replace(sampling, min_new_tokens=max(0, sampling.min_new_tokens - said)) if said else sampling


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
