"""A config: its plugins, made as a run would make them, then all that can be told before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rollstock.answers import share_kept
from rollstock.build import MODEL_ROLES, Parts, choose, role_specs, worker_problems
from rollstock.config import complete_config
from rollstock.doctor.batches import examine_batches
from rollstock.doctor.finding import Finding
from rollstock.doctor.memory import Load, examine_memory
from rollstock.doctor.model import ModelFacts, model_facts
from rollstock.doctor.pipeline import examine_ahead
from rollstock.doctor.prompts import Lengths, examine_prompts, measure_prompts
from rollstock.doctor.rewards import examine_rewards, model_bytes
from rollstock.doctor.training import examine_directory, examine_disk, examine_learning_rate
from rollstock.errors import RollstockError
from rollstock.interfaces.backend import Backend
from rollstock.interfaces.compressor import Compressor
from rollstock.interfaces.device import Device
from rollstock.interfaces.executor import Executor
from rollstock.kinds import KINDS
from rollstock.manager import PluginManager, make_manager
from rollstock.restart import TRAINED_ROLES

if TYPE_CHECKING:
    from rollstock.schema import RunConfig


def examine_config(config: RunConfig) -> list[Finding]:
    """Look at a config as far as it can be followed: past the first thing that is wrong, where that is possible."""
    findings: list[Finding] = list(examine_directory(config))
    try:
        manager = make_manager(config.plugins.block)
        broken = list(_sections(config, manager))
        findings += broken
        if broken:
            return findings
        config = complete_config(config, manager)
        parts = choose(config)
    except RollstockError as error:
        return [*findings, *(Finding("error", "config", line) for line in _lines(error))]
    findings += examine_batches(config, parts)
    findings += examine_ahead(config, parts)
    findings += _workers(config, parts)
    findings += _compressor(config, parts)
    findings += examine_rewards(config.rewards if "reward" in parts.roles else [])
    lengths = _measured(parts, findings)
    try:
        model = model_facts(config.model, len(parts.tokenizer))
    except RollstockError as error:
        return [*findings, Finding("error", "model", str(error))]
    findings += examine_prompts(config, lengths, model.max_positions)
    findings += examine_learning_rate(config, model)
    findings += examine_disk(config, model, has_critic="critic" in parts.roles)
    findings += _device_and_memory(config, parts, model, lengths)
    return findings


def _sections(config: RunConfig, manager: PluginManager) -> Iterator[Finding]:
    """What is wrong with each plugin that the config names; a run would stop at the first."""
    for kind in KINDS.values():
        found: Any = getattr(config, kind.section) if kind.section else None
        sections = found if kind.many else [found] if found else []
        for index, section in enumerate(sections):
            try:
                manager.complete(kind.name, section)
            except RollstockError as error:
                place = f"{kind.section}.{index}" if kind.many else kind.section
                for line in _lines(error):
                    yield Finding("error", place, line)


def _lines(error: RollstockError) -> list[str]:
    return [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]


def _measured(parts: Parts, findings: list[Finding]) -> Lengths:
    try:
        return measure_prompts(parts.environment, parts.tokenizer, parts.algorithm)
    except RollstockError as error:
        notes = "; ".join(getattr(error, "__notes__", []))
        findings.append(Finding("error", "prompts", f"{error}" + (f" ({notes})" if notes else "")))
        return Lengths((), None)


def _workers(config: RunConfig, parts: Parts) -> Iterator[Finding]:
    try:
        executor = parts.manager.create_as(Executor, config.executor)
        for problem in worker_problems(config, parts, executor, role_specs(config, parts)):
            place, _, message = problem.partition(": ")
            yield Finding("error", place if message else "executor", message or problem)
    except RollstockError as error:
        yield Finding("error", "executor", str(error))


def _compressor(config: RunConfig, parts: Parts) -> Iterator[Finding]:
    counts = [config.role(role).count for role in TRAINED_ROLES if role in parts.roles]
    if max(counts) == 1 and not parts.manager.load_as(Compressor, config.compressor).is_identity:
        yield Finding(
            "warning",
            "compressor",
            f"{config.compressor['name']} changes nothing: a model that one process trains sends no gradients",
            "leave it out, or give roles.actor a count above 1 and a backend whose workers train together",
        )


def _device_and_memory(config: RunConfig, parts: Parts, model: ModelFacts, lengths: Lengths) -> Iterator[Finding]:
    device: Device[Any] = parts.manager.create_as(Device, config.device)
    reason = device.unavailable()
    if reason is not None:
        yield Finding("error", "device", reason)
        return
    memory = device.memory()
    limit = config.sampling.max_prompt_tokens
    load = Load(
        roles=tuple(parts.roles),
        backend=config.engine_of("actor"),
        rollout=config.engine_of("rollout"),
        scheduler=config.scheduler,
        copies_weights=config.pipeline.mode != "sync",
        num_sequences=config.train.prompts_per_step * parts.algorithm.samples_per_prompt,
        prompt_tokens=min(lengths.longest, limit) if limit is not None else lengths.longest,
        new_tokens=config.sampling.max_new_tokens,
        samples_per_prompt=parts.algorithm.samples_per_prompt,
        reward_bytes=model_bytes(config.rewards),
        shares={role: _share(config, parts, role) for role in MODEL_ROLES if role in parts.roles},
    )
    yield from examine_memory(model, load, device=str(config.device.name), total=memory.total, free=memory.free)


def _share(config: RunConfig, parts: Parts, role: str) -> float:
    """What each process of a role keeps of its model, as its backend says."""
    return share_kept(parts.manager.create_as(Backend, config.engine_of(role)), config.role(role).count)
