"""What several folders of tests share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile(
    "rollstock", deadline=None
)  # how long an example takes says more of the machine than of the code
settings.load_profile("rollstock")


@pytest.fixture(scope="session")
def cases() -> dict[str, Any]:
    """The known-right numbers of tests/cases, by subject."""
    return json.loads((Path(__file__).parent / "cases" / "numbers.json").read_text())


SMALL_RUN: dict[str, Any] = {
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 32,
        },
        "tokenizer": {"characters": "0123456789+="},
    },
    "algorithm": {"name": "grpo", "group_size": 2},
    "backend": {"name": "torch", "learning_rate": 1e-2},
    "sampling": {"max_new_tokens": 2},
    "train": {"steps": 3, "prompts_per_step": 2},
    "evaluation": {"prompts": 2, "samples": 0},
    "reward_limits": {"workers": 1},
}
"""Sections of a run that takes as little as a run can."""


@pytest.fixture(scope="session")
def small_run() -> Callable[..., Any]:
    """The config of a small run: `small_run(directory, "train.steps=5", extensions=["mine"])`."""
    from rollstock.testing import tiny_config

    def make(directory: Path, *overrides: str, **sections: Any) -> Any:
        return tiny_config(directory, {**SMALL_RUN, **sections}, overrides)

    return make
