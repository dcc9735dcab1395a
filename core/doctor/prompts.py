"""Prompts, and responses that the data holds: a sample of the tasks turned into tokens, as the run will do, and their
lengths held against the limits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollstock.doctor.finding import Finding
from rollstock.errors import RollstockError
from rollstock.offline import chosen_responses, encode_response
from rollstock.tokens import encode_prompt

if TYPE_CHECKING:
    from rollstock.interfaces.algorithm import Algorithm
    from rollstock.interfaces.environment import Environment, Split
    from rollstock.schema import RunConfig

MAX_TASKS = 500
MAX_SECONDS = 10.0


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens of the prompts that were looked at, shortest first, and how many tasks there are in all.

    responses: those of the responses that an offline algorithm trains on, shortest first.
    """

    tokens: tuple[int, ...]
    num_tasks: int | None
    responses: tuple[int, ...] = ()

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt; 1 if none was looked at."""
        return self.tokens[-1] if self.tokens else 1


def measure_prompts(environment: Environment[Any], tokenizer: Any, algorithm: Algorithm[Any]) -> Lengths:
    """Encode tasks spread over both splits, at most `MAX_TASKS` a split or for `MAX_SECONDS`.

    Raises UserError for what cannot be encoded, and for a task without the responses that the algorithm trains on,
    naming the task.
    """
    lengths: list[int] = []
    responses: list[int] = []
    deadline = time.monotonic() + MAX_SECONDS
    splits: tuple[Split, ...] = ("train", "heldout")
    for split in splits:
        size = environment.num_tasks(split)
        count = MAX_TASKS if size is None else min(size, MAX_TASKS)
        for k in range(count):
            index = k if size is None else k * size // count
            task = environment.task(split, index)
            try:
                lengths.append(len(encode_prompt(tokenizer, task.prompt)))
                if algorithm.offline:
                    texts = chosen_responses(task, algorithm)
                    responses += [len(encode_response(tokenizer, text, task)) for text in texts]
            except RollstockError as error:
                error.add_note(f"in task {task.id!r} of the split {split}")
                raise
            if time.monotonic() > deadline:
                break
    return Lengths(tuple(sorted(lengths)), environment.num_tasks("train"), tuple(sorted(responses)))


def examine_prompts(config: RunConfig, lengths: Lengths, max_positions: int | None) -> Iterator[Finding]:
    """Compare prompt lengths with `sampling.max_prompt_tokens` and with what the model can read."""
    sampling, tokens = config.sampling, lengths.tokens
    if not tokens:
        return
    yield Finding(
        "ok",
        "prompts",
        f"of {len(tokens)} that were looked at the longest has {lengths.longest} tokens, half have at most "
        f"{tokens[len(tokens) // 2]}",
    )
    yield from _responses(lengths.responses, sampling.max_new_tokens)
    limit = sampling.max_prompt_tokens
    if limit is not None and lengths.longest > limit:
        over = sum(length > limit for length in tokens)
        what = {"error": "the run ends at the first", "skip": "they are left out", "truncate_left": "they are cut"}
        yield Finding(
            "error" if sampling.overlong_prompt == "error" else "warning",
            "sampling.max_prompt_tokens",
            f"{over} of {len(tokens)} prompts have more than {limit} tokens (up to {lengths.longest}): "
            f"{what[sampling.overlong_prompt]}",
            f"raise it to {lengths.longest}, or shorten the prompts",
        )
    read = lengths.longest if limit is None else min(lengths.longest, limit)
    if max_positions is not None and read + sampling.max_new_tokens > max_positions:
        yield Finding(
            "error",
            "sampling.max_new_tokens",
            f"a prompt of {read} tokens and {sampling.max_new_tokens} new ones are more than the {max_positions} "
            "positions that the model can read",
            f"at most {max(1, max_positions - read)}",
        )


def _responses(tokens: tuple[int, ...], limit: int) -> Iterator[Finding]:
    """Compare the lengths of the data's own responses, ends included, with `sampling.max_new_tokens`."""
    if not tokens:
        return
    over = sum(length > limit for length in tokens)
    text = f"of {len(tokens)} that were looked at the longest has {tokens[-1]} tokens, its end included"
    if over:
        cut = f"{over} have more than {limit} and are cut, so that their end is not learned"
        yield Finding("warning", "sampling.max_new_tokens", f"responses: {text}; {cut}", f"raise it to {tokens[-1]}")
    else:
        yield Finding("ok", "responses", text)
