"""The model that a run is about, as backends and rollouts are told of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Head: TypeAlias = Literal["lm", "value", "lm+value", "score"]
"""What is on top of a transformer.

`lm` scores tokens. `value` is one scalar of the state before each token, as a critic says it; `lm+value` has both of
them on one transformer. `score` is one scalar of what was read up to and including each token, as a reward model says
it; it has no bias, so that it is the head of transformers' sequence classification with one label.
"""

HEAD_OUTPUTS: Mapping[Head, frozenset[str]] = {
    "lm": frozenset({"logprobs", "entropy"}),
    "value": frozenset({"values"}),
    "lm+value": frozenset({"logprobs", "entropy", "values"}),
    "score": frozenset({"token_scores"}),
}
"""What a model with each head says of a response token."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Where a model comes from. Either `path` or `config` is set, never both.

    path: a directory in Hugging Face format, read as data (safetensors, JSON), never as code.
    config: a Hugging Face config block with its `model_type`; the weights are drawn from `seed`.
    vocab_size: of the tokenizer, filled into a `config` that names none; None leaves the config as it is.
    head: what the model says; a generator is always told `lm`.
    """

    path: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    head: Head = "lm"
    seed: int = 0
    vocab_size: int | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
