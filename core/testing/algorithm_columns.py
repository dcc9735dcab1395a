"""What an algorithm owes to columns that others put into a batch: weights of tokens, and rewards of single steps.

For `check_algorithm`. Extensions rely on both without knowing which algorithm runs.
"""

from __future__ import annotations

import torch

from rollstock.errors import RunError
from rollstock.testing.case import AlgorithmCase
from rollstock.testing.kit import NotApplicable, expect
from rollstock.testing.trial import drifted, give_advantages, gradients, model_outputs, step

RTOL, ATOL = 1e-4, 1e-6


def check_weights(case: AlgorithmCase) -> None:
    """The column `token_weights` scales the loss, so that an extension can correct for the sampler."""
    algorithm = case.make()
    if algorithm.offline:
        raise NotApplicable("it is offline, so there is no sampler to correct for")
    batch = step(algorithm, case.batch(), case.columns)
    outputs = model_outputs(algorithm, batch, drifted(batch))
    plain = gradients(algorithm.loss, batch, outputs)
    mend = "reduce through `micro.loss(losses)`, with losses [b, T], which multiplies them by their weights"
    batch.set_flat("token_weights", torch.full((batch.num_tokens,), 2.0))
    try:
        doubled = gradients(algorithm.loss, batch, outputs)
    except RunError as refusal:
        raise NotApplicable(f"it refuses such weights: {refusal}") from refusal
    expect(
        all(torch.allclose(doubled.by[name], 2 * plain.by[name], rtol=RTOL, atol=ATOL) for name in plain.by),
        "with all `token_weights` at 2, the gradient is not twice what it is without them",
        mend=mend,
    )
    first = batch.rows() == 0
    batch.set_flat("token_weights", torch.where(first, 0.0, 1.0))
    without = gradients(algorithm.loss, batch, outputs)
    expected = {name: torch.where(first, 0.0, gradient) for name, gradient in plain.by.items()}
    expect(
        all(torch.allclose(without.by[name], expected[name], rtol=RTOL, atol=ATOL) for name in expected),
        "a trajectory whose `token_weights` are 0 still has a gradient, or changes that of others",
        mend=mend,
    )


def check_step_rewards(case: AlgorithmCase) -> None:
    """`reads_step_rewards` says whether rewards of single tokens reach the advantages."""
    algorithm = case.make()
    if algorithm.offline:
        raise NotApplicable("it is offline, so there are no rewards")
    batch = step(algorithm, case.batch(), case.columns)
    found = []
    for size in (0.0, 1.0):
        paid = size * torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(4))
        batch.set_flat("step_rewards", torch.where(batch.flat("action_mask"), paid, 0.0))
        give_advantages(algorithm, batch)
        found.append(batch.flat("advantages"))
    reads = not torch.allclose(found[0], found[1], rtol=RTOL, atol=ATOL)
    expect(
        reads or not algorithm.reads_step_rewards,
        "it says that it reads `step_rewards`, and they change no advantage",
        mend="add `batch.step_rewards` to the score on the last token, or leave `reads_step_rewards` out: what an "
        "extension pays for single tokens would be lost",
    )
    expect(
        algorithm.reads_step_rewards or not reads,
        "it reads `step_rewards` and does not say so",
        mend="set reads_step_rewards = True: an extension then charges token by token what it would take off the score",
    )


COLUMNS = (check_weights, check_step_rewards)
