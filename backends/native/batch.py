"""One batch of responses, from its prompts to the last row's end.

For the engine. Each step is a handful of operations on whole columns; the processor looks at single rows only when one
of them may have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from rollstock import Sampling
from rollstock.backends.native.decoder import Decoder
from rollstock.backends.native.planning import Group
from rollstock.backends.native.sampler import choose
from rollstock.backends.native.stopping import STOP_ID, StopRules
from rollstock.uniforms import as_int64, uniforms

_DRAWS: Final = 512  # how many steps of random numbers are drawn at once


@dataclass(frozen=True)
class Finished:
    """One response: its tokens, their log-probs, and the stop id or string that ended it (None: its limit did).

    routed_experts [P + T - 1, layers, k]: of every token but the last, prompt included; None if nobody asks.
    """

    tokens: list[int]
    logprobs: list[float]
    stop: int | str | None
    routed_experts: Tensor | None = None


class _Record:
    """What was sampled so far, for all rows that the batch began with; `alive` maps the rows still running to those."""

    def __init__(self, rows: int, steps: int, device: torch.device) -> None:
        self.tokens = torch.zeros((steps, rows), dtype=torch.int64, device=device)
        self.logprobs = torch.zeros((steps, rows), dtype=torch.float32, device=device)
        self.lengths = [0] * rows
        self.stops: list[int | str | None] = [None] * rows
        self.alive = torch.arange(rows)
        self._prompt_experts: list[Tensor] = []  # of each row, [P, layers, k]
        self._experts: Tensor | None = None  # [steps, rows, layers, k]

    def capture_prompts(self, captured: Tensor | None, lengths: Sequence[int], rows: Tensor) -> None:
        """Keep the experts of the prompts, of `lengths` tokens each, for the `rows` [B] that continue them."""
        if captured is not None:
            prompts = captured.split(list(lengths))
            self._prompt_experts = [prompts[prompt] for prompt in rows.tolist()]
            self._experts = captured.new_zeros((*self.tokens.shape, *captured.shape[1:]))

    def capture_step(self, step: int, captured: Tensor | None) -> None:
        """Keep the experts of the tokens that were sampled in `step`, of the rows still running."""
        if captured is not None and self._experts is not None:
            self._experts[step, self.alive] = captured

    def _experts_of(self, row: int, length: int) -> Tensor | None:
        if self._experts is None:
            return None
        return torch.cat([self._prompt_experts[row], self._experts[: max(length - 1, 0), row]])

    def finished(self) -> list[Finished]:
        """The responses, in the order of the rows that the batch began with."""
        tokens, logprobs = self.tokens.T.tolist(), self.logprobs.T.tolist()
        return [
            Finished(tokens[row][:length], logprobs[row][:length], self.stops[row], self._experts_of(row, length))
            for row, length in enumerate(self.lengths)
        ]


def run_batch(
    decoder: Decoder,
    groups: Sequence[Group],
    *,
    seeds: Sequence[int],
    limits: Sequence[int],
    sampling: Sampling,
    rules: StopRules,
) -> list[Finished]:
    """Sample a response for every member of `groups`, in their order; `seeds` and `limits` (at least 1) are in that
    order too.

    The random number of a token is a function of the seed and of the token's place in the whole sequence, so that a
    response continued in a second request with the same seed is the response that one request would have given.
    """
    counts = [len(group.members) for group in groups]
    device, steps = decoder.device, max(limits)
    record = _Record(len(seeds), steps, device)
    streams = _Streams(seeds, [len(group.prompt) for group in groups for _ in group.members], steps)
    limit = torch.tensor(limits)
    rows_of_prompts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    logits = decoder.start([group.prompt for group in groups], counts, steps)
    record.capture_prompts(decoder.captured, [len(group.prompt) for group in groups], rows_of_prompts)
    alive = record.alive.to(device)
    ends = (rules.flags == STOP_ID).nonzero()[:, 0]
    for step in range(steps):
        tokens, logprobs = choose(
            logits,
            streams.at(step).to(device)[alive],
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            forbidden=ends if step < sampling.min_new_tokens else None,
            rows=decoder.rows,
        )
        record.tokens[step, alive] = tokens
        record.logprobs[step, alive] = logprobs
        flags = rules.flags[tokens] if step >= sampling.min_new_tokens else torch.zeros_like(tokens)
        at_limit = limit[record.alive] <= step + 1
        if bool(at_limit.any()) or bool(flags.any()):
            rows = _still_running(record, step, tokens, flags, at_limit, rules)
            if decoder.prefixes is not None:
                _remember_ended(decoder, record, step, rows)
            if len(rows) == 0:
                break
            if len(rows) < len(tokens):
                decoder.keep(rows)
                record.alive = record.alive[rows]
                alive = record.alive.to(device)
                tokens = tokens[rows.to(device)]
        logits = decoder.step(tokens)
        record.capture_step(step, decoder.captured)
    return record.finished()


def _still_running(
    record: _Record, step: int, tokens: Tensor, flags: Tensor, at_limit: Tensor, rules: StopRules
) -> Tensor:
    """Note which rows end with this step; returns those that go on, few of them moved: the last fill the holes."""
    ended = at_limit.clone()
    token_list = tokens.tolist()
    for row, flag in enumerate(flags.tolist()):
        if not flag:
            continue
        first = int(record.alive[row])
        stop: int | str | None = token_list[row]
        if flag != STOP_ID:
            stop = rules.found(record.tokens[max(0, step + 1 - rules.window) : step + 1, first].tolist())
        if stop is not None:
            record.stops[first] = stop
            ended[row] = True
    for row in ended.nonzero()[:, 0].tolist():
        record.lengths[int(record.alive[row])] = step + 1
    going = (~ended).nonzero()[:, 0]
    rows = torch.arange(len(going))
    holes = ended[: len(going)].nonzero()[:, 0]
    rows[holes] = going[len(going) - len(holes) :]
    return rows


def _remember_ended(decoder: Decoder, record: _Record, step: int, going: Tensor) -> None:
    """Keep the states of the rows that are not among those `going` on."""
    ended = sorted(set(range(len(record.alive))) - set(going.tolist()))
    tokens = record.tokens[:step, record.alive[ended].to(record.tokens.device)].T
    decoder.remember(ended, tokens.tolist())


class _Streams:
    """The random numbers of all rows, some hundred steps at a time: one step is too little work for a tensor."""

    def __init__(self, seeds: Sequence[int], starts: Sequence[int], steps: int) -> None:
        self._seeds = torch.tensor([as_int64(seed) for seed in seeds], dtype=torch.int64)
        self._starts = torch.tensor(starts, dtype=torch.int64)
        self._steps = steps
        self._first, self._drawn = 0, torch.zeros((0, len(seeds)), dtype=torch.float64)

    def at(self, step: int) -> Tensor:
        """The numbers of one step, `[B]` float64, on the CPU; steps are asked for in order."""
        if step >= self._first + len(self._drawn):
            positions = torch.arange(step, min(step + _DRAWS, self._steps))[:, None] + self._starts
            self._first, self._drawn = step, uniforms(self._seeds, positions)
        return self._drawn[step - self._first]
