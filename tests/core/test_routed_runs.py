"""Whole runs with a router: refused, resumed, and in step on both sides."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rollstock import UserError
from rollstock.checkpoint import CheckpointStore
from rollstock.export import export
from rollstock.launch import resume
from rollstock.testing import read_metrics, tiny_config, tiny_run

pytestmark = pytest.mark.usefixtures("one_thread")

EXPERTS = {
    "config": {
        "model_type": "qwen3_moe",
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
    },
    "tokenizer": {"characters": "0123456789+="},
}
BALANCED = {"auxiliary_loss": 0.05, "bias_rate": 0.02}


def run(directory: Path, router: Any, **sections: Any) -> list[dict[str, float]]:
    """The metrics of each step."""
    tiny_run(directory, {"model": EXPERTS, "router": router, **sections})
    return [row["metrics"] for row in read_metrics(directory) if "metrics" in row]


def test_a_router_for_a_dense_model_is_refused_in_one_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="LlamaForCausalLM is a dense model, without experts to choose; leave `router`"):
        tiny_run(tmp_path / "run", {"router": "topk"})


def test_the_default_is_no_router_and_a_bare_name_will_do(tmp_path: Path) -> None:
    assert tiny_config(tmp_path).router is None
    named = tiny_config(tmp_path, {"router": "topk"}).router
    assert named is not None
    assert named.name == "topk"


def test_a_router_that_does_not_exist_is_named_with_those_that_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no router 'topp'. Did you mean.*topk"):
        tiny_run(tmp_path / "run", {"model": EXPERTS, "router": {"name": "topp"}})


@pytest.mark.parametrize("name", ["topk", "gumbel", "vote", "replay"])
def test_trainer_and_sampler_agree_in_every_step(name: str, tmp_path: Path) -> None:
    """Biases and noise change from step to step, and reach the generators with the weights."""
    backend = {"name": "torch", "learning_rate": 1e-2}
    rows = run(tmp_path / "run", {"name": name, **BALANCED}, backend=backend, train={"steps": 4, "prompts_per_step": 4})
    assert len(rows) == 4
    for row in rows:
        assert row["training/rollout_logprob_diff_max"] < 1e-4
        assert row["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-5)
        assert row["moe/max_violation"] >= 0
        assert row["moe/dropped_tokens"] == 0
        assert row["moe/entropy"] > 0
        assert sum(row[f"moe/load/layer_00/expert_{i:03d}"] for i in range(8)) == pytest.approx(1.0)
        assert ("moe/replayed_share" in row) == (name == "replay")


def test_a_critic_routes_for_itself_and_is_counted_apart(tmp_path: Path) -> None:
    algorithm = {"name": "ppo", "group_size": 2, "kl_reward_coef": 0.1}
    rows = run(tmp_path / "run", {"name": "replay", **BALANCED}, algorithm=algorithm)
    for row in rows:
        assert row["moe/replayed_share"] < 1.0
        assert "critic/moe/replayed_share" not in row
        assert row["critic/moe/max_violation"] >= 0


@pytest.mark.parametrize("name", ["topk", "gumbel"])
def test_a_resumed_run_equals_one_that_was_never_interrupted(
    name: str, tmp_path: Path, assert_same_run: Callable[[Path, Path], None]
) -> None:
    """Biases, and the temperature of the step, survive to the bit."""
    sections = {
        "train": {"steps": 5, "prompts_per_step": 4, "mini_batches": 2},
        "backend": {"name": "torch", "learning_rate": 1e-2},
        "checkpoint": {"every_steps": 1, "keep": 5},
    }
    run(tmp_path / "straight", {"name": name, **BALANCED}, **sections)
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    for step in (3, 4, 5):
        shutil.rmtree(tmp_path / "resumed" / "checkpoints" / f"step-{step:06d}")
    resume(tmp_path / "resumed")
    assert_same_run(tmp_path / "resumed", tmp_path / "straight")
    saved = CheckpointStore(tmp_path / "resumed" / "checkpoints").load().state["backends"]["actor"]
    assert any(any(row) for row in saved["router"]["biases"])


def test_an_export_keeps_biases_beside_the_model_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path / "run", {"name": "topk", "bias_rate": 0.02})
    export(tmp_path / "run", tmp_path / "model")
    biases = json.loads((tmp_path / "model" / "router.json").read_text())["biases"]
    assert [len(row) for row in biases] == [8, 8]
    assert "plain transformers chooses experts without it" in caplog.text
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.num_experts == 8
    run(tmp_path / "plain", "topk")
    export(tmp_path / "plain", tmp_path / "other")
    assert not (tmp_path / "other" / "router.json").exists()


def offline(directory: Path, router: Any, algorithm: str, **options: Any) -> list[dict[str, Any]]:
    """All rows of metrics of a short run on eight pairs, and one that is held out."""
    rows = [json.dumps({"prompt": f"{a}+{a}=", "chosen": str(2 * a), "rejected": "0"}) for a in range(1, 10)]
    files = {"path": directory / "pairs.jsonl", "heldout_path": directory / "heldout.jsonl"}
    for file, part in zip(files.values(), (rows[:8], rows[8:]), strict=True):
        file.write_text("\n".join(part), encoding="utf-8")
    data = {name: str(file) for name, file in files.items()}
    told = {"response": "chosen"} if algorithm == "sft" else {"chosen": "chosen", "rejected": "rejected"}
    tiny_run(
        directory / "run",
        {
            "model": EXPERTS,
            "router": router,
            "algorithm": algorithm,
            "environment": {"name": "jsonl", "chat": False, **data, **told},
            "train": {"steps": 2, "prompts_per_step": 4},
            "evaluation": {"every": 1, "prompts": 1, "at_start": True},
            **options,
        },
    )
    return read_metrics(directory / "run")


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "reward_model"])
def test_an_offline_algorithm_trains_under_a_router(algorithm: str, tmp_path: Path) -> None:
    steps = [row["metrics"] for row in offline(tmp_path, {"name": "gumbel", **BALANCED}, algorithm) if "metrics" in row]
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["moe/auxiliary_loss"] > 0
        assert metrics["actor/grad_norm"] > 0
        assert metrics["actor/skipped_updates"] == 0


def test_offline_noise_changes_from_step_to_step_and_is_off_in_evaluation(tmp_path: Path) -> None:
    """With a learning rate of next to nothing, only the noise can change a loss."""
    found = {}
    for name in ("topk", "gumbel"):
        (tmp_path / name).mkdir()
        still = {"name": "torch", "learning_rate": 1e-12}
        rows = offline(tmp_path / name, name, "sft", backend=still, train={"steps": 2, "prompts_per_step": 8})
        found[name] = [row["metrics"]["actor/loss"] for row in rows if "metrics" in row]
        found[f"{name}, evaluated"] = [row["evaluation"]["eval/loss"] for row in rows if "evaluation" in row]
    assert found["topk"][0] == pytest.approx(found["topk"][1], abs=1e-5)  # all rows in each
    assert abs(found["gumbel"][0] - found["gumbel"][1]) > 1e-3
    assert found["gumbel, evaluated"] == pytest.approx(found["topk, evaluated"], abs=1e-5)


def test_a_router_that_replays_is_refused_where_nothing_is_generated(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'replay' takes the experts that generation chose, and nothing is generated"):
        offline(tmp_path, "replay", "sft")
