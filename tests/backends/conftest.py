"""Tiny mixture-of-experts models of several architectures, for tests of routers in backends and engines."""

from collections.abc import Callable
from typing import Any

import pytest

from rollstock import ModelSpec

VOCABULARY = 31

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8,
                  "norm_topk_prob": True},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                  "shared_expert_intermediate_size": 16},
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "group_limited_greedy"},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},
    "phimoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "llama4_text": {"num_local_experts": 4, "head_dim": 8},
    "llama": {},
}  # fmt: skip


@pytest.fixture
def moe_spec() -> Callable[..., ModelSpec]:
    """A tiny random model of that type, with weights large enough that its choices differ."""

    def make(name: str = "qwen3_moe", **others: Any) -> ModelSpec:
        return ModelSpec(config={"model_type": name, **_SIZES, **MODELS[name], **others}, seed=5)

    return make
