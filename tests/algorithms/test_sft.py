"""SFT: the cross-entropy of demonstrations."""

import math

import pytest
import torch

from rollstock import Batch, Metric, MicroBatch, Totals
from rollstock.algorithms.sft import SFT, SFTConfig


def micro(batch: Batch, logprobs, totals=None):
    batch["advantages"] = SFT().advantages(batch)
    return MicroBatch(batch, totals or Totals.of(batch, response_limit=4), {"logprobs": logprobs})


def test_a_demonstration_has_an_advantage_of_one_on_every_token_of_its_own(make_batch):
    batch = make_batch([[1, 0, 1], [1], []], [1.0, 1.0, 1.0], groups=[0, 1, 2])
    assert SFT().advantages(batch).tolist() == [[1, 0, 1], [1, 0, 0], [0, 0, 0]]


def test_the_loss_is_minus_the_mean_log_prob_of_the_response_tokens(make_batch):
    batch = make_batch([[1, 1, 0], [1]], [1.0, 1.0], groups=[0, 1])
    logprobs = torch.tensor([[-1.0, -2.0, -50.0], [-6.0, 0.0, 0.0]], requires_grad=True)
    loss = SFT().loss(micro(batch, logprobs))
    assert float(loss.value.detach()) == pytest.approx(3.0)
    assert loss.metrics["actor/loss"] == Metric(3.0, 1.0)
    assert loss.metrics["actor/nll"] == Metric(3.0, 3)
    loss.value.backward()
    third = pytest.approx(-1 / 3)
    assert logprobs.grad.tolist() == [[third, third, 0.0], [third, 0.0, 0.0]]


def test_each_demonstration_counts_alike_if_that_is_asked_for(make_batch):
    batch = make_batch([[1, 1, 1], [1]], [1.0, 1.0], groups=[0, 1])
    logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-6.0, 0.0, 0.0]])
    loss = SFT(SFTConfig(aggregation="seq_mean_token_mean")).loss(micro(batch, logprobs))
    assert float(loss.value) == pytest.approx((2.0 + 6.0) / 2)
    assert loss.metrics["actor/nll"].value == pytest.approx(3.0)  # of tokens, whatever the loss averages


def test_its_gradient_on_logits_is_that_of_the_cross_entropy(make_batch):
    torch.manual_seed(0)
    batch = make_batch([[1, 1, 1], [1, 1]], [1.0, 1.0], groups=[0, 1])
    targets = torch.tensor([[0, 3, 2], [1, 4, 0]])
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    (ours,) = torch.autograd.grad(SFT().loss(micro(batch, logprobs)).value, logits)
    mask = batch.mask
    expected = torch.nn.functional.cross_entropy(logits[mask], targets[mask])
    (theirs,) = torch.autograd.grad(expected, logits)
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-15)


def test_the_perplexity_of_a_step_is_that_of_all_its_tokens():
    batch = None
    assert SFT().after_update(batch, {"actor/nll": Metric(1.5, 10)})["actor/perplexity"].value == math.exp(1.5)
    assert SFT().after_update(batch, {}) == {}
    assert math.isfinite(SFT().after_update(batch, {"actor/nll": Metric(1e6, 1)})["actor/perplexity"].value)


def test_it_is_offline_and_takes_one_response_of_each_task():
    assert SFT.offline
    assert not SFT.whole_groups
    assert SFT().samples_per_prompt == 1
    assert SFT().needed_columns() == frozenset()
