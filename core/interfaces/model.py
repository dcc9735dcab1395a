"""The model that a run is about, as backends and rollouts are told of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Where a model comes from. Either `path` or `config` is set, never both.

    path: a directory in Hugging Face format, read as data (safetensors, JSON), never as code.
    config: a Hugging Face config block with its `model_type`; the weights are drawn from `seed`.
    vocab_size: of the tokenizer, filled into a `config` that names none; None leaves the config as it is.
    head: `lm` scores tokens; `value` has one scalar a position.
    """

    path: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    head: Literal["lm", "value"] = "lm"
    seed: int = 0
    vocab_size: int | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
