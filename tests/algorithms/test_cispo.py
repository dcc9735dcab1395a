"""CISPO: the clipped ratio is a weight, so that no token loses its gradient."""

import pytest
import torch

from rollstock.algorithms.cispo import CISPO, CISPOConfig


def test_the_known_case(cases, make_batch, make_micro):
    case = cases["cispo"]
    logprobs = torch.tensor([case["logprobs"]])
    micro = make_micro(
        make_batch([[1] * 4], [0.0]),
        logprobs,
        old_logprobs=logprobs.detach() - torch.tensor([case["ratios"]]).log(),
        advantages=torch.tensor([case["advantages"]]),
    )
    loss = CISPO(CISPOConfig(clip=case["eps_low"], clip_high=case["eps_high"])).loss(micro)
    assert float(loss.value.detach()) == pytest.approx(sum(case["loss"]) / 4, abs=1e-5)
    assert loss.metrics["actor/pg_clipfrac"].value == 0.5
    loss.value.backward()
    weights = [min(max(ratio, 0.8), 1.28) for ratio in case["ratios"]]
    expected = [-w * a / 4 for w, a in zip(weights, case["advantages"], strict=True)]
    assert logprobs.grad[0].tolist() == pytest.approx(expected)


def test_by_default_weights_are_bounded_above_only(make_batch, make_micro):
    logprobs = torch.tensor([[-9.0, 9.0]])
    micro = make_micro(
        make_batch([[1, 1]], [0.0]), logprobs, old_logprobs=torch.zeros(1, 2), advantages=torch.ones(1, 2)
    )
    CISPO().loss(micro).value.backward()
    assert logprobs.grad[0].tolist() == pytest.approx([-torch.tensor(-9.0).exp().item() / 2, -5.0 / 2])


def test_a_null_upper_range_is_as_wide_as_the_lower():
    assert CISPOConfig(clip=0.3, clip_high=None).upper == 0.3
