"""verl's answers: its own functions, called on drawn numbers. Runs under the Python of verl's environment.

    PYTHON verl_side.py DRAWS.safetensors OUTPUT.safetensors

Written for verl 0.9.1, whose names it uses. Gradients are by the policy's log-probs (by values or logits where the case
is about those).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import verl.utils.torch_functional as verl_F
from answers import Results, main
from cases import MISMATCH, Case
from draws import RESPONSE_LIMIT, Columns
from torch import Tensor
from verl.protocol import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import apply_kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.config.actor import ActorConfig, PolicyLossConfig
from verl_cases import CASES, DIFFERENT


def advantages(columns: Columns, case: Case) -> Results:
    """An advantage estimator, with what it asks for by name."""
    options = dict(case.options)
    mask = columns["mask"].long()
    rewards = columns["token_rewards"]
    if options.pop("step_rewards", False):
        rewards = rewards + columns["step_rewards"]
    if "kl_coef" in options:
        kl = core_algos.kl_penalty(columns["old_logprobs"], columns["ref_logprobs"], options.pop("kl_penalty"))
        rewards = rewards - options.pop("kl_coef") * kl * mask
    given = {
        "token_level_rewards": rewards.clone(),
        "response_mask": mask,
        "index": np.array([str(group) for group in columns["groups"].tolist()], dtype=object),
        "values": columns["values"],
        "reward_baselines": columns["greedy_scores"],
        "config": options,
        **options,
    }
    if case.theirs == "reinforce_plus_plus":
        given["config"] = _Namespace(options)
    estimator = core_algos.get_adv_estimator_fn(case.theirs)
    wanted = {name: x for name, x in given.items() if name in inspect.signature(estimator).parameters}
    found, returns = estimator(**wanted)
    return {"advantages": found, "returns": returns} if case.theirs == "gae" else {"advantages": found}


class _Namespace(dict):  # type: ignore[type-arg]
    """A config with both ways of reading, as verl's own."""

    __getattr__ = dict.__getitem__


def loss(columns: Columns, case: Case) -> Results:
    """A policy loss on given advantages, with its gradient."""
    options = dict(case.options)
    mask = columns["mask"].long()
    given = columns["token_advantages"] if options.pop("token_advantages", False) else _spread(columns)
    weights = columns["rollout_weights"] if options.pop("weights", False) else None
    kl_coef, kl_kind = options.pop("kl_coef", 0.0), options.pop("kl_penalty", "k3")
    mode = options.pop("loss_agg_mode", "token-mean")
    drawn = columns["old_logprobs" if options.pop("on_policy", False) else "logprobs"]
    config = _actor_config(case.theirs, **options)
    leaf = drawn.clone().requires_grad_()
    value, _ = core_algos.get_policy_loss_fn(case.theirs)(
        old_log_prob=columns["old_logprobs"],
        log_prob=leaf,
        advantages=given,
        response_mask=mask,
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights,
    )
    if kl_coef:
        kl = core_algos.kl_penalty(leaf, columns["ref_logprobs"], kl_kind)
        value = value + kl_coef * core_algos.agg_loss(kl, mask, mode, loss_scale_factor=RESPONSE_LIMIT)
    return _with_gradient(value, leaf, "loss")


def _actor_config(loss_mode: str, **options: Any) -> ActorConfig:
    """verl's config of an actor with this loss; options of the loss itself go where verl has them."""
    own = {name: options.pop(name) for name in tuple(options) if name in _POLICY_LOSS}
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode, **own),
        global_batch_info={"loss_scale_factor": RESPONSE_LIMIT},
        **{"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0, **options},
    )


_POLICY_LOSS = frozenset(inspect.signature(PolicyLossConfig).parameters) - {"loss_mode"}


def value_loss(columns: Columns, case: Case) -> Results:
    """The clipped loss of a critic, with its gradient by the new values."""
    leaf = columns["new_values"].clone().requires_grad_()
    value, _ = core_algos.compute_value_loss(
        leaf,
        columns["returns"],
        columns["values"],
        columns["mask"].long(),
        case.options["cliprange_value"],
        loss_agg_mode=case.options["loss_agg_mode"],
    )
    return _with_gradient(value, leaf, "loss")


def kl(columns: Columns, case: Case) -> Results:
    """A KL estimate of each token, with the gradient of their sum."""
    leaf = columns["logprobs"].clone().requires_grad_()
    mask = columns["mask"]
    found = core_algos.kl_penalty(leaf, columns["ref_logprobs"], case.theirs)
    return {"value": found.detach(), **_gradient(found[mask].sum(), leaf)}


def whiten(columns: Columns, case: Case) -> Results:
    """Whitening over unmasked values."""
    found = verl_F.masked_whiten(columns["values"], columns["mask"], shift_mean=case.options["shift_mean"])
    return {"value": found}


def rollout_correction(columns: Columns, case: Case) -> Results:
    """What tokens are weighted with against the sampler, 0 for those that are rejected; measures of the mismatch; and
    the loss with both."""
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        old_log_prob=columns["old_logprobs"],
        rollout_log_prob=columns["rollout_logprobs"],
        response_mask=columns["mask"].long(),
        **case.options,
    )
    found = mask.double() if weights is None else weights.batch["rollout_is_weights"] * mask
    chosen = {**columns, "mask": mask.bool(), "rollout_weights": found}
    return {
        "weights": found,
        "metrics": torch.tensor([metrics[f"rollout_corr/{name}"] for name in MISMATCH], dtype=torch.float64),
        **loss(chosen, Case("", "loss", "vanilla", "", {"weights": True, "loss_agg_mode": "seq-mean-token-mean"})),
    }


def bypass(columns: Columns, case: Case) -> Results:
    """The loss that weighs against the sampler by itself, while the policy is still the one of before the update."""
    config = _actor_config("bypass_mode", rollout_correction=RolloutCorrectionConfig(**case.options))
    leaf = columns["old_logprobs"].clone().requires_grad_()
    value, _ = core_algos.get_policy_loss_fn("bypass_mode")(
        old_log_prob=columns["rollout_logprobs"],
        log_prob=leaf,
        advantages=_spread(columns),
        response_mask=columns["mask"].long(),
        loss_agg_mode="token-mean",
        config=config,
    )
    return _with_gradient(value, leaf, "loss")


def kl_in_reward(columns: Columns, case: Case) -> Results:
    """Rewards of tokens after a KL penalty, and the divergence that the controller is told."""
    data = DataProto.from_dict(
        {
            "response_mask": columns["mask"].long(),
            "token_level_scores": columns["token_rewards"],
            "old_log_probs": columns["old_logprobs"],
            "ref_log_prob": columns["ref_logprobs"],
        }
    )
    controller = core_algos.FixedKLController(case.options["kl_coef"])
    data, metrics = apply_kl_penalty(data, controller, kl_penalty=case.options["kl_penalty"])
    measured = torch.tensor(metrics["actor/reward_kl_penalty"], dtype=torch.float64)
    return {"rewards": data.batch["token_level_rewards"], "measured": measured}


def logits(columns: Columns, case: Case) -> Results:
    """Log-probs and entropies from logits, with the gradient of a weighted sum of both."""
    leaf = columns["logits"].clone().requires_grad_()
    scaled = leaf / case.options["temperature"]
    logprobs = verl_F.logprobs_from_logits_v2(scaled, columns["tokens"])
    entropy = verl_F.entropy_from_logits(scaled)
    total = (columns["values"] * logprobs + columns["returns"] * entropy)[columns["mask"]].sum()
    return {"logprobs": logprobs.detach(), "entropy": entropy.detach(), **_gradient(total, leaf)}


def controller(columns: Columns, case: Case) -> Results:
    """The coefficients of the adaptive KL controller, fed with made-up divergences."""
    made = core_algos.AdaptiveKLController(*(case.options[name] for name in ("init_kl_coef", "target_kl", "horizon")))
    coefficients = []
    for measured in (10 * columns["margins"]).tolist():
        made.update(measured, n_steps=case.options["n_steps"])
        coefficients.append(made.value)
    return {"value": torch.tensor(coefficients, dtype=torch.float64)}


def _spread(columns: Columns) -> Tensor:
    """One advantage a trajectory, on all its tokens `[B, T]`."""
    return columns["sequence_advantages"][:, None] * columns["mask"]


def _with_gradient(value: Tensor, leaf: Tensor, name: str) -> Results:
    return {name: value.detach().clone(), **_gradient(value, leaf)}


def _gradient(value: Tensor, leaf: Tensor) -> Results:
    (found,) = torch.autograd.grad(value, leaf)
    return {"gradient": found}


KINDS: Mapping[str, Callable[[Columns, Case], Results]] = {
    "advantages": advantages,
    "loss": loss,
    "held_back_loss": loss,
    "critic_loss": value_loss,
    "kl": kl,
    "whiten": whiten,
    "rollout_correction": rollout_correction,
    "bypass": bypass,
    "kl_in_reward": kl_in_reward,
    "logits": logits,
    "controller": controller,
}


if __name__ == "__main__":
    main("verl", KINDS, [*CASES, *DIFFERENT])
