"""What must hold for every installed algorithm and any batch: slicing, padding, order, rewards moved and scaled, and
numbers that stay numbers.

A step is taken as a run takes it: advantages for the whole batch, the loss on slices of it. The batches have empty
responses, wholly masked ones, groups of one and groups without spread among them.
"""

import random
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollstock import Algorithm, Batch
from rollstock.algorithms.group_relative import GroupBaseline
from rollstock.discovery import discover
from rollstock.testing.batches import insert_observations, make_trajectory
from rollstock.testing.case import MOST_SAMPLES, AlgorithmCase
from rollstock.testing.subject import Subject
from rollstock.testing.trial import Gradients, drifted, give_advantages, gradients, model_outputs, prepare

NAMES = [entry.name for entry in discover().values() if entry.kind == "algorithm" and entry.distribution == "rollstock"]
seeds = st.integers(0, 2**31 - 1)
quick = settings(max_examples=8, deadline=None)


@cache
def case(name: str) -> AlgorithmCase:
    return AlgorithmCase(Subject(Algorithm, name, None), {})


def named(base: type[Algorithm[Any]]) -> list[str]:
    """The algorithms that derive from a shared class."""
    return [name for name in NAMES if issubclass(case(name).subject.cls, base)]


def draw(algorithm: Algorithm[Any], seed: int) -> Batch:
    """Groups of lengths from 0 to 6, rewards of few values so that ties are common, a quarter of tokens masked.

    Some trajectories are missing, as where a reward abstained; those that the loss compares in groups stay.
    """
    source = random.Random(seed)
    size = min(algorithm.samples_per_prompt, MOST_SAMPLES)
    rows = []
    for group in range(4):
        members = size if algorithm.whole_groups else source.randint(1, size)
        for _ in range(members):
            length = source.choice([0, 1, 2, 3, 4, 5, 6])
            masked = [place for place in range(length) if source.random() < 0.25]
            reward = source.choice([0.0, 0.25, 1.0])
            rows.append(
                make_trajectory(length, group=group, reward=reward, observations=masked, seed=source.getrandbits(30))
            )
    return Batch.from_trajectories([*rows, make_trajectory(2, group=9, reward=0.5, seed=source.getrandbits(30))])


def advantages_of(algorithm: Algorithm[Any], batch: Batch) -> Tensor:
    give_advantages(algorithm, batch)
    return batch.flat("advantages")


def loss_of(algorithm: Algorithm[Any], batch: Batch, logprobs: Tensor, **cuts: Any) -> Gradients:
    return gradients(algorithm.loss, batch, model_outputs(algorithm, batch, logprobs), **cuts)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@given(seed=seeds, data=st.data())
@quick
def test_any_slicing_gives_the_same_loss_and_gradient(name: str, seed: int, data: st.DataObject) -> None:
    algorithm = case(name).make()
    batch = draw(algorithm, seed)
    prepare(algorithm, batch, {})
    give_advantages(algorithm, batch)
    logprobs = drifted(batch, seed=seed)
    whole = loss_of(algorithm, batch, logprobs)
    units = batch.members() if algorithm.whole_groups else [[row] for row in range(len(batch))]
    order = data.draw(st.permutations(units))
    edges = [0, *sorted(data.draw(st.sets(st.integers(1, len(order) - 1)))), len(order)]
    slices = [[row for unit in order[a:b] for row in unit] for a, b in pairwise(edges)]
    parts = loss_of(algorithm, batch, logprobs, slices=slices)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-4, abs=1e-6)
    for output, gradient in whole.by.items():
        close(parts.by[output], gradient)


@pytest.mark.parametrize("name", NAMES)
@given(seed=seeds, count=st.integers(1, 4))
@quick
def test_masked_tokens_beside_and_inside_change_nothing(name: str, seed: int, count: int) -> None:
    algorithm = case(name).make()
    batch = draw(algorithm, seed)
    prepare(algorithm, batch, {})
    source = random.Random(seed)
    places = {row: [source.randint(0, length)] for row, length in enumerate(batch.lengths.tolist()) if length}
    longer, where = insert_observations(batch, places, count=count)
    close(advantages_of(algorithm, longer)[where], advantages_of(algorithm, batch))
    outputs = model_outputs(algorithm, batch, drifted(batch, seed=seed))
    spread = {
        output: torch.full((longer.num_tokens,), -3.0).index_put((where,), value) for output, value in outputs.items()
    }
    plain, found = gradients(algorithm.loss, batch, outputs), gradients(algorithm.loss, longer, spread)
    assert found.loss == pytest.approx(plain.loss, rel=1e-4, abs=1e-6)
    for output, gradient in found.by.items():
        close(gradient[where], plain.by[output])
        assert not gradient[~longer.flat("action_mask")].any()


@pytest.mark.parametrize("name", NAMES)
@given(seed=seeds)
@quick
def test_the_order_of_trajectories_and_the_ids_of_groups_change_nothing(name: str, seed: int) -> None:
    algorithm = case(name).make()
    batch = draw(algorithm, seed)
    prepare(algorithm, batch, {})
    order = random.Random(seed).sample(range(len(batch)), len(batch))
    other = batch.select(order)
    other["groups"] = 3 - 7 * other.groups
    give_advantages(algorithm, batch)
    give_advantages(algorithm, other)
    close(other.advantages, batch.advantages[order])
    outputs = model_outputs(algorithm, batch, drifted(batch, seed=seed))
    moved = {output: other.unpad(batch.pad(value)[order]) for output, value in outputs.items()}
    ours, theirs = gradients(algorithm.loss, batch, outputs), gradients(algorithm.loss, other, moved)
    for output, gradient in ours.by.items():
        close(other.pad(theirs.by[output]), batch.pad(gradient)[order])


@pytest.mark.parametrize("name", named(GroupBaseline))
@given(seed=seeds, shift=st.floats(-5, 5), scale=st.floats(0.1, 10))
@quick
def test_advantages_under_rewards_that_are_moved_and_scaled(name: str, seed: int, shift: float, scale: float) -> None:
    algorithm = case(name).make()
    batch = draw(algorithm, seed)
    prepare(algorithm, batch, {})
    before = advantages_of(algorithm, batch)
    batch["scores"] = scale * batch.scores + shift
    after = advantages_of(algorithm, batch)
    normalised = name == "pass_at_k" or algorithm.config.whiten or getattr(algorithm.config, "scale", "none") != "none"
    expected = before if normalised else before * scale
    torch.testing.assert_close(after, expected, rtol=1e-3, atol=1e-4)


# Whitening over the batch moves the zero to the mean of all groups.
@pytest.mark.parametrize("name", [name for name in named(GroupBaseline) if not case(name).subject.config.whiten])
@given(seed=seeds, reward=st.sampled_from([0.0, 1.0, -2.5]))
@quick
def test_a_group_without_spread_teaches_nothing(name: str, seed: int, reward: float) -> None:
    algorithm = case(name).make()
    batch = draw(algorithm, seed)
    uniform = batch.groups <= 1
    batch["scores"] = torch.where(uniform, reward, batch.scores)
    prepare(algorithm, batch, {})
    give_advantages(algorithm, batch)
    assert not batch.advantages[uniform].any()


@pytest.mark.parametrize("name", NAMES)
@given(seed=seeds)
@quick
def test_extreme_log_probs_give_finite_losses_and_gradients(name: str, seed: int) -> None:
    algorithm = case(name).make()
    batch = draw(algorithm, seed)
    source = random.Random(seed)

    def extreme() -> Tensor:
        return torch.tensor([source.choice([-1e4, -700.0, -60.0, -1e-7, 0.0]) for _ in range(batch.num_tokens)])

    prepare(algorithm, batch, {})
    for column in {"old_logprobs", "ref_logprobs", "rollout_logprobs"} & algorithm.needed_columns():
        batch.set_flat(column, extreme())
    give_advantages(algorithm, batch)
    found = loss_of(algorithm, batch, extreme())
    assert torch.isfinite(batch.advantages).all()
    assert torch.isfinite(torch.tensor(found.loss))
    for gradient in found.by.values():
        assert torch.isfinite(gradient).all()
    for metric in found.metrics.values():
        assert torch.isfinite(torch.tensor(metric.value)) or metric.weight == 0
