"""The rollout kind: what generates with the current weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollstock.errors import UserError
from rollstock.plugin import C, Plugin

if TYPE_CHECKING:
    from torch import Tensor

    from rollstock.interfaces.device import Device
    from rollstock.interfaces.model import ModelSpec
    from rollstock.interfaces.router import Router
    from rollstock.interfaces.scheduler import Scheduler
    from rollstock.metrics import Metrics


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. temperature 0 is greedy; top_p 1 and top_k 0 are off.

    stop: strings that end a response when they appear in its decoded text (they stay in it); stop_token_ids: ids that
    do, the model's end-of-sequence ids always among them. min_new_tokens: until a response has so many, no stop id is
    chosen and no stop string ends it; its log-probs are those of the distribution before that cut. exploring: the
    responses are to train on, so that a router may add noise; False in evaluation.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 64
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    exploring: bool = True


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One response to sample. `seed` alone decides its random numbers; requests with equal prompts share their prefill.

    max_new_tokens: less than the sampling's where an episode has fewer tokens left; None leaves the sampling's.
    """

    prompt: tuple[int, ...]
    seed: int
    max_new_tokens: int | None = None


@dataclass(kw_only=True)
class Completion:
    """What was sampled for one request: T token ids as sampled, and their log-probs.

    logprobs: nats, at the sampling temperature, of the whole distribution (before top-k and top-p cut it), so that the
    trainer recomputes the same number; greedy decoding reports them at temperature 1. finish_reason: `stop` (a stop id
    or string, which is the last of the tokens) or `length`. versions: the policy version of each token. routed_experts
    [P + T - 1, layers, k], in the type of `rollstock.routing.captured_dtype`: the experts that each token but the last
    was given, prompt included, where the router asks for them.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: list[int]
    metadata: dict[str, Any] = field(default_factory=dict)
    routed_experts: Tensor | None = None


@dataclass
class GenerationResult:
    """One completion for each request, in their order, and what the engine measured."""

    completions: list[Completion]
    metrics: Metrics = field(default_factory=dict)


class Rollout(Plugin[C]):
    """An engine that generates. A response depends on the weights, its prompt, the sampling and its own seed alone."""

    @abstractmethod
    def setup(self, model: ModelSpec, device: Device[Any], tokenizer: Any) -> None:
        """Build the engine; called once, before everything else. `tokenizer` is a Hugging Face one, or None."""

    def use_router(self, router: Router[Any]) -> None:
        """Let a router choose the experts; called once, before `setup`, in runs whose config names one.

        The engine tells it of its layers in `setup`, with the seed `derive_seed(model.seed, "router")`. Raises
        UserError for an engine that cannot replace the choice of a model, as all are taken to be.
        """
        raise UserError(
            f"rollout {self.plugin_name!r} cannot replace the choice of experts; leave `router` out of the config"
        )

    def use_scheduler(self, scheduler: Scheduler[Any]) -> None:
        """Let a scheduler decide how many sequences are generated at once (`Scheduler.generation_batch_size`); called
        once, before `setup`. An engine that plans its batches itself need not ask."""
        return

    @abstractmethod
    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> GenerationResult:
        """Sample every request to its end. Raises UserError for a prompt that is empty or longer than the model can
        read."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, *, alias: bool = False) -> None:
        """Take the trainer's weights; caches made with older ones are gone afterwards.

        alias: the engine may use the very tensors (same process, same device, no update while generating) in place of a
        copy. Raises RunError if a weight is missing, unknown or of another shape.
        """

    @property
    def context_length(self) -> int | None:
        """How many tokens the engine can read, prompt and response together; None if it sets no such limit."""
        return None

    @abstractmethod
    def fingerprint(self) -> str:
        """`rollstock.weights.fingerprint` of the weights that the engine generates with."""

    def close(self) -> None:
        """Let go of the device; called once, at the end."""
