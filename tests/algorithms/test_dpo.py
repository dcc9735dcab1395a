"""DPO and its relatives: losses of whole batches in closed form, gradients, slices, and options that do nothing."""

import math

import pytest
import torch

from rollstock import Batch, MicroBatch, Totals
from rollstock.algorithms.dpo import DPO, DPOConfig
from rollstock.metrics import metric_values


def micro(algorithm, batch: Batch, logprobs, ref_logprobs, totals=None):
    batch["advantages"] = algorithm.advantages(batch)
    batch["ref_logprobs"] = ref_logprobs
    return MicroBatch(batch, totals or Totals.of(batch, response_limit=4), {"logprobs": logprobs})


@pytest.fixture
def pairs(make_batch):
    """Two pairs of which the second has its chosen response last; with NaN where no token is the policy's."""
    batch = make_batch([[1, 1], [1, 0, 1], [1], [1, 1]], [1.0, 0.0, 0.0, 1.0], groups=[4, 4, 9, 9])
    nan = math.nan
    logprobs = torch.tensor([[-1.0, -0.5, nan], [-2.0, nan, -1.0], [-0.7, nan, nan], [-1.0, -1.5, nan]])
    reference = torch.tensor([[-1.2, -0.9, nan], [-1.5, nan, -1.1], [-1.0, nan, nan], [-1.1, -1.0, nan]])
    return batch, logprobs, reference


# worth of the responses against the reference: 0.6, -0.4; 0.3, -0.4
GAPS = [0.6 + 0.4, -0.4 - 0.3]


def softplus(x):
    return math.log1p(math.exp(x))


def test_the_loss_is_the_mean_over_pairs_of_the_classification_loss(pairs):
    algorithm = DPO(DPOConfig(beta=0.5))
    loss = algorithm.loss(micro(algorithm, *pairs))
    assert float(loss.value) == pytest.approx(sum(softplus(-0.5 * gap) for gap in GAPS) / 2, rel=1e-6)
    assert metric_values(loss.metrics) == pytest.approx(
        {
            "actor/loss": float(loss.value),
            "rewards/chosen": 0.5 * (0.6 - 0.4) / 2,
            "rewards/rejected": 0.5 * (-0.4 + 0.3) / 2,
            "rewards/margins": 0.5 * sum(GAPS) / 2,
            "rewards/accuracies": 0.5,
            "logps/chosen": (-1.5 - 2.5) / 2,
            "logps/rejected": (-3.0 - 0.7) / 2,
        },
        rel=1e-5,
    )


def test_without_a_reference_log_probs_are_compared_as_they_are(pairs):
    algorithm = DPO(DPOConfig(beta=1.0, reference_free=True, average_logprobs=True, margin=0.25))
    assert algorithm.needed_columns() == frozenset()
    assert DPO().needed_columns() == {"ref_logprobs"}
    loss = algorithm.loss(micro(algorithm, *pairs))
    gaps = [-0.75 + 1.5, -1.25 + 0.7]
    assert float(loss.value) == pytest.approx(sum(softplus(0.25 - gap) for gap in gaps) / 2, rel=1e-6)


def test_ipo_regresses_the_gap_on_its_target(pairs):
    algorithm = DPO(DPOConfig(beta=0.5, kind="ipo"))
    loss = algorithm.loss(micro(algorithm, *pairs))
    assert float(loss.value) == pytest.approx(sum((gap - 1.0) ** 2 for gap in GAPS) / 2, rel=1e-6)


def test_a_term_for_the_chosen_responses_is_their_mean_cross_entropy(pairs):
    algorithm = DPO(DPOConfig(beta=0.5, sft_coef=0.1))
    loss = algorithm.loss(micro(algorithm, *pairs))
    plain = sum(softplus(-0.5 * gap) for gap in GAPS) / 2
    assert float(loss.value) == pytest.approx(plain + 0.1 * (0.75 + 1.25) / 2, rel=1e-6)
    assert loss.metrics["actor/chosen_nll"].value == pytest.approx(1.0)


OPTIONS = [
    {},
    {"label_smoothing": 0.2},
    {"kind": "robust", "label_smoothing": 0.2},
    {"kind": "ipo", "sft_coef": 0.3},
    {"kind": "hinge", "average_logprobs": True, "margin": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_agree_with_finite_differences(pairs, options):
    batch, logprobs, reference = pairs
    algorithm = DPO(DPOConfig(beta=0.5, **options))
    leaf = logprobs.nan_to_num(0.3).double().requires_grad_()
    batch["ref_logprobs"] = reference.double()
    batch["advantages"] = algorithm.advantages(batch)
    totals = Totals.of(batch, response_limit=4)

    def loss(logprobs):
        return algorithm.loss(MicroBatch(batch, totals, {"logprobs": logprobs})).value

    assert torch.autograd.gradcheck(loss, (leaf,))
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    assert not gradient[~batch.mask].any()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_pairs_in_slices_of_their_own_add_up_to_the_whole(pairs, options):
    batch, logprobs, reference = pairs
    algorithm = DPO(DPOConfig(beta=0.5, **options))
    whole = algorithm.loss(micro(algorithm, batch, logprobs, reference))
    totals = Totals.of(batch, response_limit=4)
    parts = []
    for rows in ([2, 3], [1, 0]):
        part = batch.select(rows)
        width = part.max_length
        part_micro = MicroBatch(part, totals, {"logprobs": logprobs[rows, :width]})
        parts.append(algorithm.loss(part_micro))
    assert float(sum(part.value for part in parts)) == pytest.approx(float(whole.value), rel=1e-6)


def test_a_step_against_the_gradient_raises_the_chosen_and_lowers_the_rejected(pairs):
    batch, logprobs, reference = pairs
    leaf = logprobs.nan_to_num(0.0).requires_grad_()
    algorithm = DPO()
    algorithm.loss(micro(algorithm, batch, leaf, reference)).value.backward()
    by_row = leaf.grad.sum(dim=1)
    assert (by_row[[0, 3]] < 0).all()
    assert (by_row[[1, 2]] > 0).all()


def test_a_batch_without_a_pair_has_no_loss(make_batch):
    batch = make_batch([[1], [], []], [1.0, 1.0, 0.0], groups=[0, 1, 1])
    algorithm = DPO()
    logprobs = torch.zeros(3, 1, requires_grad=True)
    loss = algorithm.loss(micro(algorithm, batch, logprobs, torch.zeros(3, 1)))
    assert float(loss.value.detach()) == 0.0
    loss.value.backward()
    assert not logprobs.grad.any()


def test_advantages_say_which_way_each_response_is_pushed(pairs):
    assert DPO().advantages(pairs[0]).tolist() == [[1, 1, 0], [-1, 0, -1], [-1, 0, 0], [1, 1, 0]]


def test_it_takes_two_responses_of_each_task_and_keeps_them_together():
    assert DPO.offline
    assert DPO.whole_groups
    assert DPO().samples_per_prompt == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beta": 0}, "above 0"),
        ({"kind": "ipo", "label_smoothing": 0.1}, "does nothing with kind: ipo"),
        ({"kind": "hinge", "label_smoothing": 0.1}, "does nothing with kind: hinge"),
        ({"kind": "robust"}, "how many labels may be wrong"),
        ({"kind": "ipo", "margin": 0.1}, "margin does nothing"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        DPOConfig(**options)
