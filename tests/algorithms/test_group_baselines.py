"""Baselines from a group: Dr. GRPO, RLOO, OPO, GPG and REINFORCE++-baseline, against numbers worked out by hand."""

import pytest
import torch

from rollstock import MicroBatch, Totals
from rollstock.algorithms.dr_grpo import DrGRPO
from rollstock.algorithms.gpg import GPG, GPGConfig
from rollstock.algorithms.group_relative import has_spread
from rollstock.algorithms.grpo import GRPO
from rollstock.algorithms.opo import OPO, length_weighted_mean
from rollstock.algorithms.reinforce_pp_baseline import ReinforcePPBaseline, ReinforcePPBaselineConfig
from rollstock.algorithms.rloo import RLOO


@pytest.mark.parametrize(("kind", "key"), [(DrGRPO, "no_std"), (RLOO, "rloo"), (GRPO, "grpo_unbiased_std")])
def test_a_group_of_eight_with_three_correct(cases, make_batch, kind, key):
    right, wrong = cases["group_of_8_with_3_correct"][key]
    advantages = kind().advantages(make_batch([[1, 1]] * 8, [1.0] * 3 + [0.0] * 5))
    assert torch.allclose(advantages, torch.tensor([[right] * 2] * 3 + [[wrong] * 2] * 5), atol=1e-4)


def test_a_group_of_four_with_three_correct_is_divided_by_its_own_deviation(cases, make_batch):
    case = cases["group_1110"]
    advantages = GRPO().advantages(make_batch([[1]] * 4, [float(r) for r in case["rewards"]]))
    assert advantages[:, 0].tolist() == pytest.approx(case["grpo_unbiased_std"], abs=1e-6)


def test_groups_do_not_mix(make_batch):
    batch = make_batch([[1]] * 4, [1.0, 4.0, 0.0, 2.0], groups=[3, 8, 3, 8])
    assert DrGRPO().advantages(batch)[:, 0].tolist() == [0.5, 1.0, -0.5, -1.0]
    assert RLOO().advantages(batch)[:, 0].tolist() == [1.0, 2.0, -1.0, -2.0]


def test_the_loss_of_dr_grpo_is_divided_by_the_length_limit_and_not_by_the_length(make_batch):
    batch = make_batch([[1], [1, 1, 1]], [1.0, 0.0])
    batch["advantages"] = DrGRPO().advantages(batch)
    micro = MicroBatch(batch, Totals.of(batch, response_limit=10), {"logprobs": torch.zeros(2, 3, requires_grad=True)})
    assert float(DrGRPO().loss(micro).value.detach()) == pytest.approx((-0.5 * 1 + 0.5 * 3) / (2 * 10))


@pytest.mark.parametrize("kind", [RLOO, OPO])
def test_a_response_is_one_action_whose_log_probs_are_summed(make_batch, kind):
    batch = make_batch([[1], [1, 1, 1]], [1.0, 0.0])
    batch["advantages"] = torch.where(batch.mask, torch.tensor([[2.0], [-1.0]]), 0.0)
    logprobs = torch.zeros(2, 3, requires_grad=True)
    kind().loss(MicroBatch(batch, Totals.of(batch, response_limit=10), {"logprobs": logprobs})).value.backward()
    assert logprobs.grad.tolist() == [[-1.0, 0.0, 0.0], [0.5, 0.5, 0.5]]


def test_opo_weights_the_mean_by_the_lengths(make_batch):
    batch = make_batch([[1], [1, 1, 1], [1, 0]], [1.0, 0.0, 0.5], groups=[0, 0, 1])
    # baseline of the first group: (1 * 1 + 3 * 0) / 4; observations do not count as length
    assert OPO().advantages(batch)[:2].tolist() == [[0.75, 0.0, 0.0], [-0.25, -0.25, -0.25]]


def test_opo_minimises_the_variance_of_what_it_is_derived_from():
    scores, lengths = torch.tensor([1.0, 0.0, 0.0, 0.5]), torch.tensor([5, 1, 2, 8])
    found = length_weighted_mean(scores, torch.zeros(4, dtype=torch.int64), lengths)[0]
    tried = torch.linspace(-0.5, 1.5, 401)
    spread = (lengths * (scores - tried[:, None]).square()).sum(dim=1)
    assert float(tried[spread.argmin()]) == pytest.approx(float(found), abs=0.005)


def test_in_a_group_of_empty_responses_each_is_its_own_baseline():
    groups = torch.tensor([0, 0, 1])
    means = length_weighted_mean(torch.tensor([1.0, 0.0, 2.0]), groups, torch.tensor([0, 0, 4]))
    assert means.tolist() == [1.0, 0.0, 2.0]


def test_gpg_makes_up_for_groups_that_add_no_gradient(make_batch):
    scores = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    batch = make_batch([[1]] * 6, scores, groups=[0, 0, 1, 1, 2, 2])
    assert GPG().advantages(batch)[:, 0].tolist() == pytest.approx([1.5, -1.5, 0.0, 0.0, 0.0, 0.0])
    by_scores = GPG(GPGConfig(correction="zero_scores")).advantages(batch)
    assert by_scores[:, 0].tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0, 0.0, 0.0])  # 6 samples over 3 that score
    plain = GPG(GPGConfig(correction="none")).advantages(batch)
    assert plain[:, 0].tolist() == pytest.approx([0.5, -0.5, 0.0, 0.0, 0.0, 0.0])


def test_gpg_scales_a_lone_raw_score_as_well(make_batch):
    batch = make_batch([[1]] * 4, [1.0, 0.0, 0.5, 0.5], groups=[0, 0, 1, 2])
    advantages = GPG(GPGConfig(lone="raw")).advantages(batch)
    assert advantages[:, 0].tolist() == pytest.approx([1.0, -1.0, 1.0, 1.0])


def test_the_loss_of_gpg_is_the_policy_gradient_whatever_the_ratio(make_batch):
    batch = make_batch([[1, 1], [1, 0]], [1.0, 0.0])
    batch["advantages"] = GPG().advantages(batch)
    batch["old_logprobs"] = torch.full((2, 2), -9.0)
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, 7.0]], requires_grad=True)
    loss = GPG().loss(MicroBatch(batch, Totals.of(batch, response_limit=2), {"logprobs": logprobs}))
    assert float(loss.value.detach()) == pytest.approx((0.5 + 1.0 - 1.5) / 3)
    loss.value.backward()
    assert logprobs.grad.flatten().tolist() == pytest.approx([-1 / 6, -1 / 6, 1 / 6, 0.0])


def test_reinforce_pp_baseline_scales_by_the_batch_and_not_by_the_group(make_batch):
    batch = make_batch([[1]] * 4, [1.0, 0.0, 0.6, 0.4], groups=[0, 0, 1, 1])
    # centred: 0.5, -0.5, 0.1, -0.1; their variance is 0.52 / 3
    scaled = [x / (0.52 / 3) ** 0.5 for x in (0.5, -0.5, 0.1, -0.1)]
    assert ReinforcePPBaseline().advantages(batch)[:, 0].tolist() == pytest.approx(scaled, abs=1e-5)
    centred = ReinforcePPBaseline(ReinforcePPBaselineConfig(whiten=False)).advantages(batch)
    assert centred[:, 0].tolist() == pytest.approx([0.5, -0.5, 0.1, -0.1])


def test_reinforce_pp_baseline_keeps_near_the_reference_by_k2():
    assert ReinforcePPBaseline().config.kl_kind == "k2"


def test_a_group_has_spread_if_any_of_its_scores_differs():
    scores = torch.tensor([0.5, 0.5, 0.5, 0.0, 1.0, 0.3])
    assert has_spread(scores, torch.tensor([7, 7, 2, 2, 5, 9])).tolist() == [False, False, True, True, False, False]
    assert has_spread(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []
