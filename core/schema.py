"""The core's own part of a config: what every run has, whatever its plugins. Options of plugins are their own.

For whoever reads a run's config; each field's help text is what the reference documentation says of it. Reading files
and checking values against this is left to `rollstock.config`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from rollstock.conversion import to_plain
from rollstock.errors import ConfigError, suggest
from rollstock.options import REQUIRED, option
from rollstock.section import RewardSection, Section, origin_of


@dataclass(kw_only=True)
class ModelSection:
    """The language model to train. Either `path` or `config` must be given."""

    path: str | None = option(None, "directory of a model in Hugging Face format")
    config: dict[str, Any] | None = option(
        None, "Hugging Face config, model_type and all, of a model to make with random weights"
    )
    tokenizer: str | dict[str, Any] | None = option(
        None,
        "directory of a tokenizer, or {characters: '0123456789'} for one of single characters; none: the model's",
    )

    def __post_init__(self) -> None:
        if (self.path is None) == (self.config is None):
            raise ValueError("give either `path`, a directory, or `config`, a model to make with random weights")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("`config` must say its `model_type`, such as llama")


@dataclass(kw_only=True)
class SamplingSection:
    """How responses are sampled. The trainer uses the same temperature."""

    temperature: float = option(
        1.0, "divides the logits; 0 is greedy, and trains at temperature 1", minimum=0, maximum=100
    )
    top_p: float = option(
        1.0, "keep the likeliest tokens that reach this probability together; 1 is off", minimum=0, maximum=1
    )
    top_k: int = option(0, "keep this many of the likeliest tokens; 0 is off", minimum=0, maximum=1_000_000)
    max_new_tokens: int = option(64, "tokens that the policy may choose in an episode", minimum=1, maximum=10_000_000)
    min_new_tokens: int = option(0, "tokens of a response before an end is allowed", minimum=0, maximum=10_000_000)
    max_prompt_tokens: int | None = option(
        None, "longest prompt, in tokens; none: what the model can read", minimum=1, maximum=10_000_000
    )
    stop: list[str] = option([], "texts that end a response, and stay in it")
    stop_token_ids: list[int] = option(
        [], "token ids that end a response, besides the model's own", minimum=0, maximum=1_000_000_000
    )
    overlong_prompt: Literal["error", "skip", "truncate_left"] = option(
        "error", "what to do with a prompt that is too long: refuse the run, leave it out, or cut its beginning"
    )

    def __post_init__(self) -> None:
        if self.top_p == 0:
            raise ValueError("`top_p` 0 would keep no token: it must be above 0, and 1 is off")
        if "" in self.stop:
            raise ValueError("`stop` has an empty text, which would end every response before it begins")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"`min_new_tokens` {self.min_new_tokens} is more than `max_new_tokens` {self.max_new_tokens}"
            )


@dataclass(kw_only=True)
class TrainSection:
    """How long to train, and on how much at a time."""

    steps: int = option(100, "steps of the run; each generates, scores and updates", minimum=1, maximum=1_000_000_000)
    prompts_per_step: int = option(
        8, "distinct tasks in a step; the algorithm says how often each is sampled", minimum=1, maximum=1_000_000
    )
    mini_batches: int = option(1, "optimizer updates that a step's batch is cut into", minimum=1, maximum=1_000_000)
    epochs: int = option(1, "times that a step goes over its batch", minimum=1, maximum=1_000)
    critic_warmup: int = option(
        0, "steps at the start in which only the critic is trained", minimum=0, maximum=1_000_000_000
    )
    seed: int = option(0, "seed of every random number of the run", minimum=0)


@dataclass(kw_only=True)
class PipelineSection:
    """How far generation runs ahead of training. A bare text is short for the mode."""

    mode: Literal["sync", "double_buffer", "async"] = option(
        "sync",
        "generate when a step asks for it; or the next step's batch while one is trained on; or all the time, with "
        "weights that change within a response",
    )
    max_staleness: int = option(
        1,
        "async: updates by which the policy that chose a token may be older than the one that is trained on it",
        minimum=1,
        maximum=1_000,
    )
    partial_tokens: int | None = option(
        None,
        "async: tokens of a response that are asked for at a time, so that new weights come in between; none: all",
        minimum=1,
        maximum=10_000_000,
    )
    old_logprobs: Literal["auto", "sampler", "recompute"] = option(
        "auto",
        "what ratios are taken against: the sampler's log-probs, or the trainer's before its update; auto: the "
        "sampler's, unless the mode is sync or an extension reads old_logprobs",
    )


@dataclass(kw_only=True)
class EvaluationSection:
    """Evaluation on held-out tasks."""

    every: int = option(0, "steps between evaluations; 0: none between start and end", minimum=0, maximum=1_000_000_000)
    at_start: bool = option(True, "evaluate before the first step")
    at_end: bool = option(True, "evaluate after the last step")
    prompts: int = option(
        64, "held-out tasks to evaluate on, or all where there are fewer", minimum=1, maximum=1_000_000_000
    )
    greedy: bool = option(True, "evaluate greedily: the likeliest token each time")
    samples: int = option(1, "samples a task at the run's temperature; 0: none", minimum=0, maximum=100_000)
    solved_at: float = option(1.0, "reward from which a task counts as solved", minimum=-1e9, maximum=1e9)

    def __post_init__(self) -> None:
        if (self.every or self.at_start or self.at_end) and not (self.greedy or self.samples):
            raise ValueError("there is nothing to evaluate: set `greedy: true`, or `samples` above 0")


@dataclass(kw_only=True)
class CheckpointSection:
    """When checkpoints are written, and which are kept."""

    every_steps: int = option(0, "steps between checkpoints; 0: by time alone", minimum=0, maximum=1_000_000_000)
    every_minutes: float = option(5.0, "minutes between checkpoints; 0: by steps alone", minimum=0, maximum=1e6)
    keep: int = option(5, "newest checkpoints that are kept", minimum=1, maximum=1_000_000)
    keep_best: bool = option(True, "also keep the one with the best evaluation")
    compression: Literal["zstd", "none"] = option("zstd", "compression of the tensors on disk")
    background: bool = option(
        False, "write while training goes on, which then waits for a copy of the tensors alone, in memory of its own"
    )


@dataclass(kw_only=True)
class RecoverySection:
    """What happens after a worker was lost, where the executor can start it again."""

    max_retries: int = option(
        3,
        "times that a call to a lost worker without a state (rollout, reward) is made again",
        minimum=0,
        maximum=1_000,
    )
    backoff_s: float = option(
        0.5, "seconds before a call is made again; twice as many each further time", minimum=0, maximum=1e5
    )
    max_backoff_s: float = option(60.0, "longest time before a call is made again", minimum=0, maximum=1e5)
    max_restarts: int = option(
        5,
        "times in a row, without a step finished in between, that lost trainers are started again; 0: the run ends",
        minimum=0,
        maximum=1_000,
    )
    state_gib: float = option(
        1.0,
        "size up to which the controller keeps a copy of the trainers' state after each step, in GiB, so that after a "
        "restart no finished step is played again; above it, and with 0, the newest checkpoint is gone back to",
        minimum=0,
        maximum=1e6,
    )


@dataclass(kw_only=True)
class WeightSyncSection:
    """How weights reach generators in other processes."""

    content: Literal["full", "adapters"] = option(
        "full",
        "what is sent after each update: all weights, adapters merged; or the adapters alone, which generators add to "
        "weights that they keep",
    )
    chunk_mib: int = option(
        16, "size of the chunks that a transport is given, each with a checksum, in MiB", minimum=1, maximum=1_024
    )
    max_resends: int = option(
        3, "times that a chunk is sent again which arrived damaged, before the run fails", minimum=0, maximum=1_000
    )
    timeout_s: float = option(
        120.0, "seconds in which nothing arrives, after which a transport has failed", minimum=0.1, maximum=1e6
    )


@dataclass(kw_only=True)
class RewardLimitsSection:
    """The processes in which rewards run."""

    timeout_s: float = option(
        30.0,
        "seconds that a reward may take for a sample (a batch, where it scores batches) before its process is ended",
        minimum=0.001,
        maximum=1e6,
    )
    workers: int = option(2, "processes that score at the same time", minimum=1, maximum=4_096)


@dataclass(kw_only=True)
class RoleSection:
    """What one role has of its own."""

    count: int = option(1, "workers of this role", minimum=1, maximum=100_000)
    cpus: float = option(
        1.0, "cores for each of its workers, where an executor shares them out", minimum=0, maximum=1e5
    )
    colocate_with: str | None = option(
        None, "a role whose processes its workers share, rank by rank; none: they have their own"
    )
    devices: list[int] = option(
        [], "indices of the devices that its workers use; empty: chosen by the executor", minimum=0, maximum=100_000
    )
    call_timeout_s: float = option(
        0.0,
        "seconds that a call to one of its workers may take before the worker counts as hung, is ended and started "
        "again; 0: no limit",
        minimum=0,
        maximum=1e7,
    )
    backend: dict[str, Any] = option(
        {}, "options of its backend (of the rollout role: its engine) that differ from the run's"
    )


CORE_ROLES = {
    "actor": "the policy that is trained",
    "critic": "the model of returns, for algorithms that need values",
    "reference": "the model that a KL penalty keeps the policy near",
    "reward": "what scores",
    "rollout": "what generates",
}
"""The roles that the core starts where a run needs them, and what each is. Extensions bring others."""


@dataclass(kw_only=True)
class PluginsSection:
    """What may be used as a plugin."""

    block: list[str] = option([], "plugins that must not be used: a name, or kind:name")


@dataclass(kw_only=True)
class RunSection:
    """Where the run is kept, and what it writes besides checkpoints."""

    name: str = option("", "name of the run; default: the name of the config file")
    directory: str = option("", "directory of the run; default: runs/NAME")
    max_rollouts_per_step: int = option(
        0, "trajectories a step that are written to rollouts/; 0: all", minimum=0, maximum=1_000_000_000
    )


@dataclass(kw_only=True)
class RunConfig:
    """A whole config. Sections of plugins are mappings: a name and that plugin's options."""

    model: ModelSection = option(REQUIRED, "the language model to train")
    algorithm: Section = option(REQUIRED, "what turns rewards into a loss")
    environment: Section = option(REQUIRED, "what hands out tasks and scores")
    backend: Section = option(REQUIRED, "what holds a model and trains it")
    rollout: Section = option(REQUIRED, "what generates")
    rewards: list[RewardSection] = option(REQUIRED, "what scores; each may have a weight (1)")
    device: Section = option(REQUIRED, "the chip")
    executor: Section = option(REQUIRED, "what starts workers")
    scheduler: Section = option(REQUIRED, "what cuts batches")
    compressor: Section = option(REQUIRED, "what shrinks what crosses a network")
    trackers: list[Section] = option(REQUIRED, "what records metrics")
    transport: Section | None = option(
        None, "what carries weights to generators in other processes; none: the executor does"
    )
    router: Section | None = option(
        None, "what chooses the experts of a mixture-of-experts model; none: the model's own code, untouched"
    )
    extensions: list[Section] = option([], "what wraps the stages of a step; the first is outermost")
    sampling: SamplingSection = option(SamplingSection(), "how responses are sampled")
    train: TrainSection = option(TrainSection(), "how long to train, and on how much at a time")
    pipeline: PipelineSection = option(PipelineSection(), "how far generation runs ahead of training")
    evaluation: EvaluationSection = option(EvaluationSection(), "evaluation on held-out tasks")
    checkpoint: CheckpointSection = option(CheckpointSection(), "when checkpoints are written, and which are kept")
    recovery: RecoverySection = option(RecoverySection(), "what happens after a worker was lost")
    weight_sync: WeightSyncSection = option(WeightSyncSection(), "how weights reach generators in other processes")
    reward_limits: RewardLimitsSection = option(RewardLimitsSection(), "the processes in which rewards run")
    roles: dict[str, RoleSection] = option(
        {role: RoleSection() for role in CORE_ROLES}, "what each role has of its own, those of extensions included"
    )
    plugins: PluginsSection = option(PluginsSection(), "what may be used as a plugin")
    run: RunSection = option(RunSection(), "where the run is kept")
    origins: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Where each value came from: `demo.yaml:12` or `override` by path; a path that is not in it has its default."""

    def role(self, name: str) -> RoleSection:
        """The settings of one role; the defaults where the config does not speak of it."""
        return self.roles.get(name, RoleSection())

    def engine_of(self, role: str) -> Section:
        """The section of a role's backend (of the rollout role: its engine): the run's, with what the role has of its
        own put over it. An error in it says where in the file it is wrong."""
        shared, own = self.rollout if role == "rollout" else self.backend, self.role(role).backend
        if not own:
            return shared
        place = f"roles.{role}.backend"
        origins = {key: origin for key, origin in shared.origins.items() if key.partition(".")[0] not in own}
        for path, origin in self.origins.items():
            if path.startswith(f"{place}."):
                origins[path.removeprefix(f"{place}.")] = origin
        return Section({**shared, **own}, place=place, origins=origins)

    def check_roles(self, others: Collection[str]) -> None:
        """Raise ConfigError, with its place in the file, for a role in the config that is neither the core's nor one of
        `others`."""
        for role in self.roles:
            if role not in CORE_ROLES and role not in others:
                origin = origin_of(Section({}, origins=self.origins), f"roles.{role}")
                hint = suggest(role, [*CORE_ROLES, *others])
                raise ConfigError(f"{origin + ': ' if origin else ''}roles.{role}: this run has no such role. {hint}")

    def to_dict(self) -> dict[str, Any]:
        """The config as plain data, as `config.yaml` holds it."""
        plain: dict[str, Any] = to_plain(self)
        return plain
