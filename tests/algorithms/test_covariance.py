"""Clip-Cov and KL-Cov: which tokens are held back is decided over the whole batch, and what then becomes of them."""

import math

import pytest
import torch

from rollstock import MicroBatch, Totals
from rollstock.algorithms.clip_cov import ClipCov, ClipCovConfig, lottery
from rollstock.algorithms.covariance import largest, token_covariance
from rollstock.algorithms.kl_cov import KLCov, KLCovConfig


def batch_of(make_batch, logprobs, scores, masks=None):
    batch = make_batch(masks or [[1] * len(row) for row in logprobs], scores)
    batch["old_logprobs"] = torch.tensor(logprobs)
    return batch


def test_the_shares_average_to_the_covariance_of_action_tokens():
    generator = torch.Generator().manual_seed(0)
    logprobs, advantages = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=generator) < 0.7
    shares = token_covariance(torch.where(mask, logprobs, math.nan), torch.where(mask, advantages, 1e9), mask)
    assert (shares[~mask] == -math.inf).all()
    together = torch.stack([logprobs[mask], advantages[mask]])
    assert float(shares[mask].mean()) == pytest.approx(float(torch.cov(together, correction=0)[0, 1]))


def test_the_largest_are_chosen_and_never_a_masked_one():
    values = torch.tensor([[1.0, -math.inf, 3.0], [2.0, -math.inf, -math.inf]])
    assert largest(values, 2).tolist() == [[False, False, True], [True, False, False]]
    assert largest(values, 9).tolist() == [[True, False, True], [True, False, False]]
    assert largest(torch.zeros(2, 0), 1).shape == (2, 0)


class TestKLCov:
    def test_the_highest_covariance_is_held_back(self, make_batch):
        # A likely token with a good reward, and an unlikely one with a bad reward, are what entropy falls through.
        batch = batch_of(make_batch, [[-0.1, -3.0], [-0.2, -5.0]], [1.0, 0.0])
        found = KLCov(KLCovConfig(fraction=0.5)).advantages(batch)
        assert found["held_back"].tolist() == [[True, False], [False, True]]
        assert found["advantages"][:, 0].tolist() == pytest.approx([0.7071, -0.7071], abs=1e-4)

    def test_equal_rewards_hold_nothing_back(self, make_batch):
        batch = batch_of(make_batch, [[-0.1, -3.0], [-0.2, -5.0]], [1.0, 1.0])
        assert not KLCov(KLCovConfig(fraction=0.5)).advantages(batch)["held_back"].any()

    def test_one_token_is_held_back_at_least_and_masked_ones_never(self, make_batch):
        batch = batch_of(make_batch, [[-0.1, -3.0], [-9.0, 0.0]], [1.0, 0.0], masks=[[1, 1], [0, 1]])
        held = KLCov().advantages(batch)["held_back"]
        assert held.sum() == 1
        assert not held[1, 0]
        only_observations = batch_of(make_batch, [[-0.1, -3.0]], [1.0], masks=[[0, 0]])
        assert not KLCov().advantages(only_observations)["held_back"].any()

    @pytest.mark.parametrize(("kind", "penalty", "slope"), [("abs", 0.3, 1.0), ("k2", 0.045, 0.3)])
    def test_the_penalty_is_on_the_held_tokens_and_nothing_is_clipped(
        self, make_batch, make_micro, kind, penalty, slope
    ):
        logprobs = torch.tensor([[-0.7, -0.7, 2.0]], dtype=torch.float64)
        micro = make_micro(
            make_batch([[1, 1, 1]], [0.0]),
            logprobs,
            old_logprobs=torch.full((1, 3), -1.0, dtype=torch.float64),
            advantages=torch.ones(1, 3),
            held_back=torch.tensor([[True, False, False]]),
        )
        loss = KLCov(KLCovConfig(cov_coef=0.5, cov_kind=kind)).loss(micro)
        near, far = math.exp(0.3), math.exp(3.0)
        assert float(loss.value.detach()) == pytest.approx((-2 * near - far + 0.5 * penalty) / 3)
        assert loss.metrics["actor/held_back"].value == pytest.approx(1 / 3)
        loss.value.backward()
        assert logprobs.grad[0].tolist() == pytest.approx([(-near + 0.5 * slope) / 3, -near / 3, -far / 3])


LOGPROBS = [[-0.1] * 6 + [-9.0] * 6, [-0.1] * 6 + [-9.0] * 6]


class TestClipCov:
    def test_tokens_between_the_bounds_are_drawn(self, make_batch):
        # Deviations are 4.45 and 0.7: half of the tokens have a covariance of 3.1, the others of -3.1.
        batch = batch_of(make_batch, LOGPROBS, [1.0, 0.0])
        held = ClipCov(ClipCovConfig(fraction=0.25)).advantages(batch)["held_back"]
        assert held.sum() == 6
        assert not held[0, 6:].any()
        assert not held[1, :6].any()
        assert not ClipCov(ClipCovConfig(fraction=0.25, cov_high=3.0)).advantages(batch)["held_back"].any()
        assert not ClipCov(ClipCovConfig(fraction=0.25, cov_low=3.3)).advantages(batch)["held_back"].any()

    def test_equal_rewards_hold_nothing_back(self, make_batch):
        batch = batch_of(make_batch, LOGPROBS, [1.0, 1.0])
        assert not ClipCov(ClipCovConfig(fraction=1.0)).advantages(batch)["held_back"].any()

    def test_the_draw_does_not_depend_on_the_order_of_trajectories_nor_on_rounding(self, make_batch):
        batch = batch_of(make_batch, LOGPROBS, [1.0, 0.0])
        batch["response"] = torch.stack([torch.arange(12), torch.arange(12).flip(0)])
        algorithm = ClipCov(ClipCovConfig(fraction=0.25))
        held = algorithm.advantages(batch)["held_back"]
        turned = batch.select([1, 0])
        turned["old_logprobs"] = turned.old_logprobs + 1e-6
        assert torch.equal(algorithm.advantages(turned)["held_back"], held.flip(0))

    def test_the_draw_differs_between_policies_and_is_spread_evenly(self, make_batch):
        batch = make_batch([[1, 0] * 2000], [1.0])
        every = torch.tensor([True])
        first = lottery(batch, every)
        assert torch.equal(first, lottery(batch, every))
        assert (first[~batch.mask] == 0).all()
        drawn = first[batch.mask]
        assert 0.45 < float(drawn.mean()) < 0.55
        assert len(drawn.unique()) > 1900
        batch["versions"] = batch.versions + 1
        assert not torch.equal(lottery(batch, every), first)

    def test_held_tokens_have_neither_loss_nor_gradient_and_still_count(self, make_batch, make_micro):
        logprobs = torch.tensor([[0.0, 0.1, 1.0]], dtype=torch.float64)
        micro = make_micro(
            make_batch([[1, 1, 1]], [0.0]),
            logprobs,
            old_logprobs=torch.zeros(1, 3),
            advantages=torch.ones(1, 3),
            held_back=torch.tensor([[True, False, False]]),
        )
        loss = ClipCov().loss(micro)
        assert float(loss.value.detach()) == pytest.approx((-math.exp(0.1) - 1.2) / 3)
        loss.value.backward()
        assert logprobs.grad[0].tolist() == pytest.approx([0.0, -math.exp(0.1) / 3, 0.0])
        assert loss.metrics["actor/pg_clipfrac"].value == pytest.approx(1 / 3)

    def test_bounds_in_the_wrong_order_are_refused(self):
        with pytest.raises(ValueError, match=r"cov_low \(5.0\) must be below cov_high \(1.0\)"):
            ClipCovConfig(cov_low=5.0, cov_high=1.0)


@pytest.mark.parametrize("algorithm", [ClipCov(ClipCovConfig(fraction=0.3)), KLCov(KLCovConfig(fraction=0.3))])
def test_slices_have_the_gradient_of_the_whole_although_a_slice_alone_would_choose_otherwise(make_batch, algorithm):
    generator = torch.Generator().manual_seed(4)
    old = -4 * torch.rand(4, 5, generator=generator)
    batch = batch_of(make_batch, old.tolist(), [1.0, 0.0, 0.0, 1.0])
    for name, value in algorithm.advantages(batch).items():
        batch[name] = value
    totals = Totals.of(batch, response_limit=5)
    logprobs = old + 0.1 * torch.randn(4, 5, generator=generator)
    found = []
    for cuts in ([[0, 1, 2, 3]], [[3], [0, 2], [1]]):
        leaf = logprobs.clone().requires_grad_()
        for rows in cuts:
            algorithm.loss(MicroBatch(batch.select(rows), totals, {"logprobs": leaf[rows]})).value.backward()
        found.append(leaf.grad)
    torch.testing.assert_close(found[0], found[1])
    alone = [algorithm.advantages(batch.select([row]))["held_back"][0].tolist() for row in range(4)]
    assert alone != batch.held_back.tolist()
