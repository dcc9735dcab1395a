"""What every method that makes advantages of outcome rewards keeps to: degenerate groups, directions, refusals."""

import math
from pathlib import Path

import pytest
import torch

from rollstock import Batch, MicroBatch, Totals, UserError
from rollstock.algorithms.dapo import DAPO, DAPOConfig
from rollstock.algorithms.dr_grpo import DrGRPO, DrGRPOConfig
from rollstock.algorithms.gpg import GPG, GPGConfig
from rollstock.algorithms.grpo import GRPO, GRPOConfig
from rollstock.algorithms.opo import OPO, OPOConfig
from rollstock.algorithms.pass_at_k import PassAtK, PassAtKConfig
from rollstock.algorithms.reinforce_pp import ReinforcePP, ReinforcePPConfig
from rollstock.algorithms.reinforce_pp_baseline import ReinforcePPBaseline, ReinforcePPBaselineConfig
from rollstock.algorithms.remax import ReMax, ReMaxConfig
from rollstock.algorithms.rloo import RLOO, RLOOConfig
from rollstock.testing import read_metrics, tiny_run

GROUPED = {
    "grpo": (GRPO, GRPOConfig),
    "dr_grpo": (DrGRPO, DrGRPOConfig),
    "dapo": (DAPO, DAPOConfig),
    "rloo": (RLOO, RLOOConfig),
    "opo": (OPO, OPOConfig),
    "gpg": (GPG, GPGConfig),
    "reinforce_pp_baseline": (ReinforcePPBaseline, ReinforcePPBaselineConfig),
    "pass_at_k": (PassAtK, PassAtKConfig),
}
ALL = {**GROUPED, "reinforce_pp": (ReinforcePP, ReinforcePPConfig), "remax": (ReMax, ReMaxConfig)}


def with_greedy(batch: Batch, scores: list[float]) -> Batch:
    """The batch as the prepare stage leaves it for ReMax."""
    batch["greedy_scores"] = torch.tensor(scores)
    batch["greedy_scored"] = torch.ones(len(batch), dtype=torch.bool)
    return batch


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_of_one_has_no_advantage(cases, make_batch, name):
    batch = make_batch([[1, 1], [1], [1]], [1.0, 0.5, 0.5], groups=[4, 2, 2])
    advantages = GROUPED[name][0]().advantages(batch)
    assert advantages[0].tolist() == [cases["group_of_one"]["right_advantage"]] * 2


@pytest.mark.parametrize("name", sorted(set(GROUPED) - {"reinforce_pp_baseline", "gpg"}))
def test_a_group_of_one_may_keep_its_raw_score(make_batch, name):
    kind, config = GROUPED[name]
    batch = make_batch([[1, 0], [1], [1]], [0.75, 1.0, 0.0], groups=[4, 2, 2])
    raw, zero = kind(config(lone="raw")).advantages(batch), kind(config()).advantages(batch)
    assert raw[0].tolist() == [0.75, 0.0]
    assert torch.equal(raw[1:], zero[1:])


@pytest.mark.parametrize("score", [0.0, 1.0, -3.7, 1e6 + 1 / 3])
@pytest.mark.parametrize("name", ALL)
def test_equal_rewards_have_no_advantage(make_batch, name, score):
    batch = with_greedy(make_batch([[1], [1, 1], [0, 1, 1], []], [score] * 4), [score] * 4)
    batch["scores"] = torch.full((4,), score)
    if name == "reinforce_pp":  # there an empty response has no place for its score, and observations none either
        batch = batch.select([0, 0, 0])
    assert ALL[name][0]().advantages(batch).abs().max() == 0


@pytest.mark.parametrize("name", ALL)
def test_an_empty_response_leaves_the_others_defined(make_batch, name):
    batch = with_greedy(make_batch([[], [1, 1], [1]], [1.0, 0.0, 1.0]), [0.0] * 3)
    advantages = ALL[name][0]().advantages(batch)
    assert advantages.shape == (3, 2)
    assert torch.isfinite(advantages).all()
    assert advantages[0].abs().sum() == 0


@pytest.mark.parametrize("name", ALL)
def test_a_batch_without_trajectories_has_no_advantages(make_batch, name):
    batch = with_greedy(make_batch([[1]], [1.0]), [0.0]).select([])
    assert ALL[name][0]().advantages(batch).numel() == 0


@pytest.mark.parametrize("name", ALL)
def test_a_better_response_becomes_likelier_and_a_worse_one_less_likely(make_batch, name):
    batch = with_greedy(make_batch([[1, 1]] * 4, [1.0, 0.0, 0.0, 0.25]), [0.25] * 4)
    algorithm = ALL[name][0]()
    batch["advantages"] = algorithm.advantages(batch)
    logprobs = torch.full((4, 2), -1.0, requires_grad=True)
    algorithm.loss(MicroBatch(batch, Totals.of(batch, response_limit=4), {"logprobs": logprobs})).value.backward()
    assert (logprobs.grad[0] < 0).all()
    assert (logprobs.grad[1] > 0).all()


@pytest.mark.parametrize("name", sorted(set(GROUPED) | {"remax"}))
def test_whitened_advantages_have_unit_variance_around_zero(make_batch, name):
    kind, config = ALL[name]
    batch = make_batch([[1], [1, 1, 0], [1, 1], [1, 1]], [1.0, 0.0, 1.0, 0.25], groups=[0, 0, 1, 1])
    advantages = kind(config(whiten=True)).advantages(with_greedy(batch, [0.25] * 4))
    chosen = advantages[batch.mask]
    assert float(chosen.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(chosen.std()) == pytest.approx(1.0, abs=1e-4)
    assert advantages[~batch.mask].abs().sum() == 0


@pytest.mark.parametrize("name", ALL)
def test_terms_decide_which_columns_and_outputs_are_needed(name):
    kind, config = ALL[name]
    assert "ref_logprobs" not in kind().needed_columns()
    assert kind().training_outputs() == {"logprobs"}
    assert "ref_logprobs" in kind(config(kl_coef=0.1)).needed_columns()
    assert kind(config(entropy_coef=0.1)).training_outputs() == {"logprobs", "entropy"}


@pytest.mark.parametrize("setting", ["sampling.temperature=0", "sampling.top_k=1"])
@pytest.mark.parametrize("name", sorted(set(GROUPED) | {"remax"}))
def test_greedy_sampling_is_refused(small_config, name, setting):
    problems = ALL[name][0]().validate(small_config(setting))
    assert len(problems) == 1
    assert "each advantage is 0" in problems[0]
    assert problems[0].startswith(setting.replace("=", ": "))
    assert not ALL[name][0]().validate(small_config())


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_of_one_sample_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=r"algorithm.group_size.*at least 2"):
        tiny_run(tmp_path / "run", {"algorithm": {"name": name, "group_size": 1}})


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_config_changes_the_method_by_its_name_alone(tmp_path: Path, name: str) -> None:
    outcome = tiny_run(tmp_path / "run", {"algorithm": {"name": name, "group_size": 4}})
    assert outcome.status == "finished"
    steps = [row["metrics"] for row in read_metrics(tmp_path / "run") if "metrics" in row]
    assert len(steps) == 2
    trained = [metrics for metrics in steps if "actor/pg_loss" in metrics]
    assert all(math.isfinite(metrics["actor/pg_loss"]) for metrics in trained)
    if name != "dapo":  # which trains on nothing where all groups are uniform
        assert len(trained) == 2


@pytest.mark.parametrize("name", sorted(ALL))
def test_several_epochs_of_mini_batches_and_a_kl_term_are_options(tmp_path: Path, name: str) -> None:
    options = {"name": name, "group_size": 4, "kl_coef": 0.1, "kl_kind": "k3+", "entropy_coef": 0.01}
    sections = {"algorithm": options, "environment": {"name": "arithmetic", "chat": False, "prompt": "{a}{op}{b}="}}
    overrides = ["train.epochs=2", "train.mini_batches=2", "sampling.max_new_tokens=2"]
    outcome = tiny_run(tmp_path / "run", sections, overrides)
    assert outcome.status == "finished"
    steps = [row["metrics"] for row in read_metrics(tmp_path / "run") if "metrics" in row]
    if name != "dapo":
        assert all(metrics["train/num_updates"] == 4 for metrics in steps)
        assert all({"actor/kl_loss", "actor/entropy", "actor/ppo_kl"} <= metrics.keys() for metrics in steps)
