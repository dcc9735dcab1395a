"""Which pipeline a config asks for, what it refuses, and whose log-probs are the old ones in it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rollstock.interfaces.algorithm import Algorithm
from rollstock.interfaces.extension import Extension
from rollstock.pipeline.ahead import Ahead
from rollstock.pipeline.synchronous import Pipeline
from rollstock.pipeline.turns import SharedGroup

if TYPE_CHECKING:
    from rollstock.episodes import Player
    from rollstock.interfaces.executor import WorkerGroup
    from rollstock.interrupt import Interrupt
    from rollstock.schema import RunConfig


def make_pipeline(
    config: RunConfig, player: Player, tokenizer: Any, roles: dict[str, WorkerGroup], interrupt: Interrupt
) -> Pipeline:
    """The pipeline of a config. One that generates ahead shares the generators and the rewards between two threads, so
    their groups in `roles` are replaced."""
    if config.pipeline.mode == "sync":
        return Pipeline()
    rollout = roles["rollout"] = SharedGroup(roles["rollout"])
    reward = roles["reward"] = SharedGroup(roles["reward"])
    own = player.for_thread(copy.deepcopy(tokenizer))
    made = Ahead(config.pipeline, own, rollout=rollout, reward=reward, interrupt=interrupt)
    if config.pipeline.mode == "double_buffer":
        player.before_request = made.wait_until_generated  # so that requests always come in the same order
    return made


def examine_pipeline(config: RunConfig, algorithm: Algorithm[Any]) -> Iterator[str]:
    """What the section `pipeline` says and nobody could do, one sentence each."""
    chosen = config.pipeline
    if chosen.mode != "sync" and algorithm.offline:
        yield (
            f"pipeline.mode: {chosen.mode} generates ahead, and {algorithm.plugin_name!r} trains on the responses of "
            "the data, for which nothing is generated: set it to sync"
        )
    if chosen.mode != "async":
        if chosen.partial_tokens is not None:
            yield (
                f"pipeline.partial_tokens: {chosen.partial_tokens} would change nothing, since weights change within a "
                f"response only in the mode async, and pipeline.mode is {chosen.mode}: leave it out"
            )
        if chosen.max_staleness != 1:
            yield (
                f"pipeline.max_staleness: {chosen.max_staleness} would change nothing, since it is "
                f"{'0' if chosen.mode == 'sync' else '1'} in the mode {chosen.mode}: leave it out, or set "
                "pipeline.mode: async"
            )
    if chosen.old_logprobs != "auto" and "old_logprobs" not in algorithm.needed_columns():
        yield (
            f"pipeline.old_logprobs: {chosen.old_logprobs} would change nothing, since {algorithm.plugin_name!r} reads "
            "no old log-probs: leave it out"
        )
    elif chosen.mode == "sync" and chosen.old_logprobs == "recompute":
        yield "pipeline.old_logprobs: recompute would change nothing, since the mode sync does so: leave it out"


def sampler_is_old(config: RunConfig, algorithm: Algorithm[Any], extensions: Sequence[Extension[Any]]) -> bool:
    """Whether the column `old_logprobs` is what the sampler said, and not what the trainer says before its update.

    The policy that sampled is the old one, so that ratios and clips are against it. An extension that reads
    `old_logprobs` compares the two, and gets the trainer's. In the mode sync both policies are one, to rounding, and
    theirs are the trainer's unless the config says otherwise.
    """
    chosen = config.pipeline
    if "old_logprobs" not in algorithm.needed_columns():
        return False
    if chosen.old_logprobs != "auto":
        return chosen.old_logprobs == "sampler"
    return chosen.mode != "sync" and not any("old_logprobs" in extension.needed_columns() for extension in extensions)
