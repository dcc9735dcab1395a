"""The `native` rollout: batched generation inside the process, with any causal language model of transformers.

For runs on one machine, and for tests, where a sampler that repeats itself to the bit matters more than a server. It
plans batches, runs them and keeps the weights; how a model is run is `decoder`'s, how tokens are chosen `sampler`'s.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from rollstock import (
    Completion,
    Device,
    GenerationRequest,
    GenerationResult,
    Memory,
    Metric,
    Metrics,
    ModelSpec,
    Rollout,
    Router,
    RunError,
    Sampling,
    Scheduler,
    UserError,
    derive_seed,
    option,
)
from rollstock.backends.models import build_model
from rollstock.backends.moe import RoutedModel
from rollstock.backends.native.batch import Finished, run_batch
from rollstock.backends.native.decoder import Decoder
from rollstock.backends.native.planning import Footprint, Group, group_requests, next_batch, rows_that_fit
from rollstock.backends.native.prefixes import PrefixCache
from rollstock.backends.native.routed import RoutedDecoder
from rollstock.backends.native.stopping import StopRules
from rollstock.backends.native.trial import choose_decoder
from rollstock.backends.native.weights import EngineWeights

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


@dataclass(kw_only=True)
class NativeConfig:
    """Options of the native rollout."""

    max_batch: int = option(256, "most responses generated at once", minimum=1, maximum=1_000_000)
    min_batch: int = option(
        16,
        "fewest responses generated at once, as long as they fit into all of the free memory",
        minimum=1,
        maximum=1_000_000,
    )
    memory_fraction: float = option(
        0.8, "share of the free device memory that a batch may plan with", minimum=0.01, maximum=1.0
    )
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", "what the weights are held and run in")
    decoder: Literal["auto", "lean", "shared", "plain"] = option(
        "auto",
        "shared computes each prompt once for all its samples; lean does so too, and takes its steps without the "
        "model's modules; plain runs the model as it is; auto takes the fastest whose numbers are the model's own",
    )
    prefix_cache: bool = option(
        False,
        "keep the keys and values of what was generated until new weights arrive, for later turns, responses that are "
        "continued, and prompts that begin alike",
    )
    prefix_cache_states: int = option(
        1000, "the most recent sequences that the prefix cache keeps", minimum=1, maximum=10_000_000
    )
    prefix_cache_mib: int = option(1024, "memory that they may take", minimum=1, maximum=100_000_000)


class Native(Rollout[NativeConfig]):
    """Generates with a copy of the model, or with the trainer's very tensors where they may be aliased.

    A response depends on the weights, its prompt, the sampling and its seed. Rows of one batch share matrix products,
    whose rounding may depend on the number of rows: log-probs repeat to rounding, tokens unless a draw falls within
    rounding of an edge.
    """

    _router: Router[Any] | None = None
    _scheduler: Scheduler[Any] | None = None

    def use_router(self, router: Router[Any]) -> None:
        """See `Rollout.use_router`."""
        self._router = router

    def use_scheduler(self, scheduler: Scheduler[Any]) -> None:
        """See `Rollout.use_scheduler`."""
        self._scheduler = scheduler

    def setup(self, model: ModelSpec, device: Device[Any], tokenizer: Any) -> None:
        """See `Rollout.setup`."""
        if self.config.min_batch > self.config.max_batch:
            raise UserError(
                f"rollout: min_batch {self.config.min_batch} is more than max_batch {self.config.max_batch}"
            )
        self._device = device
        self._tokenizer = tokenizer
        built: Any = build_model(model)  # the type of its `to` is that of a decorator
        # Looked into before it is rounded: the rule by which a router weighs shows best in float32.
        routed = (
            None if self._router is None else RoutedModel(built, self._router, seed=derive_seed(model.seed, "router"))
        )
        built = built.to(device.torch_device(), getattr(torch, self.config.dtype))
        self._model: PreTrainedModel = built.eval().requires_grad_(False)
        self._weights = EngineWeights(self._model)
        self._version = 0
        self._vocabulary = int(self._model.get_output_embeddings().weight.shape[0])
        self._context = int(getattr(self._model.config.get_text_config(), "max_position_embeddings", 0) or 0)
        self._ends = _end_ids(self._model, model, self._vocabulary)
        self._rules: dict[tuple[tuple[str, ...], tuple[int, ...]], StopRules] = {}
        self._largest = self.config.max_batch  # halved by every allocation that fails
        with torch.inference_mode():
            self._decoder, cached = choose_decoder(self._model, self.config.decoder)
        self._prefixes = self._make_prefix_cache()
        self._routed = None if routed is None else RoutedDecoder(self._decoder, routed)
        self._decoder = self._routed or self._decoder
        self._footprint = Footprint(cached, self._vocabulary, self._decoder.shares_prompts)

    def _make_prefix_cache(self) -> PrefixCache | None:
        """Raises UserError where nothing could be kept, or would not be enough."""
        if not self.config.prefix_cache:
            return None
        if self._router is not None:
            raise UserError(
                "rollout.prefix_cache: a router is told of every token, so none may be left out: turn it off"
            )
        if not self._decoder.shares_prompts:
            raise UserError(
                "rollout.prefix_cache: this model is run with its own cache, whose states cannot be kept: turn it off"
            )
        self._decoder.prefixes = PrefixCache(self.config.prefix_cache_states, self.config.prefix_cache_mib << 20)
        return self._decoder.prefixes

    @property
    def decoder(self) -> Decoder:
        """How the model is run."""
        return self._decoder

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> GenerationResult:
        """See `Rollout.generate`. A response ends with reason `length` where the model's context does.

        `Completion.metadata["stop"]` is the stop id or string that ended a response. Raises RunError if not even one
        response at a time fits into memory.
        """
        limits = [self._limit(request, sampling) for request in requests]
        if self._routed is not None:
            self._routed.version, self._routed.exploring = self._version, sampling.exploring
        rules = self._stop_rules(sampling)
        completions: list[Completion | None] = [None] * len(requests)
        for index, limit in enumerate(limits):
            if limit == 0:
                completions[index] = self._completion(Finished([], [], None, self._unread(requests[index])))
        started = time.perf_counter()
        capped = sum(_wanted(request, sampling) > limit for request, limit in zip(requests, limits, strict=True))
        metrics = _Counts(capped=capped)
        groups = group_requests(requests, [index for index, limit in enumerate(limits) if limit > 0])
        try:
            while groups:
                batch, rest = self._next(groups, limits)
                finished = None
                try:
                    finished = self._run(batch, requests, limits, sampling, rules, metrics)
                except Exception as error:
                    self._shrink(batch, error, metrics)
                if finished is None:  # only here is the error gone, and with it the memory that its traceback held
                    self._device.release_memory()
                    continue
                for index, done in finished:
                    completions[index] = self._completion(done)
                groups = rest
        finally:
            self._decoder.release()
        return GenerationResult(
            completions=[completion for completion in completions if completion is not None],
            metrics=metrics.metrics(time.perf_counter() - started) | self._prefix_metrics(metrics),
        )

    def _prefix_metrics(self, counts: _Counts) -> Metrics:
        if self._prefixes is None:
            return {}
        asked = counts.prefilled + counts.reused
        return {
            "rollout/prefix_hit_rate": Metric(counts.reused / max(1, asked), asked, "mean"),
            "rollout/reused_tokens": Metric(counts.reused, 1.0, "sum"),
            "rollout/prefix_states": Metric(len(self._prefixes), 1.0, "max"),
            "rollout/prefix_cache_mib": Metric(self._prefixes.num_bytes / 2**20, 1.0, "max"),
        }

    def _limit(self, request: GenerationRequest, sampling: Sampling) -> int:
        """How many tokens a request may get. Raises UserError for a prompt that cannot be continued."""
        length = len(request.prompt)
        if length == 0:
            raise UserError("a prompt is empty; the model needs a token to continue (a begin-of-sequence id will do)")
        extremes = (min(request.prompt), max(request.prompt))  # of the ids, without a loop over each
        wrong = next((token for token in extremes if not 0 <= token < self._vocabulary), None)
        if wrong is not None:
            raise UserError(f"a prompt has token id {wrong}, but the model's vocabulary has {self._vocabulary} tokens")
        wanted = _wanted(request, sampling)
        if not self._context:
            return wanted
        if length >= self._context:
            raise UserError(
                f"a prompt of {length} tokens leaves no room for a response: the model reads at most {self._context}; "
                f"shorten the prompts, or choose a model with a longer context"
            )
        return min(wanted, self._context - length)

    def _stop_rules(self, sampling: Sampling) -> StopRules:
        ids = tuple(sorted({*self._ends, *sampling.stop_token_ids}))
        key = (tuple(sampling.stop), ids)
        if key not in self._rules:
            self._rules[key] = StopRules(
                vocab_size=self._vocabulary,
                stop_token_ids=ids,
                stop=sampling.stop,
                tokenizer=self._tokenizer,
                device=self._model.device,
            )
        return self._rules[key]

    def _next(self, groups: list[Group], limits: Sequence[int]) -> tuple[list[Group], list[Group]]:
        """The next batch, as large as memory, scheduler, options and earlier failures allow, and the groups behind
        it."""
        memory = self._device.memory()
        free = memory.free
        longest = max(limits[index] for group in groups for index in group.members)
        most = min(self._largest, self._scheduled(groups, longest, memory) or self._largest)
        rows = rows_that_fit(int(free * self.config.memory_fraction), self._footprint, groups, longest, most)
        if rows < self.config.min_batch:
            least = min(self.config.min_batch, most)
            rows = max(rows, rows_that_fit(free, self._footprint, groups, longest, least))
        return next_batch(groups, rows, mixes_lengths=self._decoder.mixes_lengths)

    def _scheduled(self, groups: Sequence[Group], longest: int, memory: Memory) -> int | None:
        """How many rows the scheduler wants; a prompt whose memory its rows share is told as the first one's."""
        if self._scheduler is None:
            return None
        prompts = [
            0 if place and self._footprint.shared else len(group.prompt)
            for group in groups
            for place in range(len(group.members))
        ]
        return self._scheduler.generation_batch_size(
            prompts, longest, bytes_per_token=self._footprint.cached_token, memory=memory
        )

    def _run(
        self,
        batch: Sequence[Group],
        requests: Sequence[GenerationRequest],
        limits: Sequence[int],
        sampling: Sampling,
        rules: StopRules,
        metrics: _Counts,
    ) -> list[tuple[int, Finished]]:
        """Generate one batch to its end; returns each request's place and what became of it."""
        members = [index for group in batch for index in group.members]
        try:
            with torch.inference_mode():
                finished = run_batch(
                    self._decoder,
                    batch,
                    seeds=[requests[index].seed for index in members],
                    limits=[limits[index] for index in members],
                    sampling=sampling,
                    rules=rules,
                )
        finally:
            self._decoder.stop()
        metrics.batches += 1
        metrics.rows += len(members)
        metrics.reused += self._decoder.reused
        metrics.merged += self._decoder.merged
        metrics.prefilled += sum(len(group.prompt) for group in batch) - self._decoder.reused
        metrics.prompt_tokens += sum(len(group.prompt) * len(group.members) for group in batch)
        metrics.generated += sum(len(done.tokens) for done in finished)
        return list(zip(members, finished, strict=True))

    def _shrink(self, batch: Sequence[Group], error: Exception, metrics: _Counts) -> None:
        """Halve the batch after a failed allocation; raises any other `error`, and RunError if one row is too many."""
        if not self._device.is_out_of_memory(error):
            raise error
        rows = sum(len(group.members) for group in batch)
        if rows == 1:
            raise RunError(
                f"the native rollout lacks memory for one response to a prompt of {len(batch[0].prompt)} ids: {error}"
            ) from error
        if self._prefixes is not None:
            self._prefixes.clear()
        self._largest = rows // 2
        metrics.halved += 1

    def _unread(self, request: GenerationRequest) -> Tensor | None:
        """The captured experts of a prompt that nothing is sampled for: all missing."""
        if self._routed is None or not self._routed.captures:
            return None
        return self._routed.missing(len(request.prompt))

    def _completion(self, done: Finished) -> Completion:
        return Completion(
            tokens=done.tokens,
            logprobs=done.logprobs,
            finish_reason="length" if done.stop is None else "stop",
            versions=[self._version] * len(done.tokens),
            metadata={} if done.stop is None else {"stop": done.stop},
            routed_experts=done.routed_experts,
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, *, alias: bool = False) -> None:
        """See `Rollout.load_weights`. Weights of another type or device than the engine's are copied in any case."""
        self._weights.load(weights, alias=alias)
        self._version = version
        if self._prefixes is not None:  # its states are those of the weights before
            self._prefixes.clear()
        self._decoder.stop()
        self._decoder.release()

    @property
    def context_length(self) -> int | None:
        """See `Rollout.context_length`."""
        return self._context or None

    def fingerprint(self) -> str:
        """See `Rollout.fingerprint`. Where `dtype` rounds the weights, this is the fingerprint of what arrived."""
        return self._weights.fingerprint()

    def close(self) -> None:
        """See `Rollout.close`."""
        self._decoder.stop()
        self._rules.clear()
        self._prefixes = None
        del self._model, self._decoder, self._weights
        self._device.release_memory()


@dataclass
class _Counts:
    """What one call of `generate` counts."""

    batches: int = 0
    rows: int = 0
    prefilled: int = 0
    reused: int = 0  # tokens of prompts that the prefix cache had
    merged: int = 0  # tokens that were computed for another sequence with the same past
    prompt_tokens: int = 0
    generated: int = 0
    halved: int = 0
    capped: int = 0  # responses that the model's context allows fewer tokens than were asked for

    def metrics(self, seconds: float) -> Metrics:
        """The counts under the names that a run records."""
        return {
            "rollout/batches": Metric(self.batches, 1.0, "sum"),
            "rollout/batch_size": Metric(self.rows / max(1, self.batches), self.batches, "mean"),
            "rollout/prefill_tokens": Metric(self.prefilled, 1.0, "sum"),
            "rollout/shared_prompt_tokens": Metric(self.prompt_tokens - self.prefilled - self.reused, 1.0, "sum"),
            "rollout/merged_tokens": Metric(self.merged, 1.0, "sum"),
            "rollout/generated_tokens": Metric(self.generated, 1.0, "sum"),
            "rollout/halved_batches": Metric(self.halved, 1.0, "sum"),
            "perf/num_allocation_failures": Metric(self.halved, 1.0, "sum"),
            "rollout/context_limited": Metric(self.capped, 1.0, "sum"),
            "rollout/tokens_per_second": Metric(self.generated / max(seconds, 1e-9), seconds, "mean"),
        }


def _wanted(request: GenerationRequest, sampling: Sampling) -> int:
    """How many tokens a request asks for at most."""
    wanted = sampling.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
    return max(0, min(wanted, sampling.max_new_tokens))


def _end_ids(model: PreTrainedModel, spec: ModelSpec, vocabulary: int) -> tuple[int, ...]:
    """The ids that end a sequence, by the run's tokenizer and by the model's files or config block together.

    What a config class has by default (id 2 for a Llama) says nothing about the tokenizer of a model made from a block.
    """
    found = set(spec.eos_token_ids)
    if spec.path is None:
        said = [spec.config.get("eos_token_id")]
    else:
        configs = (model.config, getattr(model, "generation_config", None))
        said = [getattr(config, "eos_token_id", None) for config in configs]
    for ids in said:
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return tuple(sorted(token for token in found if 0 <= token < vocabulary))
