"""Every built-in plugin keeps the promises of its kind."""

import importlib.metadata
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rollstock import testing
from rollstock.discovery import discover
from rollstock.extras import extras_of, normalise
from rollstock.kinds import KINDS
from rollstock.testing.models import save_classifier

ENTRIES = [entry.id for entry in discover().values() if entry.distribution == "rollstock"]

CHECKS: dict[str, Callable[..., testing.Report]] = {kind: getattr(testing, f"check_{kind}") for kind in KINDS}


def rows_of_jsonl(folder: Path) -> list[tuple[int, Mapping[str, float]]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["metrics"]) for row in rows if "metrics" in row]


def questions(folder: Path) -> str:
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(40)))
    return str(path)


def classifier(folder: Path) -> str:
    save_classifier(folder / "classifier")
    return str(folder / "classifier")


# What a plugin needs to be checked, beyond its defaults, for each way in which it is checked.
SPECIAL: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    "algorithm:grpo": lambda folder: [
        {},
        {"options": {"scale": "none", "aggregation": "seq_mean_token_sum_norm"}},
        {"options": {"kl_coef": 0.1, "kl_kind": "k3+", "entropy_coef": 0.01, "aggregation": "seq_mean_token_mean"}},
        {"options": {"clip_high": 0.3, "dual_clip": 3.0, "aggregation": "token_sum"}},
    ],
    "algorithm:dr_grpo": lambda folder: [{}, {"options": {"lone": "raw", "whiten": True, "kl_coef": 0.1}}],
    "algorithm:dapo": lambda folder: [
        {},
        {"options": {"overlong_buffer": 4, "overlong_limit": 6, "dynamic_sampling": False}},
        {"options": {"scale": "none", "dual_clip": 3.0, "entropy_coef": 0.01}},
    ],
    "algorithm:rloo": lambda folder: [{}, {"options": {"whiten": True, "aggregation": "token_mean"}}],
    "algorithm:reinforce_pp": lambda folder: [
        {},
        {"options": {"kl_reward_coef": 0.1, "kl_reward_kind": "k2", "kl_control": "ratio", "gamma": 0.9}},
        {"options": {"group_size": 4, "kl_coef": 0.1}},
    ],
    "algorithm:reinforce_pp_baseline": lambda folder: [{}, {"options": {"whiten": False, "kl_coef": 0.1}}],
    "algorithm:remax": lambda folder: [{}, {"options": {"group_size": 4, "whiten": True, "entropy_coef": 0.01}}],
    "algorithm:opo": lambda folder: [{}, {"options": {"lone": "raw", "kl_coef": 0.1}}],
    "algorithm:gpg": lambda folder: [
        {},
        {"options": {"correction": "zero_scores", "scale": "unbiased", "kl_coef": 0.1}},
        {"options": {"correction": "none", "lone": "raw", "entropy_coef": 0.01}},
    ],
    "algorithm:pass_at_k": lambda folder: [
        {},
        {"options": {"k": 2}},
        {"options": {"estimator": "leave_one_out", "scale": "unbiased", "lone": "raw"}},
    ],
    "algorithm:gspo": lambda folder: [
        {},
        {"options": {"level": "token", "clip": 0.2, "kl_coef": 0.1}},
        {"options": {"clip": 0.1, "clip_high": None, "dual_clip": 3.0, "aggregation": "token_mean"}},
    ],
    "algorithm:cispo": lambda folder: [{}, {"options": {"clip": 0.2, "clip_high": 0.28, "entropy_coef": 0.01}}],
    "algorithm:gmpo": lambda folder: [{}, {"options": {"clip": 0.1, "clip_high": 0.2, "kl_coef": 0.1}}],
    "algorithm:sapo": lambda folder: [{}, {"options": {"tau_pos": 0.5, "tau_neg": 3.0, "aggregation": "token_mean"}}],
    "algorithm:clip_cov": lambda folder: [
        {},
        {"options": {"fraction": 0.3, "cov_low": 0.1, "clip_high": 0.28, "kl_coef": 0.1}},
    ],
    "algorithm:kl_cov": lambda folder: [{}, {"options": {"fraction": 0.3, "cov_kind": "k2", "entropy_coef": 0.01}}],
    "algorithm:ppo": lambda folder: [
        {},
        {"options": {"kl_reward_coef": 0.1, "kl_control": "horizon", "kl_coef": 0.1, "value_clip": None}},
        {"options": {"kl_reward_coef": 0.1, "kl_control": "ratio", "group_size": 4, "whiten": False, "gamma": 0.9}},
        {"options": {"shared_backbone": True, "entropy_coef": 0.01, "value_coef": 0.5}},
    ],
    "algorithm:reward_model": lambda folder: [
        {},
        {"options": {"margin": 0.5, "label_smoothing": 0.1, "centre_coef": 0.01}},
    ],
    "algorithm:sft": lambda folder: [{}, {"options": {"aggregation": "seq_mean_token_mean"}}],
    "algorithm:dpo": lambda folder: [
        {},
        {"options": {"label_smoothing": 0.2, "sft_coef": 0.3}},
        {"options": {"kind": "ipo", "average_logprobs": True}},
        {"options": {"kind": "robust", "label_smoothing": 0.1}},
        {"options": {"kind": "hinge", "reference_free": True, "average_logprobs": True, "margin": 0.5}},
    ],
    "backend:torch": lambda folder: [
        {"options": {"learning_rate": 1e-3}},
        {"options": {"learning_rate": 1e-3, "share_prompts": False, "activation_checkpointing": True}},
        {"options": {"learning_rate": 1e-2, "lora": {"rank": 4}}},
    ],
    "rollout:native": lambda folder: [{}, {"options": {"decoder": "plain", "max_batch": 3, "min_batch": 1}}],
    "environment:arithmetic": lambda folder: [{}, {"options": {"chat": False, "operations": ["subtract", "divide"]}}],
    "environment:jsonl": lambda folder: [{"options": {"path": questions(folder)}}],
    "environment:reasoning_gym": lambda folder: [{"options": {"task": "chain_sum"}, "num_tasks": 8}],
    "reward:model": lambda folder: [{"options": {"path": classifier(folder), "mean": 0.1, "std": 2.0}}],
    "compressor:none": lambda folder: [{"tolerance": 0.0}],
    "compressor:int8": lambda folder: [
        {"tolerance": 0.01, "ratio": 0.26},
        {"tolerance": 0.02, "ratio": 0.26, "options": {"stochastic": True, "feedback": False}},
        {"tolerance": 0.02, "ratio": 0.251, "options": {"block_size": None}},
    ],
    "compressor:topk": lambda folder: [
        {"tolerance": 0.8, "ratio": 0.12},
        {"tolerance": 0.99, "ratio": 0.015, "options": {"share": 0.01}},
        {"tolerance": 1.0, "options": {"count": 1, "feedback": False}},
    ],
    "compressor:hybrid": lambda folder: [
        {"tolerance": 0.3, "ratio": 0.16},
        {"tolerance": 0.8, "ratio": 0.045, "options": {"share": 0.1}},
        {"tolerance": 0.8, "ratio": 0.045, "options": {"share": 0.1, "stochastic": True, "block_size": 64}},
    ],
    "tracker:jsonl": lambda folder: [{"directory": folder, "read": rows_of_jsonl}],
    "tracker:wandb": lambda folder: [{"directory": folder, "options": {"mode": "offline"}}],
    "extension:kl_in_reward": lambda folder: [
        {"directory": folder / "fixed"},
        {"directory": folder / "ratio", "options": {"control": "ratio", "kind": "k3"}},
    ],
    "extension:length_balance": lambda folder: [{"directory": folder}],
    "extension:reward_normaliser": lambda folder: [{"directory": folder, "options": {"decay": 0.9, "clip": 2.0}}],
    "extension:rollout_correction": lambda folder: [
        {"directory": folder / "truncated"},
        {
            "directory": folder / "masked",
            "options": {"level": "sequence", "outside": "mask", "floor": 0.5, "denominator": "kept", "normalise": True},
        },
    ],
    "extension:overlong_penalty": lambda folder: [{"directory": folder, "options": {"buffer": 2}}],
}


SLOW = {"extension:kl_in_reward", "extension:rollout_correction"}
"""Those whose check takes over ten seconds."""

ELSEWHERE = {"executor:ray", "reward:remote"}
"""Those that are checked where what they need is running: tests/plugins/executors/test_ray_kit.py, and
tests/plugins/rewards/test_remote.py."""


@pytest.mark.parametrize(
    "plugin",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in ENTRIES if name not in ELSEWHERE],
)
def test_a_built_in_plugin_keeps_the_promises_of_its_kind(plugin: str, tmp_path: Path) -> None:
    kind, _, name = plugin.partition(":")
    missing = [package for package in needs(name) if not is_there(package)]
    if missing:
        pytest.skip(f"the package {missing[0]} is not installed")
    default = [{"directory": tmp_path}] if kind in ("tracker", "extension") else [{}]
    for arguments in SPECIAL[plugin](tmp_path) if plugin in SPECIAL else default:
        report = CHECKS[kind](name, **arguments)
        assert report.passed
        for check, reason in report.skipped.items():
            assert reason, check
    if kind == "device" and report.skipped:
        pytest.skip("; ".join(sorted(set(report.skipped.values()))))


def needs(name: str) -> list[str]:
    """The optional packages that a plugin is named after, and those of an extra of its name."""
    extras = extras_of("rollstock")
    packages = {package for found in extras.values() for package in found}
    return sorted((packages & {normalise(name)}) | set(extras.get(name, ())))


def is_there(distribution: str) -> bool:
    try:
        return bool(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return False


def test_every_kind_has_a_kit() -> None:
    assert set(CHECKS) == set(KINDS)
    assert len(ENTRIES) >= 20
