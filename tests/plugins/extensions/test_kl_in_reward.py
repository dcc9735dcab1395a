"""KL in the reward: what is charged where, how the coefficient adapts, and what is refused."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from rollstock import ConfigError
from rollstock.algorithms.policy_loss import token_rewards
from rollstock.launch import resume
from rollstock.manager import make_manager
from rollstock.plugins.extensions.kl_in_reward import KLInReward, KLInRewardConfig


@pytest.fixture
def batch(ratio_batch):
    """Log-ratios to the reference of +1 and -0.5, then of +2 beside an observation, then no token."""
    made = ratio_batch([1.0, 1.0], [1.0, None], [], scores=[1.0, 0.0, 3.0])
    made.set_flat("ref_logprobs", made.flat("old_logprobs") - torch.tensor([1.0, -0.5, 2.0, 7.0]))
    return made


def charge(stages, stand_in, batch, *, by_token, **options):
    run = stand_in(algorithm=SimpleNamespace(reads_step_rewards=by_token))
    call = stages(run, {"name": "kl_in_reward", **options})
    return call("advantages", batch), run, call.extensions[0]


def test_an_algorithm_that_reads_rewards_of_tokens_is_charged_token_by_token(stages, stand_in, batch):
    seen, run, _ = charge(stages, stand_in, batch, by_token=True, coef=0.1)
    assert seen["step_rewards"].tolist() == [pytest.approx([-0.1, 0.05]), pytest.approx([-0.2, 0.0]), [0.0, 0.0]]
    assert seen["scores"].tolist() == [1.0, 0.0, 3.0]
    assert run.value("actor/kl_reward") == pytest.approx((0.5 + 2.0 + 0.0) / 3)
    assert not bool(batch.step_rewards.any())  # the charge is there for the stage alone


def test_rewards_of_steps_that_were_there_stay(stages, stand_in, batch):
    batch["step_rewards"] = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    seen, _, _ = charge(stages, stand_in, batch, by_token=True, coef=0.1)
    assert seen["step_rewards"][0].tolist() == pytest.approx([-0.1, 1.05])
    assert batch.step_rewards[0].tolist() == [0.0, 1.0]


def test_an_algorithm_that_knows_scores_alone_is_charged_the_sum(stages, stand_in, batch):
    seen, _, _ = charge(stages, stand_in, batch, by_token=False, coef=0.1)
    assert seen["scores"].tolist() == pytest.approx([0.95, -0.2, 3.0])
    assert batch.scores.tolist() == [1.0, 0.0, 3.0]
    assert "step_rewards" not in batch


@pytest.mark.parametrize(
    ("kind", "of_first"),
    [("k1", 0.5), ("k2", 0.5 + 0.125), ("abs", 1.5), ("k3", math.exp(-1) + math.exp(0.5) - 2 + 0.5)],
)
def test_any_estimator(stages, stand_in, batch, kind, of_first):
    seen, run, _ = charge(stages, stand_in, batch, by_token=False, coef=1.0, kind=kind)
    assert float(seen["scores"][0]) == pytest.approx(1.0 - of_first)
    assert run.value("actor/kl_reward") == pytest.approx(2.5 / 3)  # what is measured is k1, whatever is charged


@pytest.mark.parametrize(
    ("control", "expected"),
    [
        ("fixed", 0.1),
        ("horizon", 0.1 * (1 - 1 / 6 * 3 / 30)),  # measured 2.5 / 3, target 1, 3 samples of a horizon of 30
        ("ratio", 2.5 / 3),
    ],
)
def test_controllers(stages, stand_in, batch, control, expected):
    _, run, extension = charge(
        stages, stand_in, batch, by_token=False, coef=0.1, control=control, target=1.0, horizon=30.0
    )
    assert extension.coefficient == pytest.approx(expected, rel=1e-6)
    assert run.value("actor/kl_coef") == extension.coefficient
    other = KLInReward(KLInRewardConfig(coef=0.1))
    other.load_state(json.loads(json.dumps(extension.state())))
    assert other.coefficient == extension.coefficient


def test_the_score_lands_on_the_last_token_and_the_charge_on_each(stages, stand_in, batch):
    seen, _, _ = charge(stages, stand_in, batch, by_token=True, coef=0.1)
    batch["step_rewards"] = seen["step_rewards"]
    assert token_rewards(batch)[0].tolist() == pytest.approx([-0.1, 1.05])


def test_a_penalty_that_the_algorithm_takes_already_is_refused(tmp_path, steps_of_run):
    algorithm = {"name": "ppo", "kl_reward_coef": 0.1}
    with pytest.raises(ConfigError) as caught:
        steps_of_run("run", algorithm=algorithm, extensions=["kl_in_reward"])
    assert str(caught.value) == (
        "extension 'kl_in_reward': algorithm.kl_reward_coef: 0.1 makes 'ppo' take a KL penalty off the reward itself, "
        "so it would be taken twice: set that to 0, or leave this extension out"
    )
    assert not (tmp_path / "run").exists()


def test_a_coefficient_of_0_is_refused():
    with pytest.raises(ConfigError, match="takes nothing off any reward"):
        make_manager().create("extension", {"name": "kl_in_reward", "coef": 0})


def test_an_offline_algorithm_is_refused():
    assert "leave it out" in KLInReward().validate(None, SimpleNamespace(offline=True))[0]


def test_ppo_is_charged_as_by_its_own_option(steps_of_run):
    own = steps_of_run(
        "own",
        algorithm={"name": "ppo", "group_size": 4, "kl_reward_coef": 0.5, "kl_control": "ratio", "kl_target": 0.1},
    )
    extension = {"name": "kl_in_reward", "coef": 0.5, "control": "ratio", "target": 0.1}
    charged = steps_of_run("charged", algorithm={"name": "ppo", "group_size": 4}, extensions=[extension])
    for mine, theirs in zip(own, charged, strict=True):
        for name in ("actor/kl_reward", "actor/kl_coef", "actor/pg_loss", "critic/vf_loss", "critic/returns/mean"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-5, abs=1e-7), name
    assert charged[1]["actor/kl_coef"] > 0


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_same_coefficient(steps_of_run, tmp_path):
    sections = {"extensions": [{"name": "kl_in_reward", "coef": 0.1, "control": "ratio", "target": 5.0}]}
    overrides = ["train.steps=3", "checkpoint.every_steps=1"]
    whole = steps_of_run("whole", *overrides, **sections)
    steps_of_run("other", *overrides, **sections)
    resume(tmp_path / "other", step=1)
    rows = [json.loads(line) for line in (tmp_path / "other" / "metrics.jsonl").read_text().splitlines()]
    again = [row["metrics"] for row in rows if "metrics" in row]
    for name in ("actor/kl_coef", "actor/kl_reward", "actor/pg_loss"):
        assert [metrics[name] for metrics in again] == [metrics[name] for metrics in whole]
    assert len({metrics["actor/kl_coef"] for metrics in whole}) == 3
