"""DAPO: the decoupled clip, groups that are replaced, and the soft length limit."""

import json
from pathlib import Path

import pytest
import torch

from rollstock import MicroBatch, Totals, UserError
from rollstock.algorithms.dapo import DAPO, DAPOConfig
from rollstock.algorithms.grpo import GRPO
from rollstock.errors import ConfigError
from rollstock.testing import read_metrics, tiny_run


def test_the_upper_clip_is_wider_than_the_lower_one(make_batch):
    batch = make_batch([[1, 1], [1, 1]], [1.0, 0.0])
    batch["advantages"] = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    batch["old_logprobs"] = torch.zeros(2, 2)
    ratios = torch.tensor([[1.25, 1.3], [0.85, 0.75]])
    loss = DAPO().loss(MicroBatch(batch, Totals.of(batch, response_limit=2), {"logprobs": ratios.log()}))
    assert float(loss.value) == pytest.approx((-1.25 - 1.28 + 0.85 + 0.8) / 4)
    assert loss.metrics["actor/pg_clipfrac"].value == 0.5


def test_advantages_are_those_of_grpo(make_batch):
    batch = make_batch([[1]] * 3 + [[1, 0]], [1.0, 0.0, 0.3, 0.0])
    assert torch.equal(DAPO().advantages(batch), GRPO().advantages(batch))


def test_groups_with_equal_rewards_are_dropped(make_batch):
    batch = make_batch([[1]] * 7, [1.0, 1.0, 0.0, 1.0, 0.3, 0.3, 1.0], groups=[0, 0, 1, 1, 2, 2, 3])
    assert DAPO().select(batch) == [2, 3]
    assert DAPO(DAPOConfig(dynamic_sampling=False)).select(batch) is None


def test_without_dynamic_sampling_a_step_generates_once():
    assert DAPO().refill_rounds == 8
    assert DAPO(DAPOConfig(dynamic_sampling=False)).refill_rounds == 0


def penalised(**options):
    return DAPO(DAPOConfig(overlong_buffer=2, overlong_limit=4, **options))


def test_the_penalty_grows_over_the_last_tokens_before_the_limit(make_batch):
    batch = make_batch([[1] * n for n in (0, 2, 3, 4, 5)], [1.0] * 5)
    assert penalised().rewards(batch).tolist() == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert penalised(overlong_scale=0.5).rewards(batch).tolist() == [1.0, 1.0, 0.75, 0.5, 0.5]
    metrics = penalised().after_update(batch, {})
    assert metrics["reward/overlong_penalty"].value == pytest.approx(0.5)
    assert metrics["reward/overlong_ratio"].value == pytest.approx(0.6)


def test_the_penalty_decides_advantages_and_not_which_groups_are_kept(make_batch):
    batch = make_batch([[1, 1], [1, 1, 1], [1], [1]], [1.0, 1.0, 1.0, 0.0], groups=[0, 0, 1, 1])
    assert penalised().select(batch) == [2, 3]
    advantages = penalised().advantages(batch)
    assert advantages[0, 0] > 0 > advantages[1, 0]


def test_without_a_limit_of_its_own_it_takes_the_runs(make_batch):
    algorithm = DAPO(DAPOConfig(overlong_buffer=2))
    batch = make_batch([[1, 1, 1]], [1.0])
    with pytest.raises(ConfigError, match="overlong_buffer needs a limit"):
        algorithm.advantages(batch)

    class Run:
        class sampling:  # noqa: N801 - stands in for an attribute
            max_new_tokens = 4

    algorithm.rollstock_run_start(Run())
    assert algorithm.rewards(batch).tolist() == [0.5]


def test_a_buffer_beyond_the_limit_and_a_second_penalty_are_refused(small_config):
    config = small_config("sampling.max_new_tokens=4", "extensions=[overlong_penalty]")
    problems = DAPO(DAPOConfig(overlong_buffer=5)).validate(config)
    assert len(problems) == 2
    assert "5 is more than the limit of 4 response tokens" in problems[0]
    assert "the extension overlong_penalty punishes long responses as well: keep one" in problems[1]
    assert not DAPO().validate(config)
    filters = small_config("sampling.max_new_tokens=4", "extensions=[{name: overlong_penalty, scale: 0, filter: true}]")
    assert not DAPO(DAPOConfig(overlong_buffer=4)).validate(filters)
    assert not DAPO(DAPOConfig(overlong_buffer=4)).validate(small_config("sampling.max_new_tokens=4"))


ROWS = [{"prompt": f"{n}=", "answer": "1" if n % 2 else "12345"} for n in range(40)]
"""Tasks of which every second one cannot be solved in three tokens."""


def run_dapo(folder: Path, *overrides: str) -> list[dict[str, float]]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    environment = {"name": "jsonl", "path": str(folder / "rows.jsonl"), "chat": False}
    options = {"name": "dapo", "group_size": 16, "refill_rounds": 30}
    tiny_run(folder / "run", {"algorithm": options, "environment": environment}, overrides)
    return [row["metrics"] for row in read_metrics(folder / "run") if "metrics" in row]


def test_a_step_is_refilled_until_it_has_its_prompts_and_no_more(tmp_path):
    steps = run_dapo(tmp_path, "sampling.max_new_tokens=2")
    for metrics in steps:
        assert metrics["train/num_trajectories"] == 4 * 16
        assert metrics["train/num_rounds"] > 1
        generated = metrics["train/num_rounds"] * 4 * 16
        assert metrics["train/num_dropped"] + metrics["train/num_surplus"] + 4 * 16 == generated
    assert steps[-1]["train/position"] == 4 * sum(metrics["train/num_rounds"] for metrics in steps)
    rows = (tmp_path / "run" / "rollouts" / "step-000001.jsonl").read_text().splitlines()
    by_group: dict[int, set[float]] = {}
    for row in map(json.loads, rows):
        by_group.setdefault(row["group"], set()).add(row["reward"])
    assert len(by_group) == 4
    assert all(len(rewards) > 1 for rewards in by_group.values())


def test_where_rounds_run_out_a_step_trains_on_what_is_left(tmp_path):
    for metrics in run_dapo(tmp_path, "algorithm.refill_rounds=0", "sampling.max_new_tokens=2"):
        assert metrics["train/num_rounds"] == 1
        assert metrics.get("train/num_trajectories", 0) < 4 * 16


def test_the_penalty_is_measured_in_a_run(tmp_path):
    for metrics in run_dapo(tmp_path, "algorithm.overlong_buffer=1", "sampling.max_new_tokens=2"):
        assert 0 < metrics["reward/overlong_penalty"] <= 1


def test_a_group_of_one_sample_cannot_be_dynamic(tmp_path):
    with pytest.raises(UserError, match="at least 2"):
        run_dapo(tmp_path, "algorithm.group_size=1")
