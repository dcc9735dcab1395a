"""The plugins that a config gets without naming any: the only place in the core where concrete plugins are named, as
data.
"""

from __future__ import annotations

from typing import Any, Final

DEFAULT_PLUGINS: Final[dict[str, Any]] = {
    "backend": "torch",
    "rollout": "native",
    "rewards": ["environment"],
    "device": "cpu",
    "executor": "local",
    "scheduler": "dynamic_batch",
    "compressor": "none",
    "trackers": ["console", "jsonl"],
}
"""By section of the config. A run must name its algorithm and its environment itself."""

EXAMPLE_RUN: Final[dict[str, Any]] = {
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        },
        "tokenizer": {"characters": "0123456789+="},
    },
    "algorithm": {"name": "grpo", "group_size": 4},
    "environment": {"name": "arithmetic", "chat": False, "prompt": "{a}{op}{b}="},
    "backend": {"name": "torch", "learning_rate": 1e-3},
    "sampling": {"max_new_tokens": 3},
    "train": {"steps": 20, "prompts_per_step": 8},
    "evaluation": {"prompts": 16, "samples": 0},
    "trackers": ["jsonl"],
}
"""A run that is over in seconds on a CPU: what generated packages start from, and what tests of plugins run."""

EXAMPLE_EXPERTS: Final[dict[str, Any]] = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
"""The model of the example where its plugin is one for mixtures of experts."""

TRACKER_FOLDERS: Final = ("tensorboard", "wandb")
"""What the trackers that come with rollstock leave in a run's directory; it goes with the run that is overwritten."""
