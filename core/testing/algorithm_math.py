"""The mathematics that every algorithm must get right, however a batch is cut, ordered and padded.

For `check_algorithm`. Compared is what a run would do: advantages for the whole batch, losses on slices with the
counts of the whole, and the gradient by every single log-prob.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rollstock.batch import Batch
from rollstock.interfaces.algorithm import Algorithm
from rollstock.metrics import metric_values
from rollstock.testing.batches import insert_observations, make_trajectory
from rollstock.testing.case import AlgorithmCase
from rollstock.testing.kit import NotApplicable, expect, fail
from rollstock.testing.trial import (
    Gradients,
    RecordingBatch,
    drifted,
    gradients,
    model_outputs,
    prepare,
    set_column,
    step,
)

RTOL, ATOL = 1e-4, 1e-6
_MASK = "multiply by `mask`, and average with masked sums, never with `.mean()` or `.shape`"


def check_slicing(case: AlgorithmCase) -> None:
    """A batch cut into any micro-batches, in any order, gives the same loss, gradient and metrics as the whole."""
    algorithm = case.make()
    batch = step(algorithm, case.batch(), case.columns)
    outputs = model_outputs(algorithm, batch, drifted(batch))
    whole = gradients(algorithm.loss, batch, outputs)
    mend = (
        "reduce through `micro.loss(losses)`, which divides by the counts of the whole mini-batch, never by those of "
        "the slice; statistics over trajectories belong in `advantages`; a loss that compares the trajectories of a "
        "group sets `whole_groups` and reduces through `micro.group_loss`"
    )
    for name, slices in _cuts(batch, whole_groups=algorithm.whole_groups).items():
        parts = gradients(algorithm.loss, batch, outputs, slices=slices)
        expect(
            _close(parts.loss, whole.loss),
            f"in {name} the loss is {parts.loss:.6g}, and {whole.loss:.6g} as a whole",
            mend=mend,
        )
        for output, gradient in whole.by.items():
            gap = float((parts.by[output] - gradient).abs().max())
            expect(
                torch.allclose(parts.by[output], gradient, rtol=RTOL, atol=ATOL),
                f"in {name} the gradient by the {output} differs by up to {gap:.3g} from that of the whole",
                mend=mend,
            )
        _check_metrics(parts, whole, name)


def _cuts(batch: Batch, *, whole_groups: bool) -> dict[str, list[list[int]]]:
    """Ways to cut a batch; only between groups where the algorithm asks for that."""
    units = batch.members() if whole_groups else [[i] for i in range(len(batch))]
    size = len(units)
    shuffled = torch.randperm(size, generator=torch.Generator().manual_seed(0)).tolist()
    cuts: dict[str, Sequence[Sequence[int]]] = {
        "two halves": [range(size // 2), range(size // 2, size)],
        "single groups" if whole_groups else "single trajectories": [[i] for i in range(size)],
        "shuffled thirds": [shuffled[k::3] for k in range(3)],
        "the reverse order": [range(size - 1, -1, -1)],
    }
    # The members of a group change places as well: which is first must not matter.
    return {name: [[i for unit in part for i in units[unit][::-1]] for part in cut] for name, cut in cuts.items()}


def _check_metrics(parts: Gradients, whole: Gradients, name: str) -> None:
    ours, theirs = metric_values(parts.metrics), metric_values(whole.metrics)
    for key in sorted(ours.keys() | theirs.keys()):
        expect(
            key in ours and key in theirs and _close(ours[key], theirs[key]),
            f"in {name} the metric {key!r} is {ours.get(key)}, and {theirs.get(key)} as a whole",
            mend="give the metric the weight of what stands behind it: `micro.mean(values)`, or `Metric(value, "
            "weight, reducer)`",
        )


def check_order(case: AlgorithmCase) -> None:
    """The order of trajectories, and what the ids of their groups are, change no advantage and no gradient."""
    algorithm = case.make()
    batch = step(algorithm, case.batch(), case.columns)
    shuffled = torch.randperm(len(batch), generator=torch.Generator().manual_seed(3)).tolist()
    other = case.batch()
    prepare(algorithm, other, case.columns)
    other = other.select(shuffled)
    other["groups"] = 10 * other.groups + 5
    given = algorithm.advantages(other)
    moved = given if isinstance(given, Tensor) else given["advantages"]
    gap = float((moved - batch.advantages[shuffled]).abs().max())
    expect(
        torch.allclose(moved, batch.advantages[shuffled], rtol=RTOL, atol=ATOL),
        f"with its trajectories in another order, and other group ids, the advantages differ by up to {gap:.3g}",
        mend="find a trajectory's group by `batch.groups`; groups may be mixed, incomplete, and numbered with gaps",
    )


def check_padding(case: AlgorithmCase) -> None:
    """A longer neighbour, and so more padding, changes nothing of a trajectory."""
    algorithm = case.make()
    batch = case.batch()
    prepare(algorithm, batch, case.columns)
    longest = int(batch.lengths.argmax())
    wider, where = insert_observations(batch, {longest: [int(batch.lengths[longest])]}, count=9)
    _compare(case, batch, wider, where, without=longest, what="when a neighbour grows by 9 masked tokens", mend=_MASK)


def check_observations(case: AlgorithmCase) -> None:
    """Tokens that the policy did not choose break no recursion: put in between, they change nothing for those around
    them."""
    algorithm = case.make()
    batch = case.batch(observations=False)
    prepare(algorithm, batch, case.columns)
    places = {i: [n // 2] for i, n in enumerate(batch.lengths.tolist()) if n > 1}
    longer, where = insert_observations(batch, places)
    mend = "skip masked tokens in sums over time, as `rollstock.algorithms.functional.gae` does"
    _compare(case, batch, longer, where, what="with two observations inside of each trajectory", mend=mend)


def check_masking(case: AlgorithmCase) -> None:
    """Masked tokens carry no advantage and no loss, whatever stands there."""
    algorithm = case.make()
    batch = step(algorithm, case.batch(), case.columns)
    mask = batch.flat("action_mask")
    expect(
        not bool(batch.flat("advantages")[~mask].any()) and not bool(batch.advantages[~batch.mask].any()),
        "masked tokens have advantages that are not 0",
        mend="multiply the advantages by `batch.mask`",
    )
    clean = gradients(algorithm.loss, batch, model_outputs(algorithm, batch, drifted(batch)))
    expect(
        not bool(clean.main[~mask].any()),
        "what the model says of masked tokens has a gradient",
        mend="reduce through `micro.loss(losses)`, and keep masked tokens out of what is computed for a whole sequence",
    )
    spoilt = case.batch()
    prepare(algorithm, spoilt, case.columns)
    for name in sorted(set(algorithm.needed_columns()) & set(spoilt.columns)):
        _spoil(spoilt, name, mask)
    step_again = algorithm.advantages(spoilt)
    given = {"advantages": step_again} if isinstance(step_again, Tensor) else step_again
    for name, value in given.items():
        spoilt[name] = value
    outputs = {
        name: torch.where(mask, value, value + 3.0)
        for name, value in model_outputs(algorithm, spoilt, drifted(spoilt)).items()
    }
    found = gradients(algorithm.loss, spoilt, outputs)
    same = torch.allclose(spoilt.advantages, batch.advantages, rtol=RTOL, atol=ATOL) and _close(found.loss, clean.loss)
    expect(
        same and torch.allclose(found.main, clean.main, rtol=RTOL, atol=ATOL),
        "values of masked tokens change the advantages, the loss or the gradient of other tokens",
        mend=_MASK,
    )


def _spoil(batch: Batch, name: str, mask: Tensor) -> None:
    """Other numbers on the masked tokens of a float column."""
    try:
        column = batch.flat(name)
    except KeyError:
        return
    if column.is_floating_point():
        shape = mask.view(-1, *[1] * (column.dim() - 1))
        set_column(batch, name, torch.where(shape, column, column + 3.0))


def check_degenerate(case: AlgorithmCase) -> None:
    """Groups of one, equal rewards, empty responses and wholly masked ones give defined numbers, and pass nothing on
    to others."""
    for name, make in DEGENERATE.items():
        algorithm = case.make()
        batch = make()
        batch = step(algorithm, batch, case.columns)
        found = gradients(algorithm.loss, batch, model_outputs(algorithm, batch, drifted(batch)))
        numbers = [batch.advantages, torch.tensor(found.loss), *found.by.values()]
        if "values" in algorithm.needed_columns():
            numbers += gradients(algorithm.critic_loss, batch, {"values": batch.flat("values")}).by.values()
        expect(
            all(bool(torch.isfinite(number).all()) for number in numbers),
            f"with {name}, advantages, loss or gradient are not finite",
            mend="clamp counts to at least 1 before you divide by them; a group of one, or without spread, has no "
            "signal: give it 0",
        )
        if bool(batch.mask.any()):
            continue
        expect(
            not any(bool(number.any()) for number in numbers),
            f"with {name}, there is a loss although the policy chose no token",
            mend="reduce through `micro.loss(losses)`",
        )


def _batch(*rows: dict[str, Any]) -> Callable[[], Batch]:
    def make() -> Batch:
        made = [make_trajectory(**{"length": 3, "group": 0, **row, "seed": place}) for place, row in enumerate(rows)]
        return Batch.from_trajectories(made)

    return make


DEGENERATE: dict[str, Callable[[], Batch]] = {
    "a group of one": _batch({"reward": 1.0}, {"group": 1, "reward": 1.0}, {"group": 1, "reward": 0.0}),
    "a group whose rewards are all 1": _batch({"reward": 1.0}, {"reward": 1.0}, {"reward": 1.0}),
    "a group whose rewards are all 0": _batch({"reward": 0.0}, {"reward": 0.0}),
    "an empty response": _batch({"length": 0, "reward": 1.0}, {"reward": 0.0}, {"reward": 1.0}),
    "only empty responses": _batch({"length": 0, "reward": 1.0}, {"length": 0, "reward": 0.0}),
    "a wholly masked response": _batch({"observations": [0, 1, 2], "reward": 1.0}, {"reward": 0.0}, {"reward": 1.0}),
    "only masked responses": _batch({"observations": [0, 1, 2]}, {"observations": [0, 1, 2], "reward": 0.0}),
    "a single token": _batch({"length": 1, "reward": 1.0}),
}


def check_direction(case: AlgorithmCase) -> None:
    """A positive advantage raises the log-prob of a token, a negative one lowers it."""
    algorithm = case.make()
    batch = step(algorithm, case.batch(), case.columns)
    mask = batch.flat("action_mask")
    if "ref_logprobs" in batch:  # so that a KL term pulls nowhere
        batch.set_flat("ref_logprobs", batch.flat("rollout_logprobs"))
    if algorithm.offline and not _reads_advantages(algorithm, batch):
        raise NotApplicable("an offline loss without advantages compares responses: see the check `preference`")
    for sign in (1.0, -1.0):
        batch.set_flat("advantages", torch.where(mask, sign, 0.0))
        outputs = model_outputs(algorithm, batch, batch.flat("rollout_logprobs"))
        pull = -sign * gradients(algorithm.loss, batch, outputs).main[mask]
        expect(
            float(pull.sum()) > 0 and not bool((pull < -ATOL).any()),
            f"with an advantage of {sign:+g} on every token, a step against the gradient "
            f"{'lowers' if sign > 0 else 'raises'} log-probs",
            mend="the sign: a policy loss is minus the advantage times the (ratio of the) probability",
        )


def _reads_advantages(algorithm: Algorithm[Any], batch: Batch) -> bool:
    outputs = model_outputs(algorithm, batch, batch.flat("rollout_logprobs"))
    watched = RecordingBatch.of(batch)
    gradients(algorithm.loss, watched, outputs)
    return "advantages" in watched.read


def check_preference(case: AlgorithmCase) -> None:
    """From rewards to gradient: of two responses of equal length, the better one becomes likelier than the other."""
    algorithm = case.make()
    size = max(2, min(algorithm.samples_per_prompt, 4))
    alone = algorithm.samples_per_prompt == 1
    rows = [
        make_trajectory(4, group=place if alone else place // size, reward=float(place % 2 == 0), seed=place)
        for place in range(2 * size)
    ]
    batch = step(algorithm, Batch.from_trajectories(rows), case.columns, values=0.0)
    if "ref_logprobs" in batch:
        batch.set_flat("ref_logprobs", batch.flat("rollout_logprobs"))
    found = gradients(algorithm.loss, batch, model_outputs(algorithm, batch, batch.flat("rollout_logprobs")))
    by_row = -batch.pad(found.main).sum(dim=1)
    good, bad = float(by_row[batch.scores > 0].sum()), float(by_row[batch.scores == 0].sum())
    expect(
        good > bad,
        f"a step raises the log-probs of rewarded responses by {good:.3g} in all, and those of others by {bad:.3g}",
        mend="advantages must grow with `batch.scores`",
    )


def _compare(
    case: AlgorithmCase,
    batch: Batch,
    other: Batch,
    where: Tensor,
    *,
    what: str,
    mend: str,
    without: int | None = None,
) -> None:
    """Advantages and gradients must be the same for the tokens that both batches have (those of `without` aside)."""
    results = []
    for each in (batch, other):
        algorithm: Algorithm[Any] = case.make()
        given = algorithm.advantages(each)
        for name, value in ({"advantages": given} if isinstance(given, Tensor) else given).items():
            each[name] = value
        outputs = model_outputs(algorithm, batch, drifted(batch))
        if each is other:
            fill = {name: 1.0 if name in ("entropy", "values") else -1.0 for name in outputs}
            outputs = {
                name: torch.full((other.num_tokens,), fill[name]).index_put((where,), output)
                for name, output in outputs.items()
            }
        results.append((each.flat("advantages"), gradients(algorithm.loss, each, outputs)))
    (advantages, one), (others, two) = results
    kept = torch.ones(batch.num_tokens, dtype=torch.bool) if without is None else batch.rows() != without
    for name, mine, theirs in (
        ("advantages", advantages, others[where]),
        ("gradient", one.main, two.main[where]),
    ):
        gap = float((mine - theirs)[kept].abs().max())
        if not torch.allclose(mine[kept], theirs[kept], rtol=RTOL, atol=ATOL):
            fail(f"{what}, the {name} of tokens that are the same differ by up to {gap:.3g}", mend=mend)


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= RTOL * max(abs(one), abs(other)) + ATOL


MATHEMATICS = (
    check_slicing,
    check_order,
    check_padding,
    check_masking,
    check_observations,
    check_degenerate,
    check_direction,
    check_preference,
)
