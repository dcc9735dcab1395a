"""The cases that are compared with verl: every estimator and loss that both sides have."""

from __future__ import annotations

from math import exp

from cases import CLIP, EVERY, GAMMA, LAM, Case

MODES = ("token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm")
WITH_LONE = (*EVERY, "lone")

ESTIMATORS = [
    Case(
        "gae", "advantages", "gae", "ppo",
        {"gamma": GAMMA, "lam": LAM}, {"gamma": GAMMA, "lam": LAM},
    ),
    Case(
        "gae, rewards of steps", "advantages", "gae", "ppo",
        {"gamma": GAMMA, "lam": LAM, "step_rewards": True}, {"gamma": GAMMA, "lam": LAM, "step_rewards": True},
    ),
    Case(
        "gae, kl in the reward", "advantages", "gae", "ppo",
        {"gamma": GAMMA, "lam": LAM, "kl_coef": 0.05, "kl_penalty": "k1"},
        {"gamma": GAMMA, "lam": LAM, "kl_reward_coef": 0.05, "kl_reward_kind": "k1"},
    ),
    Case("grpo", "advantages", "grpo", "grpo", {}, {"lone": "raw"}, WITH_LONE),
    Case("grpo_vectorized", "advantages", "grpo_vectorized", "grpo", {}, {"lone": "raw"}, WITH_LONE),
    Case(
        "grpo, not scaled", "advantages", "grpo", "dr_grpo", {"norm_adv_by_std_in_grpo": False}, {"lone": "raw"},
        WITH_LONE,
    ),
    Case("grpo_passk", "advantages", "grpo_passk", "pass_at_k", {"norm_adv_by_std_in_grpo": False},
         {"estimator": "leave_one_out", "k": 8, "scale": "none"}),
    Case("grpo_passk, scaled", "advantages", "grpo_passk", "pass_at_k", {"norm_adv_by_std_in_grpo": True},
         {"estimator": "leave_one_out", "k": 8, "scale": "unbiased"}),
    Case("rloo", "advantages", "rloo", "rloo", {}, {"lone": "raw"}, WITH_LONE),
    Case("rloo_vectorized", "advantages", "rloo_vectorized", "rloo", {}, {}, WITH_LONE),
    Case(
        "reinforce_plus_plus", "advantages", "reinforce_plus_plus", "reinforce_pp", {"gamma": GAMMA}, {"gamma": GAMMA},
    ),
    Case(
        "reinforce_plus_plus, rewards of steps", "advantages", "reinforce_plus_plus", "reinforce_pp",
        {"gamma": GAMMA, "step_rewards": True}, {"gamma": GAMMA, "step_rewards": True},
    ),
    Case(
        "reinforce_plus_plus_baseline", "advantages", "reinforce_plus_plus_baseline", "reinforce_pp_baseline", {},
        {"lone": "raw"}, WITH_LONE,
    ),
    Case("remax", "advantages", "remax", "remax"),
    Case("opo", "advantages", "opo", "opo", {}, {"lone": "raw"}, WITH_LONE),
    Case("gpg", "advantages", "gpg", "gpg", {}, {"lone": "raw", "correction": "zero_scores"}, WITH_LONE),
]  # fmt: skip

LOSSES = [
    *(
        Case(
            f"vanilla, {mode}", "loss", "vanilla", "grpo",
            {"loss_agg_mode": mode.replace("_", "-"), "token_advantages": True},
            {**CLIP, "dual_clip": 3.0, "aggregation": mode, "token_advantages": True},
        )
        for mode in MODES
    ),
    *(
        Case(
            f"vanilla with kl loss, {kind}", "loss", "vanilla", "grpo", {"kl_coef": 0.1, "kl_penalty": kind},
            {**CLIP, "dual_clip": 3.0, "kl_coef": 0.1, "kl_kind": kind}, ("plain", "turns"),
        )
        for kind in ("k1", "k2", "k3", "abs", "k1+", "k3+")
    ),
    Case("vanilla with rollout_is_weights", "loss", "vanilla", "grpo", {"weights": True},
         {**CLIP, "dual_clip": 3.0, "weights": True}),
    Case("gspo", "loss", "gspo", "gspo", {"loss_agg_mode": "seq-mean-token-mean"}, CLIP),
    Case("gspo, token_mean", "loss", "gspo", "gspo", {"token_advantages": True},
         {**CLIP, "aggregation": "token_mean", "level": "token", "token_advantages": True}),
    Case("cispo", "loss", "cispo", "cispo", {}, CLIP),
    Case("geo_mean", "loss", "geo_mean", "gmpo", {}, CLIP, ("plain", "turns")),
    Case(
        "sapo", "loss", "sapo", "sapo", {"tau_pos": 1.0, "tau_neg": 1.05},
        {"tau_pos": 1.0, "tau_neg": 1.05, "aggregation": "seq_mean_token_mean"},
    ),
    Case(
        "clip_cov", "held_back_loss", "clip_cov", "clip_cov",
        {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.3, "clip_cov_ub": 2.0, "clip_ratio_low": 0.99, "clip_ratio_high": 9.0},
        {"clip": 0.99, "clip_high": 9.0, "fraction": 1.0, "cov_low": 0.3, "cov_high": 2.0}, ("plain", "turns"),
    ),
    Case(
        "clip_cov, first update", "held_back_loss", "clip_cov", "clip_cov",
        {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.3, "clip_cov_ub": 2.0, "on_policy": True},
        {**CLIP, "fraction": 1.0, "cov_low": 0.3, "cov_high": 2.0, "on_policy": True},
    ),
    Case(
        "clip_cov, some clipped", "held_back_loss", "clip_cov", "clip_cov",
        {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.3, "clip_cov_ub": 2.0},
        {**CLIP, "fraction": 1.0, "cov_low": 0.3, "cov_high": 2.0}, outputs=("gradient",),
    ),
    Case(
        "kl_cov", "held_back_loss", "kl_cov", "kl_cov", {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.7},
        {"fraction": 0.1, "cov_coef": 0.7}, ("plain", "turns"),
    ),
    Case("gpg loss", "loss", "gpg", "gpg"),
    Case("value loss", "critic_loss", "compute_value_loss", "ppo",
         {"cliprange_value": 0.5, "loss_agg_mode": "token-mean"}, {"value_clip": 0.5}),
]  # fmt: skip

FUNCTIONS = [
    *(Case(f"kl_penalty, {kind}", "kl", kind, kind) for kind in ("k1", "k2", "abs", "k1+")),
    *(Case(f"kl_penalty, {kind}", "kl", kind, kind, sorts=("plain", "turns")) for kind in ("k3", "k3+")),
    Case("masked_whiten", "whiten", "masked_whiten", "masked_whiten", {"shift_mean": True}, {"shift_mean": True}),
    Case("masked_whiten, mean kept", "whiten", "masked_whiten", "masked_whiten", {"shift_mean": False},
         {"shift_mean": False}),
    Case("logprobs and entropy_from_logits", "logits", "logprobs_from_logits_v2", "logprobs_and_entropy",
         {"temperature": 0.7}, {"temperature": 0.7}),
    Case("AdaptiveKLController", "controller", "AdaptiveKLController", "horizon",
         {"init_kl_coef": 0.2, "target_kl": 6.0, "horizon": 1000, "n_steps": 64},
         {"kl_reward_coef": 0.2, "kl_target": 6.0, "kl_horizon": 1000.0, "num_samples": 64}),
]  # fmt: skip

ROLLOUT_CORRECTION = [
    Case(f"rollout correction, {name}", "rollout_correction", "rollout_is", "rollout_correction", options, ours,
         ("plain", "turns"))
    for name, options, ours in (
        ("token, truncated", {"rollout_is": "token", "rollout_is_threshold": 1.3}, {"level": "token", "cap": 1.3}),
        ("sequence, truncated", {"rollout_is": "sequence", "rollout_is_threshold": 1.5},
         {"level": "sequence", "cap": 1.5}),
        ("token, mean 1", {"rollout_is": "token", "rollout_is_threshold": 1.3, "rollout_is_batch_normalize": True},
         {"level": "token", "cap": 1.3, "normalise": True}),
        ("sequence, mean 1",
         {"rollout_is": "sequence", "rollout_is_threshold": 1.5, "rollout_is_batch_normalize": True},
         {"level": "sequence", "cap": 1.5, "normalise": True}),
        ("IcePop", {"rollout_is": "token", "rollout_is_threshold": "0.8_1.25"},
         {"level": "token", "outside": "mask", "cap": 1.25, "floor": 0.8}),
        ("rejected by geometric mean", {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.96_1.05"},
         {"level": "none", "reject_above": 1 / 0.96, "reject_below": 1 / 1.05, "denominator": "kept"}),
        ("rejected by one token", {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.125},
         {"level": "none", "reject_token_above": exp(0.5), "reject_token_below": exp(-0.5), "denominator": "kept"}),
        ("rejected by mean k3", {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.03},
         {"level": "none", "reject_k3_above": 0.03, "denominator": "kept"}),
        ("weighted and rejected",
         {"rollout_is": "token", "rollout_is_threshold": 1.3, "rollout_rs": "seq_mean_k1",
          "rollout_rs_threshold": "0.96_1.05"},
         {"level": "token", "cap": 1.3, "reject_above": 1 / 0.96, "reject_below": 1 / 1.05, "denominator": "kept"}),
    )
]  # fmt: skip

BYPASS = [
    Case("bypass_mode, reinforce", "bypass", "bypass_mode", "gpg",
         {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.3, "rollout_rs": "seq_mean_k1",
          "rollout_rs_threshold": "0.96_1.05"},
         {"level": "token", "cap": 1.3, "reject_above": 1 / 0.96, "reject_below": 1 / 1.05, "denominator": "kept"},
         ("plain", "turns")),
]  # fmt: skip

CASES = [*ESTIMATORS, *LOSSES, *ROLLOUT_CORRECTION, *BYPASS, *FUNCTIONS]

DIFFERENT = [
    Case("grpo, a group of one", "advantages", "grpo", "grpo", {}, {}, ("lone",),
         why="verl keeps the raw score; here it is 0, and `lone: raw` gives verl's"),
    Case("rloo, a group of one", "advantages", "rloo", "rloo", {}, {}, ("lone",),
         why="the same; verl's own `rloo_vectorized` gives 0"),
    Case("gpg, weight of the batch", "advantages", "gpg", "gpg", {}, {}, ("special",),
         why="the paper corrects for groups whose rewards are equal, verl for rewards of 0; `correction: zero_scores` "
             "is verl's"),
    Case("geo_mean, with an empty response", "loss", "geo_mean", "gmpo", {}, CLIP, ("special",),
         why="verl divides by all responses, whatever the aggregation; here by those with tokens"),
    Case("geo_mean, token-sum", "loss", "geo_mean", "gmpo", {"loss_agg_mode": "token-sum"},
         {**CLIP, "aggregation": "token_sum"}, ("plain",), why="verl ignores the aggregation"),
    Case("sapo, token-mean", "loss", "sapo", "sapo", {"loss_agg_mode": "token-mean"}, {"aggregation": "token_mean"},
         ("plain", "turns"), why="verl always averages each response first; that is the default here, not the law"),
    Case("clip_cov, clipped tokens among those held back", "held_back_loss", "clip_cov", "clip_cov",
         {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.3, "clip_cov_ub": 2.0},
         {**CLIP, "fraction": 1.0, "cov_low": 0.3, "cov_high": 2.0}, ("turns",), ("loss",),
         why="verl leaves the loss of a clipped token in; it has no gradient on either side"),
    Case("kl_cov, a later update of the step", "held_back_loss", "kl_cov", "kl_cov",
         {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.7},
         {"fraction": 0.1, "cov_coef": 0.7, "chosen_with": "old_logprobs"}, ("plain", "turns"),
         why="verl chooses tokens anew in each micro-batch; here once a step, over the whole batch, so that slicing "
             "changes nothing"),
    Case("vanilla with rollout_is_weights and kl loss", "loss", "vanilla", "grpo",
         {"weights": True, "kl_coef": 0.1, "kl_penalty": "k3"},
         {**CLIP, "dual_clip": 3.0, "weights": True, "kl_coef": 0.1, "kl_kind": "k3"}, ("plain", "turns"),
         why="verl weighs the policy loss alone; here the KL and entropy terms too, which are estimates from the same "
             "tokens"),
    Case("kl_penalty, k3, far off", "kl", "k3", "k3", sorts=("special",),
         why="verl cuts the estimate off at 10, and its gradient with it; here the exponent is held at 20"),
    Case("KL penalty in the reward", "kl_in_reward", "apply_kl_penalty", "ppo", {"kl_coef": 0.05, "kl_penalty": "k1"},
         {"kl_reward_coef": 0.05, "kl_reward_kind": "k1"}, ("plain",),
         why="same rewards, but verl tells its controller the mean divergence of a token, we that of a response, as "
             "arXiv:1909.08593 has it"),
]  # fmt: skip
