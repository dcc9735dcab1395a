"""Memory that a config needs, part by part, against the memory that is there.

An upper estimate, for responses of full length, to tell "fits" from "does not", from the sizes of the model and of the
batches. Options of plugins are known by the names that the field uses (`compute_dtype`, `activation_checkpointing`,
`lora.rank`, `share_prompts`, `tokens_per_micro_batch`, `logits_memory_mib`, `max_batch`, `dtype`); a plugin without
such an option is taken to do nothing special.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollstock.doctor.finding import Finding
from rollstock.doctor.model import ModelFacts
from rollstock.units import format_bytes, format_count

FLOAT = 4
PROGRAM = 512 << 20
"""Python, torch and its libraries, or the context of a chip."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}
# Activations that a layer keeps for the backward pass, per token: inputs of the norms, of query, key and value, of the
# output product, of the feed-forward net and of its gate, and the residual sums: about 12 vectors of the hidden size
# and 4 of the intermediate size. Attention itself keeps no square of the length with fused kernels.
_HIDDEN_VECTORS, _INTERMEDIATE_VECTORS = 12, 4


@dataclass(frozen=True)
class Load:
    """What the estimate depends on beside the model; tokens and sequences are those of one process."""

    roles: tuple[str, ...]
    backend: Mapping[str, Any]
    rollout: Mapping[str, Any]
    scheduler: Mapping[str, Any]
    num_sequences: int
    prompt_tokens: int
    new_tokens: int
    samples_per_prompt: int = 1
    copies_weights: bool = False
    """Whether the generator may not use the trainer's own tensors, since it works while they change."""
    reward_bytes: int = 0
    """Of the models that score, which live on the same device."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """By role, what one process keeps of its weights, gradients and optimizer, as its backend says; all if not there.
    """

    def share(self, role: str) -> float:
        """What one process keeps of a role's model."""
        return self.shares.get(role, 1.0)

    @property
    def micro_batch_sequences(self) -> int:
        """Sequences of the largest micro-batch: as many as the scheduler's budget takes, or the whole batch."""
        budget = self.scheduler.get("tokens_per_micro_batch")
        fitting = budget // (self.prompt_tokens + self.new_tokens) if isinstance(budget, int) else self.num_sequences
        return max(1, min(self.num_sequences, fitting))

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens that go through the model for the largest micro-batch; a backend may compute a shared prompt once."""
        sequences = self.micro_batch_sequences
        shared = self.samples_per_prompt if self.backend.get("share_prompts") else 1
        return math.ceil(sequences / shared) * self.prompt_tokens + sequences * self.new_tokens


def estimate(model: ModelFacts, load: Load) -> dict[str, int]:
    """Bytes by part, for one process that holds every role."""
    lora = load.backend.get("lora")
    rank = int(lora.get("rank", 0)) if isinstance(lora, Mapping) else 0
    size = model.num_parameters
    trained = model.adapter_parameters(rank, list(lora.get("targets", []))) if rank and lora else size
    kept = load.share("actor")
    parts = {
        "weights (float32)": math.ceil(kept * FLOAT * (size + (trained if rank else 0))),
        "gradients": math.ceil(kept * FLOAT * trained),
        "optimizer": math.ceil(kept * 2 * FLOAT * trained),
        "activations": _activations(model, load),
        "logits": _logits(model, load),
        **(
            _generation(model, load, shares_weights=not (rank or load.copies_weights or kept < 1))
            if "rollout" in load.roles
            else {}
        ),
        "program": PROGRAM,
    }
    if "reference" in load.roles:
        parts["reference model"] = math.ceil(load.share("reference") * FLOAT * size)
    if "reward" in load.roles:
        parts["reward models"] = load.reward_bytes
    if "critic" in load.roles:
        parts["critic with optimizer"] = math.ceil(load.share("critic") * FLOAT * (size + 3 * trained))
    return {name: value for name, value in parts.items() if value}


def _activations(model: ModelFacts, load: Load) -> int:
    width = BYTES.get(str(load.backend.get("compute_dtype", "float32")), FLOAT)
    layer = (_HIDDEN_VECTORS * model.hidden_size + _INTERMEDIATE_VECTORS * model.intermediate_size) * width
    if load.backend.get("activation_checkpointing"):
        kept = model.num_layers * model.hidden_size * FLOAT + layer
    else:
        kept = model.num_layers * layer
    return load.micro_batch_tokens * kept


def _logits(model: ModelFacts, load: Load) -> int:
    """Logits of the response tokens, their gradient and one copy; where the backend cuts them, of one part."""
    whole = load.micro_batch_sequences * load.new_tokens * model.vocab_size * FLOAT
    limit = load.backend.get("logits_memory_mib")
    return 3 * (min(whole, limit << 20) if isinstance(limit, int) else whole)


def _generation(model: ModelFacts, load: Load, *, shares_weights: bool) -> dict[str, int]:
    width = BYTES.get(str(load.rollout.get("dtype", "float32")), FLOAT)
    limit = load.rollout.get("max_batch")
    batch = min(load.num_sequences, limit) if isinstance(limit, int) else load.num_sequences
    cache = batch * (load.prompt_tokens + load.new_tokens) * model.num_layers * model.cache_width * width
    return {
        "key-value cache": cache,
        "logits of sampling": 3 * batch * model.vocab_size * FLOAT,
        "weights of the generator": 0 if shares_weights and width == FLOAT else width * model.num_parameters,
    }


def examine_memory(model: ModelFacts, load: Load, *, device: str, total: int, free: int) -> Iterator[Finding]:
    """Compare the estimate with a device's memory."""
    parts = estimate(model, load)
    needed = sum(parts.values())
    largest = sorted(parts.items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {format_bytes(value)}" for name, value in largest if value > 0.02 * needed)
    size = format_count(model.num_parameters)
    divided = ", ".join(f"{share:.0%} of the {role}'s" for role, share in load.shares.items() if share < 1)
    if divided:
        divided = f"each process keeps {divided} weights, gradients and optimizer; "
    text = (
        f"a model of {size} parameters needs up to about {format_bytes(needed)} ({listed}); "
        f"{divided}{device} has {format_bytes(total)}, {format_bytes(free)} free"
    )
    if needed > total:
        yield Finding("error", "memory of the run", text, _advice(largest[0][0], load))
    elif needed > 0.9 * free:
        yield Finding("warning", "memory of the run", text, _advice(largest[0][0], load))
    else:
        yield Finding("ok", "memory of the run", text)


def _advice(largest: str, load: Load) -> str:
    ways = {
        "activations": ["lower scheduler.tokens_per_micro_batch", "set backend.activation_checkpointing: true"],
        "logits": ["lower scheduler.tokens_per_micro_batch", "lower sampling.max_new_tokens"],
        "key-value cache": ["lower rollout.max_batch", "lower sampling.max_new_tokens"],
        "logits of sampling": ["lower rollout.max_batch"],
        "reward models": ["score with a smaller model, or in bfloat16"],
        "reference model": ["do without a KL penalty, so that no reference is needed"],
    }.get(largest, ["train adapters (backend.lora.rank: 16)", "take a smaller model"])
    sections = {"backend": load.backend, "rollout": load.rollout, "scheduler": load.scheduler}
    options = [f"{section}.{name}" for section, values in sections.items() for name in values]
    known = [way for way in ways if not re.search(r"(backend|rollout|scheduler)\.", way) or _names(way, options)]
    return "; or ".join(known or ["take a smaller model"])


def _names(way: str, options: Iterable[str]) -> bool:
    """Whether a piece of advice is about an option that the config's plugins have."""
    return any(option in way for option in options)
