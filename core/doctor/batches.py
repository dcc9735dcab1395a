"""Counts in a config that do nothing, do not divide, or cannot be reached. Nothing here needs a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rollstock.doctor.finding import Finding

if TYPE_CHECKING:
    from rollstock.build import Parts
    from rollstock.schema import RunConfig


def examine_batches(config: RunConfig, parts: Parts) -> Iterator[Finding]:
    """Look at batch sizes, sampling, evaluation and checkpoints."""
    yield from _batches(config, parts)
    yield from _sampling(config, parts)
    yield from _schedule(config, parts)
    yield from _tasks(config, parts)


def _batches(config: RunConfig, parts: Parts) -> Iterator[Finding]:
    train, samples = config.train, parts.algorithm.samples_per_prompt
    sequences = train.prompts_per_step * samples
    updates = train.epochs * train.mini_batches
    each = f"with {samples} of their own responses each" if parts.algorithm.offline else f"x {samples} samples"
    yield Finding(
        "ok",
        "batch",
        f"{train.prompts_per_step} prompts {each} = {sequences} trajectories a step, "
        f"{updates} update{'s' if updates > 1 else ''} a step, {train.steps} steps",
    )
    if train.prompts_per_step % train.mini_batches:
        yield Finding(
            "warning",
            "train.mini_batches",
            f"{train.prompts_per_step} prompts do not divide into {train.mini_batches} mini-batches evenly",
            f"set train.prompts_per_step to a multiple of {train.mini_batches}",
        )
    for name in ("actor", "critic", "reference", "reward", "rollout"):
        count = config.role(name).count
        if count > sequences:
            yield Finding(
                "error",
                f"roles.{name}.count",
                f"{count} workers for {sequences} trajectories: some have nothing to do",
                f"at most {sequences}",
            )
        elif sequences % count:
            yield Finding(
                "warning",
                f"roles.{name}.count",
                f"{sequences} trajectories do not divide among {count} workers: some wait for the others",
                f"make train.prompts_per_step times samples a multiple of {count}",
            )
    if train.critic_warmup and "critic" not in parts.roles:
        yield Finding(
            "warning",
            "train.critic_warmup",
            f"algorithm {config.algorithm.name} has no critic, and the actor does not train in those steps",
            "set it to 0",
        )
    if train.critic_warmup >= train.steps:
        yield Finding("error", "train.critic_warmup", "the actor is never trained: it lasts for all steps", "lower it")


def _sampling(config: RunConfig, parts: Parts) -> Iterator[Finding]:
    sampling = config.sampling
    if parts.algorithm.offline:
        return  # nobody samples
    if parts.algorithm.samples_per_prompt > 1 and 0 < sampling.temperature < 0.3:
        yield Finding(
            "warning",
            "sampling.temperature",
            f"{sampling.temperature:g} makes the samples of a prompt nearly the same, so that they teach little",
            "0.7 to 1.0 is usual",
        )
    if sampling.top_p < 1 or sampling.top_k:
        yield Finding(
            "warning",
            "sampling.top_p" if sampling.top_p < 1 else "sampling.top_k",
            "samples come from a distribution with its tail cut off, but are trained on as if from the whole one",
            "leave top_p at 1 and top_k at 0 in training",
        )
    if parts.tokenizer.eos_token_id is None and not sampling.stop and not sampling.stop_token_ids:
        yield Finding(
            "warning",
            "sampling.stop",
            "the tokenizer has no end-of-sequence token and nothing else stops a response: each runs to max_new_tokens",
            "give sampling.stop or sampling.stop_token_ids",
        )


def _schedule(config: RunConfig, parts: Parts) -> Iterator[Finding]:
    evaluation, checkpoint, train = config.evaluation, config.checkpoint, config.train
    if not (evaluation.every or evaluation.at_start or evaluation.at_end):
        yield Finding("info", "evaluation", "the run is never evaluated on held-out tasks", "set evaluation.every")
    elif evaluation.every > train.steps:
        yield Finding(
            "warning", "evaluation.every", f"{evaluation.every} is more than the {train.steps} steps of the run", ""
        )
    if checkpoint.keep_best and not evaluation.every:
        yield Finding(
            "info",
            "checkpoint.keep_best",
            "nothing is evaluated between start and end, so the best checkpoint is the last",
            "set evaluation.every",
        )
    if not (checkpoint.every_steps or checkpoint.every_minutes):
        yield Finding(
            "warning",
            "checkpoint",
            "a checkpoint is written at the end only: a run that is killed begins anew",
            "set checkpoint.every_minutes",
        )
    warmup = config.backend.get("warmup_updates")
    updates = train.steps * train.epochs * train.mini_batches
    if isinstance(warmup, int) and warmup >= updates:
        yield Finding(
            "warning",
            "backend.warmup_updates",
            f"the learning rate rises over {warmup} updates, but the run makes only {updates}",
            "lower it",
        )


def _tasks(config: RunConfig, parts: Parts) -> Iterator[Finding]:
    train, size = config.train, parts.environment.num_tasks("train")
    heldout = parts.environment.num_tasks("heldout")
    if size is not None:
        passes = train.steps * train.prompts_per_step / max(size, 1)
        if train.prompts_per_step > size > 0:
            yield Finding(
                "warning",
                "train.prompts_per_step",
                f"{train.prompts_per_step} prompts a step, but only {size} tasks: a step has some of them twice",
                f"at most {size}",
            )
        yield Finding("ok", "tasks", f"{size} training tasks, gone over {passes:.3g} times")
    else:
        yield Finding("ok", "tasks", "training tasks without end")
    evaluated = config.evaluation.every or config.evaluation.at_start or config.evaluation.at_end
    if evaluated and heldout == 0:
        yield Finding("error", "evaluation", "the environment has no held-out tasks", "give it some, or switch it off")
    elif evaluated and heldout is not None and heldout < min(30, config.evaluation.prompts):
        yield Finding(
            "info",
            "evaluation.prompts",
            f"only {heldout} held-out tasks: a result moves by {100 / heldout:.2g}% with each",
        )
