"""The cases that are compared with TRL: its trainers' losses and advantages that both sides have."""

from __future__ import annotations

from cases import CLIP, Case

EPSILON = {"epsilon": 0.2, "epsilon_high": 0.28}
FULL = ("plain", "turns")  # TRL counts responses without tokens too: see the page on what differs
EQUAL = ("plain", "special")  # its groups are of one size, and in order

LOSSES = [
    Case("grpo", "loss", "grpo", "grpo", {**EPSILON, "loss_type": "grpo"},
         {**CLIP, "aggregation": "seq_mean_token_mean"}, FULL),
    Case("bnpo", "loss", "grpo", "grpo", {**EPSILON, "loss_type": "bnpo"}, CLIP),
    Case("dr_grpo", "loss", "grpo", "dr_grpo", {**EPSILON, "loss_type": "dr_grpo"}, CLIP, FULL),
    Case("dapo", "loss", "grpo", "dapo", {**EPSILON, "loss_type": "dapo"}, CLIP),
    Case("dapo with kl", "loss", "grpo", "dapo",
         {**EPSILON, "loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False},
         {**CLIP, "kl_coef": 0.1, "kl_kind": "k3"}, FULL),
    Case("grpo, importance_sampling_level sequence", "loss", "grpo", "gspo",
         {**EPSILON, "loss_type": "grpo", "importance_sampling_level": "sequence"}, CLIP, FULL),
    Case("cispo", "loss", "grpo", "cispo", {"loss_type": "cispo", "epsilon_high": 1.28},
         {"clip": 1.0, "clip_high": 0.28}),
    Case("sapo", "loss", "grpo", "sapo",
         {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
         {"tau_pos": 1.0, "tau_neg": 1.05, "aggregation": "seq_mean_token_mean"}, FULL),
    Case("gmpo", "loss", "gmpo", "gmpo", EPSILON, CLIP, FULL),
    Case("rloo, first update", "loss", "rloo", "rloo", {**EPSILON, "on_policy": True}, {**CLIP, "on_policy": True},
         FULL, ("gradient",)),
]  # fmt: skip

ADVANTAGES = [
    Case("grpo advantages, not scaled", "advantages", "grpo", "dr_grpo", {"scale_rewards": "none"}, {}, EQUAL),
    Case("rloo advantages", "advantages", "rloo", "rloo", {"beta": 0.0}, {}, EQUAL),
]  # fmt: skip

SAMPLER_WEIGHTS = [
    Case(f"vllm_importance_sampling_mode, {mode}", "sampler_weights", "grpo", "rollout_correction",
         {"vllm_importance_sampling_mode": mode, **bounds}, ours, ("plain",))
    for mode, bounds, ours in (
        ("token_truncate", {"vllm_importance_sampling_clip_max": 1.2}, {"level": "token", "cap": 1.2}),
        ("sequence_truncate", {"vllm_importance_sampling_clip_max": 1.2}, {"level": "sequence", "cap": 1.2}),
        ("token_mask", {"vllm_importance_sampling_clip_max": 1.2, "vllm_importance_sampling_clip_min": 0.8},
         {"level": "token", "outside": "mask", "cap": 1.2, "floor": 0.8}),
        ("sequence_mask", {"vllm_importance_sampling_clip_max": 1.2}, {"level": "sequence", "outside": "mask",
                                                                      "cap": 1.2}),
    )
]  # fmt: skip

THROUGH_A_MODEL = [
    Case("grpo, through a model", "through_model", "grpo", "grpo", {**EPSILON, "loss_type": "dapo", "temperature": 0.7},
         {**CLIP, "temperature": 0.7}, FULL, tolerance=1e-5),
    Case("dpo, through a model", "through_model", "dpo", "dpo", {"beta": 0.1}, {"beta": 0.1}, FULL, tolerance=1e-5),
    Case("sft, through a model", "through_model", "sft", "sft", {}, {}, FULL, tolerance=1e-5),
]  # fmt: skip

PREFERENCES = [
    Case("dpo sigmoid", "dpo", "sigmoid", "dpo", {"beta": 0.1, "loss_type": ["sigmoid"]}, {"beta": 0.1}, FULL),
    Case("dpo ipo", "dpo", "ipo", "dpo", {"beta": 0.1, "loss_type": ["ipo"]},
         {"beta": 0.1, "kind": "ipo", "average_logprobs": True}, FULL),
    Case("dpo hinge", "dpo", "hinge", "dpo", {"beta": 0.1, "loss_type": ["hinge"]}, {"beta": 0.1, "kind": "hinge"},
         FULL),
    Case("dpo robust", "dpo", "robust", "dpo", {"beta": 0.1, "loss_type": ["robust"], "label_smoothing": 0.1},
         {"beta": 0.1, "kind": "robust", "label_smoothing": 0.1}, FULL),
    Case("dpo sigmoid_norm", "dpo", "sigmoid_norm", "dpo", {"beta": 2.0, "loss_type": ["sigmoid_norm"]},
         {"beta": 2.0, "average_logprobs": True}, FULL),
    Case("dpo sigmoid, a tenth of pairs swapped", "dpo", "sigmoid", "dpo",
         {"beta": 0.1, "loss_type": ["sigmoid"], "mix": (0.9, 0.1)}, {"beta": 0.1, "label_smoothing": 0.1}, FULL),
    Case("reward model", "reward_model", "reward", "reward_model", {}, {}, FULL),
    Case("reward model, margin", "reward_model", "reward", "reward_model", {"margin": 0.3}, {"margin": 0.3}, FULL),
    Case("reward model, centred", "reward_model", "reward", "reward_model", {"center_rewards_coefficient": 0.01},
         {"centre_coef": 0.01}, FULL),
    Case("reward model, a tenth of pairs swapped", "reward_model", "reward", "reward_model", {"mix": (0.9, 0.1)},
         {"label_smoothing": 0.1}, FULL),
    Case("sft", "sft", "sft", "sft"),
]  # fmt: skip

CASES = [*LOSSES, *ADVANTAGES, *SAMPLER_WEIGHTS, *PREFERENCES, *THROUGH_A_MODEL]

DIFFERENT = [
    Case("grpo advantages", "advantages", "grpo", "grpo", {"scale_rewards": "group"}, {}, ("plain", "special"),
         why="TRL adds 1e-4 to the standard deviation; here it is 1e-6"),
    Case("grpo, with an empty response", "loss", "grpo", "grpo", {**EPSILON, "loss_type": "grpo"},
         {**CLIP, "aggregation": "seq_mean_token_mean"}, ("special",),
         why="TRL divides by all responses; here by those with tokens"),
    Case("dapo with kl, TRL's default", "loss", "grpo", "dapo", {**EPSILON, "loss_type": "dapo", "beta": 0.1},
         {**CLIP, "kl_coef": 0.1, "kl_kind": "k3"}, FULL,
         why="TRL multiplies the estimate by the ratio (`use_bias_correction_kl`); here `kl_kind` sets it"),
    Case("rloo, a later update of the step", "loss", "rloo", "rloo", EPSILON, CLIP, FULL,
         why="TRL clips the ratio of the whole response; here each token's"),
    Case("dpo ipo, sums of log-probs", "dpo", "ipo", "dpo", {"beta": 0.1, "loss_type": ["ipo"]},
         {"beta": 0.1, "kind": "ipo"}, FULL,
         why="TRL compares means over tokens; here `average_logprobs` does, and the default is the paper's equation"),
    Case("dpo, with an empty response", "dpo", "sigmoid", "dpo", {"beta": 0.1, "loss_type": ["sigmoid"]}, {"beta": 0.1},
         ("special",), why="TRL compares with a response without tokens; here such a pair has no loss"),
    Case("dpo with sft", "dpo", "sft", "dpo",
         {"beta": 0.1, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}, {"beta": 0.1, "sft_coef": 0.5},
         FULL, why="TRL averages over all chosen tokens; here each response first, so that pairs count alike"),
]  # fmt: skip
