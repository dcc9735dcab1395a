"""Whole runs whose actor has more on top than a language model: a shared critic, or a reward model's score."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rollstock import ConfigError, RunError
from rollstock.backends.torch.backend import TorchBackend
from rollstock.build import choose
from rollstock.checkpoint import CheckpointStore
from rollstock.export import export
from rollstock.launch import evaluate, resume, train
from rollstock.testing import read_metrics

SHARED = {"name": "ppo", "shared_backbone": True, "group_size": 2, "kl_reward_coef": 0.05}


@pytest.fixture
def pairs(tmp_path: Path) -> dict[str, Any]:
    """A file of pairs: sums of two digits, with and without something after them."""
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"{a + b}="} for a in range(1, 6) for b in range(1, 6)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"name": "jsonl", "path": str(path), "chat": False, "chosen": "chosen", "rejected": "rejected"}


@pytest.fixture
def break_update(monkeypatch: pytest.MonkeyPatch):
    """Let the given update of the whole process fail; call it again to mend that."""
    original = TorchBackend.update

    def at(number: int | None) -> None:
        left = [number]

        def update(self: TorchBackend, *args: Any, **kwargs: Any) -> Any:
            left[0] = None if left[0] is None else left[0] - 1
            if left[0] == 0:
                raise RunError("the power is gone")
            return original(self, *args, **kwargs)

        monkeypatch.setattr(TorchBackend, "update", update)

    return at


def steps(run: Path) -> list[dict[str, float]]:
    return [row["metrics"] for row in read_metrics(run) if "metrics" in row]


def test_a_policy_with_a_value_head_is_its_own_critic(small_run, tmp_path):
    config = small_run(tmp_path / "run", algorithm=SHARED)
    assert choose(config).roles == ["actor", "rollout", "reward", "reference"]
    made = train(config).directory
    for row in steps(made):
        assert {"actor/pg_loss", "critic/vf_loss", "critic/values/mean", "actor/grad_norm"} <= row.keys()
        assert "critic/grad_norm" not in row
        assert row["training/rollout_logprob_diff_max"] < 1e-4
        assert row["sync/changed"] == 1.0
    tensors = CheckpointStore(made / "checkpoints").load().tensors
    assert sorted(tensors) == ["actor/model", "actor/optimizer"]
    assert float(tensors["actor/model"]["value_head.weight"].abs().max()) > 0


def test_the_values_of_the_shared_head_reach_the_advantages(small_run, tmp_path, monkeypatch):
    """Before its first update the head says 0 everywhere; afterwards it does not."""
    made = train(small_run(tmp_path / "run", algorithm=SHARED)).directory
    values = [row["critic/values/max"] - row["critic/values/min"] for row in steps(made)]
    assert values[0] == 0.0
    assert all(value != 0.0 for value in values[1:])


def test_a_shared_backbone_has_no_critic_to_warm_up(small_run, tmp_path):
    config = small_run(tmp_path / "run", "train.critic_warmup=1", algorithm=SHARED)
    with pytest.raises(ConfigError, match=r"train\.critic_warmup: 1 is for a critic of its own\. .* set it to 0"):
        choose(config)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 2])
def test_a_run_on_a_shared_backbone_resumes_to_the_bit(lora, small_run, tmp_path, break_update, assert_same_run):
    options = {"backend": {"name": "torch", "learning_rate": 1e-2, "lora": {"rank": lora}}, "algorithm": SHARED}
    overrides = ("checkpoint.every_steps=1", "train.epochs=2")
    through = train(small_run(tmp_path / "through", *overrides, **options)).directory
    break_update(4)  # the second of step 2
    with pytest.raises(RunError, match="power"):
        train(small_run(tmp_path / "broken", *overrides, **options))
    break_update(None)
    assert_same_run(resume(tmp_path / "broken").directory, through)


def test_the_export_of_a_shared_backbone_is_a_plain_language_model(small_run, tmp_path):
    made = train(small_run(tmp_path / "run", algorithm=SHARED)).directory
    model, report = AutoModelForCausalLM.from_pretrained(export(made, tmp_path / "model"), output_loading_info=True)
    assert not report["unexpected_keys"]
    saved = CheckpointStore(made / "checkpoints").load().tensors["actor/model"]
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.named_parameters())
    assert evaluate(made).evaluation.keys() >= {"eval/greedy/reward_mean"}


def test_a_reward_model_is_trained_resumed_and_exported(small_run, tmp_path, pairs, break_update, assert_same_run):
    sections = {"algorithm": "reward_model", "environment": {**pairs, "heldout_fraction": 0.3}}
    overrides = ("train.steps=30", "train.prompts_per_step=8", "checkpoint.every_steps=10", "evaluation.prompts=50")
    through = train(small_run(tmp_path / "through", *overrides, **sections)).directory
    before, *_, after = (row["evaluation"] for row in read_metrics(through) if "evaluation" in row)
    assert before["eval/loss"] == pytest.approx(0.6931, abs=1e-3)  # a fresh head has no opinion
    assert steps(through)[-1]["rewards/accuracies"] > 0.8
    assert after["eval/loss"] < before["eval/loss"]
    break_update(25)
    with pytest.raises(RunError, match="power"):
        train(small_run(tmp_path / "broken", *overrides, **sections))
    break_update(None)
    assert_same_run(resume(tmp_path / "broken").directory, through)
    model, report = AutoModelForSequenceClassification.from_pretrained(
        export(through, tmp_path / "model"), output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    card = (tmp_path / "model" / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    assert "AutoModelForSequenceClassification.from_pretrained" in card
    assert model.config.pad_token_id is None  # it ends responses as well


@pytest.mark.slow
def test_a_trained_reward_model_scores_a_run(small_run, tmp_path, pairs):
    sections = {"algorithm": "reward_model", "environment": {**pairs, "heldout_fraction": 0.3}}
    overrides = ("train.steps=2", "train.prompts_per_step=8")
    judge = export(train(small_run(tmp_path / "judge", *overrides, **sections)).directory, tmp_path / "model")
    rewards = [{"name": "model", "path": str(judge), "batch_size": 3}, {"name": "environment", "weight": 0}]
    made = train(small_run(tmp_path / "run", rewards=rewards)).directory
    for row in steps(made):
        assert row["reward/num_unscored"] == 0
        assert row["reward/mean"] == pytest.approx(row["reward/model_mean"], abs=1e-6)
        assert "reward/environment_mean" in row
    rollout = json.loads((made / "rollouts" / "step-000001.jsonl").read_text().splitlines()[0])
    assert rollout["reward"] == pytest.approx(rollout["rewards"]["model"])


def test_an_export_needs_no_base_model(small_run, tmp_path, pairs):
    """The reward model's own config stands in for a directory that is gone."""
    sections = {"algorithm": "reward_model", "environment": {**pairs, "heldout_fraction": 0.3}}
    base = export(train(small_run(tmp_path / "first", **sections)).directory, tmp_path / "base")
    model = {"path": str(base)}
    made = train(small_run(tmp_path / "second", model=model, **sections)).directory
    base.rename(tmp_path / "elsewhere")
    exported = export(made, tmp_path / "model")
    assert AutoModelForSequenceClassification.from_pretrained(exported).config.num_labels == 1
