"""A loss gives the same value, gradient and metrics however its batch was cut."""

import itertools

import pytest
import torch

from rollstock import Batch, MicroBatch, RunError, Totals, Trajectory, merge_metrics

MODES = ["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


def make(lengths, masked=()):
    rows = []
    for i, n in enumerate(lengths):
        mask = torch.ones(n, dtype=torch.bool)
        for row, place in masked:
            if row == i:
                mask[place] = False
        rows.append(
            Trajectory(
                prompt=torch.tensor([1]),
                response=torch.zeros(n, dtype=torch.int64),
                action_mask=mask,
                rollout_logprobs=torch.zeros(n),
                versions=torch.zeros(n, dtype=torch.int64),
                group=i,
            )
        )
    return Batch.from_trajectories(rows)


def run(batch, cuts, mode, logprobs):
    totals = Totals.of(batch, response_limit=7)
    logprobs = logprobs.clone().requires_grad_()
    parts, value = [], 0.0
    places = torch.arange(batch.num_tokens).split(batch.lengths.tolist())
    for cut in cuts:
        part = batch.select(cut)
        flat = logprobs[torch.cat([places[i] for i in cut])]
        micro = MicroBatch(part, totals, {"logprobs": part.pad(flat)})
        loss = micro.loss(micro.logprobs.square(), {"x": micro.mean(micro.logprobs)}, mode=mode)
        loss.value.backward()
        value += float(loss.value.detach())
        parts.append(loss.metrics)
    return value, logprobs.grad, merge_metrics(parts)


@pytest.mark.parametrize("mode", MODES)
def test_slices_add_up_to_the_whole(mode):
    batch = make([3, 1, 0, 4], masked=[(3, 1), (1, 0)])
    torch.manual_seed(0)
    logprobs = torch.randn(8, dtype=torch.float64)
    value, gradient, metrics = run(batch, [[0, 1, 2, 3]], mode, logprobs)
    for order in itertools.permutations(range(4)):
        for cuts in ([[i] for i in order], [list(order[:2]), list(order[2:])], [list(order[:3]), list(order[3:])]):
            other, other_gradient, other_metrics = run(batch, cuts, mode, logprobs)
            assert other == pytest.approx(value, abs=1e-12)
            assert torch.allclose(other_gradient, gradient, atol=1e-12)
            for name, metric in metrics.items():
                assert other_metrics[name].value == pytest.approx(metric.value, abs=1e-12), name
    assert float(gradient[3]) == 0.0  # the masked token of trajectory 1


@pytest.mark.parametrize("mode", MODES)
def test_weighted_slices_add_up_to_the_whole(mode):
    batch = make([3, 1, 0, 4], masked=[(3, 1), (1, 0)])
    torch.manual_seed(0)
    logprobs = torch.randn(8, dtype=torch.float64)
    unweighted = run(batch, [[0, 1, 2, 3]], mode, logprobs)[1]
    weights = torch.tensor([0.5, 2.0, 0.0, 7.0, 1.0, 9.0, 0.0, 1.5], dtype=torch.float64)
    batch.set_flat("token_weights", weights)
    value, gradient, metrics = run(batch, [[0, 1, 2, 3]], mode, logprobs)
    assert torch.allclose(gradient, weights * unweighted, atol=1e-12)  # the counts are those of all tokens
    for cuts in ([[3], [2], [1], [0]], [[1, 3], [0, 2]], [[2, 3, 0], [1]]):
        other, other_gradient, other_metrics = run(batch, cuts, mode, logprobs)
        assert other == pytest.approx(value, abs=1e-12)
        assert torch.allclose(other_gradient, gradient, atol=1e-12)
        assert other_metrics["actor/pg_loss"].value == pytest.approx(metrics["actor/pg_loss"].value, abs=1e-12)


def test_weights_of_tokens_are_refused_where_the_loss_is_one_of_whole_groups():
    batch = make([2, 1], masked=[(0, 0)])
    totals = Totals.of(batch, response_limit=7)
    batch.set_flat("token_weights", torch.tensor([0.0, 1.0, 1.0]))  # the 0 stands where nothing is weighed
    assert float(MicroBatch(batch, totals, {}).group_loss(torch.tensor([1.0, 3.0])).value) == 2.0
    batch.set_flat("token_weights", torch.tensor([0.0, 1.0, 0.5]))
    with pytest.raises(RunError, match="`token_weights`, but the loss of this algorithm is one of whole groups"):
        MicroBatch(batch, totals, {}).group_loss(torch.tensor([1.0, 3.0]))


def test_a_mean_of_means_is_not_what_comes_out(cases):
    case = cases["loss_slicing"]
    batch = make([1, 3])
    losses = torch.tensor([10.0, 1.0, 1.0, 1.0]).sqrt()
    value, _, metrics = run(batch, [[0], [1]], "token_mean", losses)
    assert value == pytest.approx(case["right_token_mean"])
    assert metrics["actor/pg_loss"].value == pytest.approx(case["right_token_mean"])


def test_an_entirely_masked_slice_has_no_weight_and_no_nan():
    batch = make([2, 2], masked=[(0, 0), (0, 1)])
    _, gradient, metrics = run(batch, [[0], [1]], "token_mean", torch.ones(4))
    assert gradient.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert metrics["x"].value == 1.0
    assert metrics["actor/pg_loss"].value == 1.0


def test_old_logprobs_that_nobody_computed_are_those_of_the_only_update():
    batch = make([2])
    logprobs = torch.tensor([[0.5, 1.0]], requires_grad=True)
    micro = MicroBatch(batch, Totals.of(batch, response_limit=2), {"logprobs": logprobs})
    assert torch.equal(micro.old_logprobs, logprobs)
    assert not micro.old_logprobs.requires_grad


def test_a_column_that_nobody_provides_is_named():
    batch = make([2])
    micro = MicroBatch(batch, Totals.of(batch, response_limit=2), {"logprobs": torch.zeros(1, 2)})
    with pytest.raises(AttributeError, match="no column 'ref_logprobs'"):
        _ = micro.ref_logprobs
