"""REINFORCE++: returns over the whole batch, and the KL penalty that is in them."""

import pytest
import torch

from rollstock.algorithms.reinforce_pp import ReinforcePP, ReinforcePPConfig


def test_returns_are_discounted_and_scaled_over_all_tokens(make_batch):
    batch = make_batch([[1, 1], [1]], [1.0, 0.0])
    advantages = ReinforcePP(ReinforcePPConfig(gamma=0.5)).advantages(batch)
    returns = torch.tensor([0.5, 1.0, 0.0])
    scaled = (returns - returns.mean()) / returns.std()
    assert advantages[batch.mask].tolist() == pytest.approx(scaled.tolist(), abs=1e-5)
    assert advantages[1, 1] == 0


def test_one_sample_a_prompt_is_enough():
    assert ReinforcePP().samples_per_prompt == 1


def test_the_penalty_of_a_token_is_in_its_return_and_those_before(make_batch):
    algorithm = ReinforcePP(ReinforcePPConfig(kl_reward_coef=0.1))
    assert algorithm.needed_columns() == {"old_logprobs", "ref_logprobs"}
    assert algorithm.early_columns() == {"old_logprobs"}
    batch = make_batch([[1, 1], [1, 1]], [1.0, 0.0])
    batch["ref_logprobs"] = torch.zeros(2, 2)
    batch["old_logprobs"] = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    returns = torch.tensor([1 - 0.3, 1 - 0.2, 0.0, 0.0])
    scaled = (returns - returns.mean()) / returns.std()
    assert algorithm.advantages(batch).flatten().tolist() == pytest.approx(scaled.tolist(), abs=1e-5)


def test_its_coefficient_adapts_and_survives_a_restart(make_batch):
    algorithm = ReinforcePP(ReinforcePPConfig(kl_reward_coef=0.1, kl_control="ratio", kl_target=4.0))
    batch = make_batch([[1, 1]], [1.0])
    batch["old_logprobs"], batch["ref_logprobs"] = torch.ones(1, 2), torch.zeros(1, 2)
    assert algorithm.after_update(batch, {})["actor/kl_coef"].value == 0.5
    again = ReinforcePP(algorithm.config)
    again.load_state(algorithm.state())
    assert again.kl_controller.coefficient == 0.5


def test_without_a_penalty_nothing_is_measured(make_batch):
    assert ReinforcePP().after_update(make_batch([[1]], [1.0]), {}) == {}
