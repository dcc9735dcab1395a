"""PPO: advantages from a critic, the penalty in the reward, and the coefficient that adapts."""

import pytest
import torch

from rollstock import Metric, MicroBatch, Totals
from rollstock.algorithms.kl_control import KLController, KLControlOptions
from rollstock.algorithms.policy_loss import token_rewards
from rollstock.algorithms.ppo import PPO, PPOConfig


def test_advantages_and_returns_of_the_known_case(cases, make_batch):
    case = cases["gae"]
    batch = make_batch([[1, 1, 1]], [float(case["rewards"][-1])])
    batch["values"] = torch.tensor([case["values"]])
    found = PPO(PPOConfig(gamma=case["gamma"], lam=case["lambda"], whiten=False)).advantages(batch)
    assert found["advantages"][0].tolist() == pytest.approx(case["advantages"], abs=1e-5)
    assert found["returns"][0].tolist() == pytest.approx(case["returns"], abs=1e-5)


def test_observations_break_no_recursion(cases, make_batch):
    case = cases["gae_over_observations"]
    batch = make_batch([case["action_mask"]], [case["terminal_reward"]])
    batch["values"] = torch.zeros(1, 5)
    advantages = PPO(PPOConfig(gamma=case["gamma"], lam=case["lambda"], whiten=False)).advantages(batch)["advantages"]
    assert advantages[batch.mask].tolist() == pytest.approx(case["right_on_actions"])
    assert advantages[~batch.mask].abs().sum() == 0


def test_the_score_of_an_empty_response_lands_nowhere(cases, make_batch):
    case = cases["empty_response"]
    batch = make_batch([[1] * n for n in case["response_lengths"]], case["rewards"])
    assert token_rewards(batch).tolist() == [[0.0] * 3, [0.0] * 3]
    assert token_rewards(batch)[1].tolist() != case["wrong_token_rewards"]


def test_a_score_lands_on_the_last_action_token_and_step_rewards_are_added(make_batch):
    batch = make_batch([[1, 0, 1, 0]], [2.0])
    assert token_rewards(batch).tolist() == [[0.0, 0.0, 2.0, 0.0]]
    batch["step_rewards"] = torch.tensor([[0.5, 9.0, 0.25, 9.0]])
    assert token_rewards(batch).tolist() == [[0.5, 0.0, 2.25, 0.0]]


def test_whitened_advantages_have_mean_zero_over_action_tokens_alone(make_batch):
    batch = make_batch([[1, 0, 1], [1, 1]], [1.0, -1.0])
    batch["values"] = torch.zeros(2, 3)
    advantages = PPO().advantages(batch)["advantages"]
    assert float(advantages[batch.mask].mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(advantages[batch.mask].std()) == pytest.approx(1.0, abs=1e-4)
    assert float(advantages[~batch.mask].abs().sum()) == 0


def test_the_kl_penalty_is_in_the_reward_of_every_token(make_batch):
    algorithm = PPO(PPOConfig(kl_reward_coef=0.1, lam=1.0, whiten=False))
    assert algorithm.needed_columns() == {"old_logprobs", "ref_logprobs", "values"}
    assert algorithm.early_columns() == {"old_logprobs"}
    batch = make_batch([[1, 1]], [1.0])
    batch["values"], batch["ref_logprobs"] = torch.zeros(1, 2), torch.zeros(1, 2)
    batch["old_logprobs"] = torch.tensor([[1.0, 2.0]])
    advantages = algorithm.advantages(batch)["advantages"]
    assert advantages[0].tolist() == pytest.approx([1.0 - 0.3, 1.0 - 0.2])


def test_the_value_loss_is_clipped_around_the_values_before_the_update(make_batch):
    batch = make_batch([[1, 1]], [0.0])
    batch["values"], batch["returns"] = torch.zeros(1, 2), torch.tensor([[1.0, 1.0]])
    values = torch.tensor([[0.5, 0.1]], requires_grad=True)
    micro = MicroBatch(batch, Totals.of(batch, response_limit=2), {"values": values})
    loss = PPO(PPOConfig(value_coef=2.0)).critic_loss(micro)
    assert float(loss.value.detach()) == pytest.approx(2 * (0.5 * 0.8**2 + 0.5 * 0.9**2) / 2)
    assert loss.metrics["critic/vf_clipfrac"].value == 0.5
    loss.value.backward()
    assert values.grad.tolist() == [[0.0, pytest.approx(-0.9)]]


def test_the_horizon_controller_moves_by_the_relative_error(cases):
    case = cases["adaptive_kl_horizon"]
    options = {"kl_reward_coef": case["init"], "kl_target": case["target"], "kl_horizon": case["horizon"]}
    for key, kl in (("update(kl=12, steps=256)", 12), ("update(kl=3, steps=256)", 3)):
        controller = KLController(KLControlOptions(kl_control="horizon", **options))
        if kl == 3:
            controller.update(12, 256)
        controller.update(kl, 256)
        assert controller.coefficient == pytest.approx(case[key], rel=1e-6)


def test_the_ratio_controller_is_the_measured_kl_over_its_target_at_most_one():
    controller = KLController(KLControlOptions(kl_control="ratio", kl_reward_coef=0.1, kl_target=4.0))
    assert controller.coefficient == 0.1
    for kl, expected in ((1.0, 0.25), (8.0, 1.0), (-1.0, 0.0)):
        controller.update(kl, 8)
        assert controller.coefficient == expected


def test_the_coefficient_survives_a_restart(make_batch):
    algorithm = PPO(PPOConfig(kl_reward_coef=0.1, kl_control="ratio", kl_target=4.0))
    batch = make_batch([[1, 1]], [1.0])
    batch["old_logprobs"], batch["ref_logprobs"] = torch.tensor([[1.0, 1.0]]), torch.zeros(1, 2)
    metrics = algorithm.after_update(batch, {"actor/pg_loss": Metric(0.0)})
    assert metrics["actor/kl_reward"].value == 2.0
    assert metrics["actor/kl_coef"].value == 0.5
    again = PPO(algorithm.config)
    again.load_state(algorithm.state())
    assert again.kl_controller.coefficient == 0.5


def test_on_a_shared_backbone_the_value_loss_is_added_to_the_policys(make_batch):
    batch = make_batch([[1, 1], [1, 0]], [1.0, 0.0])
    batch["values"], batch["returns"] = torch.zeros(2, 2), torch.tensor([[1.0, 0.5], [0.0, 0.0]])
    batch["old_logprobs"] = torch.full((2, 2), -1.0)
    batch["advantages"] = torch.tensor([[1.0, -1.0], [0.5, 0.0]])
    options = {"value_coef": 0.5, "entropy_coef": 0.1}
    shared, apart = PPO(PPOConfig(shared_backbone=True, **options)), PPO(PPOConfig(**options))
    assert (shared.actor_head(), apart.actor_head()) == ("lm+value", "lm")
    assert shared.training_outputs() == {"logprobs", "entropy", "values"}
    assert apart.training_outputs() == {"logprobs", "entropy"}
    outputs = {
        "logprobs": torch.tensor([[-0.9, -1.2], [-1.0, -1.0]], requires_grad=True),
        "entropy": torch.full((2, 2), 2.0),
        "values": torch.tensor([[0.1, 0.2], [0.4, 9.0]], requires_grad=True),
    }
    totals = Totals.of(batch, response_limit=2)
    both = shared.loss(MicroBatch(batch, totals, outputs))
    policy = apart.loss(MicroBatch(batch, totals, outputs))
    values = apart.critic_loss(MicroBatch(batch, totals, {"values": outputs["values"]}))
    assert both.value.item() == pytest.approx((policy.value + values.value).item())
    assert both.metrics == {**policy.metrics, **values.metrics}
    both.value.backward()
    assert outputs["values"].grad[0].tolist() == pytest.approx([0.5 * (0.1 - 1.0) / 3, 0.5 * (0.2 - 0.5) / 3])
    assert outputs["values"].grad[1, 1] == 0
    assert outputs["logprobs"].grad[0].abs().min() > 0
