"""A run made from its config: plugins chosen, roles started, everything checked that can be before the first step."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstock.answers import sentences, worker_group
from rollstock.checkpoint import CheckpointStore, CheckpointWriter
from rollstock.columns import roles_needed
from rollstock.elastic import examine_scheduler, resizable_roles
from rollstock.episodes import Player
from rollstock.errors import ConfigError, noted
from rollstock.evaluation import Evaluator
from rollstock.interfaces.algorithm import Algorithm
from rollstock.interfaces.backend import Backend
from rollstock.interfaces.device import Device
from rollstock.interfaces.environment import Environment
from rollstock.interfaces.executor import Executor, WorkerGroup, WorkerSpec
from rollstock.interfaces.extension import Extension
from rollstock.interfaces.model import Head, ModelSpec
from rollstock.interfaces.rollout import Sampling
from rollstock.interfaces.router import Router
from rollstock.interfaces.scheduler import Scheduler
from rollstock.interfaces.tracker import Tracker
from rollstock.interrupt import Interrupt
from rollstock.manager import PluginManager, make_manager
from rollstock.offline import chosen_responses, encode_response
from rollstock.pipeline import examine_pipeline, make_pipeline
from rollstock.placement import brought_roles, misplaced, placed, start_order
from rollstock.recovery import Recovery
from rollstock.restart import TRAINED_ROLES
from rollstock.roles.model import ModelWorker
from rollstock.roles.reward import RewardWorker
from rollstock.roles.rollout import RolloutWorker
from rollstock.run import Run
from rollstock.seeding import derive_seed
from rollstock.stages import CoreStages
from rollstock.tasks import TaskSource
from rollstock.tokens import encode_prompt, end_ids, load_tokenizer
from rollstock.tracking import Trackers

if TYPE_CHECKING:
    from rollstock.schema import RunConfig


logger = logging.getLogger(__name__)

MODEL_ROLES = (*TRAINED_ROLES, "reference")
"""The roles that hold a model through a backend."""


@dataclasses.dataclass(kw_only=True)
class Parts:
    """The light half of a run: plugins of the controller, without any model. Enough to check a config."""

    manager: PluginManager
    algorithm: Algorithm[Any]
    environment: Environment[Any]
    extensions: list[Extension[Any]]
    trackers: list[Tracker[Any]]
    tokenizer: Any
    provided: Set[str]
    roles: list[str]
    brought: dict[str, WorkerSpec]


def choose(config: RunConfig) -> Parts:
    """Make the controller's plugins and refuse what cannot work. Raises UserError; starts nothing."""
    manager = make_manager(config.plugins.block)
    manager.register("core:stages", CoreStages())
    algorithm = manager.create_as(Algorithm, config.algorithm)
    extensions = manager.create_all(Extension, config.extensions)
    provided = frozenset(column for extension in extensions for column in extension.provides)
    head = algorithm.actor_head()
    asked = set(roles_needed(algorithm.plugin_name, algorithm.needed_columns(), provided, head=head))
    for extension in extensions:
        columns = extension.needed_columns()
        asked |= set(roles_needed(extension.plugin_name, columns, provided, head=head, kind="extension"))
    refuse_silent_failures(config, algorithm, extensions, examine_scheduler(config, manager))
    brought = brought_roles(config, extensions)
    roles = ["actor", *(() if algorithm.offline else ("rollout", "reward")), *sorted(asked)]
    refuse_backends(config, roles, manager)
    if config.router and algorithm.offline and manager.load_as(Router, config.router).captures:
        raise ConfigError(
            f"router: {config.router.name!r} takes the experts that generation chose, and nothing is generated for "
            f"{algorithm.plugin_name!r}, so it would change nothing: choose another router, or none"
        )
    environment = manager.create_as(Environment, config.environment)
    with noted(f"environment {environment.plugin_name!r} raised this in setup"):
        environment.setup(derive_seed(config.train.seed, "environment"))
    evaluates = config.evaluation.at_start or config.evaluation.at_end or config.evaluation.every > 0
    TaskSource(environment, config.train.seed).check(heldout=evaluates)
    return Parts(
        manager=manager,
        algorithm=algorithm,
        environment=environment,
        extensions=extensions,
        trackers=manager.create_all(Tracker, config.trackers),
        tokenizer=load_tokenizer(config.model),
        provided=provided,
        roles=start_order(config, roles, brought),
        brought=brought,
    )


def check_first_prompt(config: RunConfig, parts: Parts) -> None:
    """Encode the first prompt now, before anything is written: a tokenizer that does not fit the tasks fails there.

    Raises UserError for a prompt with a character that the tokenizer lacks, for messages without a chat template, and,
    where the algorithm is offline, for a task without responses.
    """
    task = TaskSource(parts.environment, config.train.seed).train(0)
    with noted(f"in the prompt of task {task.id!r}"):
        encode_prompt(parts.tokenizer, task.prompt)
    if parts.algorithm.offline:
        for response in chosen_responses(task, parts.algorithm):
            encode_response(parts.tokenizer, response, task)


def refuse_silent_failures(
    config: RunConfig, algorithm: Algorithm[Any], extensions: Sequence[Extension[Any]], problems: Iterable[str] = ()
) -> None:
    """Raise ConfigError for settings that would run and do nothing, and for the `problems` that were found before."""
    problems = [*problems, *sentences("algorithm", algorithm, algorithm.validate(config))]
    for extension in extensions:
        found = sentences("extension", extension, extension.validate(config, algorithm))
        problems += [f"extension {extension.plugin_name!r}: {problem}" for problem in found]
    train = config.train
    if train.mini_batches > train.prompts_per_step:
        problems.append(
            f"train.mini_batches: {train.mini_batches} is more than the {train.prompts_per_step} groups of a step "
            "(train.prompts_per_step); groups are not cut"
        )
    problems += misplaced(config)
    problems += examine_pipeline(config, algorithm)
    if train.critic_warmup and algorithm.actor_head() == "lm+value":
        problems.append(
            f"train.critic_warmup: {train.critic_warmup} is for a critic of its own. Here the policy's model has the "
            "value head, and steps for the values alone would move the policy as well: set it to 0"
        )
    if config.transport and algorithm.offline:
        problems.append(
            f"transport: {config.transport.name!r} would carry nothing, since nobody generates for "
            f"{algorithm.plugin_name!r}; leave it out"
        )
    if algorithm.offline:
        pass  # nobody is asked for a score
    elif not config.rewards:
        problems.append("rewards: nobody scores; name at least one, such as `rewards: [environment]`")
    elif not any(reward.weight for reward in config.rewards):
        problems.append("rewards: every weight is 0, so every reward would be 0; give one of them a weight")
    if problems:
        raise ConfigError("\n".join(problems))


def refuse_backends(config: RunConfig, roles: Sequence[str], manager: PluginManager) -> None:
    """Raise ConfigError for what the backends of a run's models cannot do."""
    problems: list[str] = []
    for role in MODEL_ROLES:
        if role not in roles:
            continue
        backend = manager.create_as(Backend, config.engine_of(role))
        problems += sentences("backend", backend, backend.validate(config, role))
        if role == "actor" and config.weight_sync.content == "adapters" and _lacks_adapters(type(backend)):
            problems.append(
                f"weight_sync.content: the backend {backend.plugin_name!r} has no adapters to send; set it to full"
            )
        count, host = config.role(role).count, config.role(role).colocate_with
        if count > 1 and not backend.trains_together and role in TRAINED_ROLES:
            problems.append(
                f"roles.{role}.count: {count} workers would each train a model of their own, since the backend "
                f"{backend.plugin_name!r} does not add up their gradients; set it to 1"
            )
        if backend.trains_together and host is not None and config.role(host).count != count:
            problems.append(
                f"roles.{role}.count: {count} workers that work together in processes of {host!r} must be as many as "
                f"those, of which there are {config.role(host).count}"
            )
    if problems:
        raise ConfigError("\n".join(problems))


def _lacks_adapters(backend: type[Backend[Any]]) -> bool:
    """Whether a backend leaves that method as it is in the interface."""
    return backend.adapters is Backend.adapters


def worker_problems(
    config: RunConfig, parts: Parts, executor: Executor[Any], specs: Sequence[WorkerSpec]
) -> Iterator[str]:
    """What the workers of a run cannot have of its executor, one sentence each."""
    yield from sentences("executor", executor, executor.validate(specs))
    scheduler = parts.manager.create_as(Scheduler, config.scheduler)
    yield from sentences("scheduler", scheduler, scheduler.validate(config, resizable_roles(executor, specs)))
    if config.transport and executor.shares_memory:
        yield (
            f"transport: {config.transport.name!r} would carry nothing, since the executor {executor.plugin_name!r} "
            "keeps everything in one process: choose one that starts some, or leave it out"
        )
    for spec in specs:
        if spec.role not in MODEL_ROLES or spec.count == 1 or not executor.shares_memory:
            continue
        if parts.manager.load_as(Backend, config.engine_of(spec.role)).trains_together:
            yield (
                f"roles.{spec.role}.count: {spec.count} workers that train together need processes of their own, and "
                f"the executor {executor.plugin_name!r} keeps all in one: choose one that starts some, or set it to 1"
            )


def model_spec(config: RunConfig, tokenizer: Any) -> ModelSpec:
    """The policy's model as backends and rollouts are told of it."""
    return ModelSpec(
        path=config.model.path,
        config=dict(config.model.config or {}),
        seed=derive_seed(config.train.seed, "model"),
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=end_ids(tokenizer),
    )


def sampling_of(config: RunConfig, tokenizer: Any) -> Sampling:
    """How the run samples; the tokenizer's end ids always stop."""
    chosen = config.sampling
    return Sampling(
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
        max_new_tokens=chosen.max_new_tokens,
        min_new_tokens=chosen.min_new_tokens,
        stop=tuple(chosen.stop),
        stop_token_ids=tuple(dict.fromkeys([*end_ids(tokenizer), *chosen.stop_token_ids])),
    )


def build(
    config: RunConfig, directory: Path, parts: Parts, interrupt: Interrupt, *, only_generate: bool = False
) -> Run:
    """Start the roles and put the run together. Raises UserError for what only a started worker can find out.

    only_generate: for evaluation, without critic and reference, unless the loss itself is to be evaluated.
    """
    spared = ("critic", "reference") if only_generate and not parts.algorithm.offline else ()
    executor = parts.manager.create_as(Executor, config.executor)
    roles: dict[str, WorkerGroup] = {}
    try:
        specs = role_specs(config, parts, spared)
        if problems := list(worker_problems(config, parts, executor, specs)):
            raise ConfigError("\n".join(problems))
        executor.prepare(specs)
        for spec in specs:
            roles[spec.role] = worker_group(executor, spec)
        return _assemble(config, directory, parts, interrupt, executor, roles)
    except BaseException:
        with interrupt.deferred():
            _end(executor, roles)
        raise


def role_specs(config: RunConfig, parts: Parts, spared: Sequence[str] = ()) -> list[WorkerSpec]:
    """The workers of every role but those that are spared, in the order in which they are started."""
    variable = parts.manager.create_as(Device, config.device).visibility_variable
    head = parts.algorithm.actor_head()
    found: list[WorkerSpec] = []
    for role in parts.roles:
        if role in spared:
            continue
        spec = parts.brought.get(role) or worker_spec(
            config, role, parts.tokenizer, head=head, visibility_variable=variable
        )
        spec = placed(config, spec)
        if spec.colocate_with in spared:  # then its processes are its own
            spec = dataclasses.replace(spec, colocate_with=None)
        found.append(spec)
    return found


def _end(executor: Executor[Any], roles: Mapping[str, WorkerGroup]) -> None:
    """End what was started before another start failed; that one's error is what the user shall see."""
    ends: list[Callable[[], Any]] = [functools.partial(group.call, "close") for group in roles.values()]
    for end in [*ends, executor.shutdown]:
        try:
            end()
        except Exception as error:  # whatever a plugin raises
            logger.warning("after a failed start: %s", error, exc_info=error)


def _assemble(
    config: RunConfig,
    directory: Path,
    parts: Parts,
    interrupt: Interrupt,
    executor: Executor[Any],
    roles: dict[str, WorkerGroup],
) -> Run:
    sampling = sampling_of(config, parts.tokenizer)
    player = Player(
        lambda requests, how: roles["rollout"].call("generate", requests, how),
        parts.environment,
        parts.tokenizer,
        max_prompt_tokens=config.sampling.max_prompt_tokens,
        overlong=config.sampling.overlong_prompt,
        context_length=roles["rollout"].call("context_length") if config.pipeline.partial_tokens else None,
    )
    store = CheckpointStore(
        directory / "checkpoints",
        keep=config.checkpoint.keep,
        keep_best=config.checkpoint.keep_best,
        compression=config.checkpoint.compression,
    )
    return Run(
        config=config,
        directory=directory,
        manager=parts.manager,
        algorithm=parts.algorithm,
        executor=executor,
        scheduler=parts.manager.create_as(Scheduler, config.scheduler),
        extensions=parts.extensions,
        roles=roles,
        player=player,
        pipeline=make_pipeline(config, player, parts.tokenizer, roles, interrupt),
        tasks=TaskSource(parts.environment, config.train.seed),
        trackers=Trackers(parts.trackers),
        evaluator=Evaluator(config.evaluation),
        store=store,
        writer=CheckpointWriter(store, background=config.checkpoint.background),
        recovery=Recovery(config.recovery),
        interrupt=interrupt,
        sampling=sampling,
        tokenizer=parts.tokenizer,
        provided=parts.provided,
    )


def worker_spec(
    config: RunConfig, role: str, tokenizer: Any, *, head: Head = "lm", visibility_variable: str | None = None
) -> WorkerSpec:
    """What the executor needs to build the workers of one of the core's roles; `head`: of the actor's model,
    visibility_variable: of the device."""
    make = functools.partial(WorkerSpec, role=role, visibility_variable=visibility_variable)
    if role == "reward":
        if not config.role(role).devices:  # most rewards need no accelerator, and none shall be kept for them
            make = functools.partial(WorkerSpec, role=role)
        kwargs: dict[str, Any] = {
            "environment": config.environment,
            "rewards": config.rewards,
            "blocked": config.plugins.block,
            "seed": derive_seed(config.train.seed, "environment"),
            "timeout_s": config.reward_limits.timeout_s,
            "num_processes": config.reward_limits.workers,
            "device": config.device,
        }
        return make(factory=RewardWorker, kwargs=kwargs, stateless=True)
    model = model_spec(config, tokenizer)
    if role == "rollout":
        return make(factory=RolloutWorker, kwargs={"config": config, "model": model}, stateless=True)
    if role == "actor":
        model = dataclasses.replace(model, head=head)
    if role == "critic":
        model = dataclasses.replace(model, head="value", seed=derive_seed(config.train.seed, "critic"))
    total = config.train.steps * config.train.epochs * config.train.mini_batches
    kwargs = {"config": config, "role": role, "model": model, "total_updates": total}
    return make(factory=ModelWorker, kwargs=kwargs, stateless=role not in TRAINED_ROLES, together=True)
