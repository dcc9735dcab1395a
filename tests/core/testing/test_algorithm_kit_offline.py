"""The algorithm kit knows offline algorithms and whole groups: right ones pass, and each wrong one is caught."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from rollstock import Algorithm, Batch, Loss, MicroBatch, NoOptions
from rollstock.testing import ConformanceError, check_algorithm


class Pairwise(Algorithm[NoOptions]):
    """Raises the better response of each pair above the worse one."""

    offline = True
    whole_groups = True
    samples_per_prompt = 2  # type: ignore[assignment]  # a constant does for a property

    def advantages(self, batch: Batch) -> Tensor:
        return (2 * batch.scores - 1)[:, None] * batch.mask

    def losses(self, micro: MicroBatch) -> Tensor:
        worth = torch.where(micro.mask, micro.logprobs, 0.0).sum(dim=1)
        acts = micro.mask.any(dim=1)
        pairs = (micro.groups[:, None] == micro.groups) & (micro.scores[:, None] > micro.scores)
        return torch.where(pairs & acts[:, None] & acts, softplus(worth - worth[:, None]), 0.0)

    def loss(self, micro: MicroBatch) -> Loss:
        return micro.group_loss(self.losses(micro))


class Imitation(Algorithm[NoOptions]):
    """Weighted by advantages, as online losses are, so that their direction can be checked."""

    offline = True

    def advantages(self, batch: Batch) -> Tensor:
        return batch.scores[:, None] * batch.mask

    def loss(self, micro: MicroBatch) -> Loss:
        return micro.loss(-micro.advantages * micro.logprobs)


def test_a_right_pairwise_algorithm_passes_and_its_direction_is_that_of_preferences() -> None:
    report = check_algorithm(Pairwise)
    assert len(report.passed) == 15
    assert set(report.skipped) == {"critic", "direction", "weights", "step_rewards"}
    assert "preference" in report.skipped["direction"]


def test_an_offline_loss_that_reads_advantages_has_its_direction_checked() -> None:
    report = check_algorithm(Imitation)
    assert "direction" in report.passed
    assert set(report.skipped) == {"critic", "weights", "step_rewards"}


class CutsPairs(Pairwise):
    whole_groups = False


class MeanOfThePairsHere(Pairwise):
    def loss(self, micro: MicroBatch) -> Loss:
        return Loss(self.losses(micro).sum() / len(micro.scores))


class FirstIsChosen(Pairwise):
    def losses(self, micro: MicroBatch) -> Tensor:
        worth = torch.where(micro.mask, micro.logprobs, 0.0).sum(dim=1)
        better = torch.tensor([members[0] for members in micro.batch.members()], dtype=torch.int64)
        worse = torch.tensor([members[-1] for members in micro.batch.members()], dtype=torch.int64)
        return softplus(worth[worse] - worth[better])


class PrefersTheRejected(Pairwise):
    def loss(self, micro: MicroBatch) -> Loss:
        return micro.group_loss(-self.losses(micro))


class WrongWayRound(Imitation):
    def loss(self, micro: MicroBatch) -> Loss:
        return micro.loss(micro.advantages * micro.logprobs)


class ReadsTheSampler(Imitation):
    def loss(self, micro: MicroBatch) -> Loss:
        return micro.loss(-micro.advantages * (micro.logprobs - micro.rollout_logprobs))


class Refills(Imitation):
    refill_rounds = 2


class PlaysGreedily(Imitation):
    needs = frozenset({"greedy_scores"})


class SaysYes(Imitation):
    offline = "yes"  # type: ignore[assignment]  # the mistake


WRONG: list[tuple[type[Algorithm[Any]], str, str]] = [
    (CutsPairs, "slicing", "sets `whole_groups`"),
    (MeanOfThePairsHere, "slicing", "micro.group_loss"),
    (FirstIsChosen, "slicing", "in two halves"),
    (PrefersTheRejected, "preference", "must grow with"),
    (WrongWayRound, "direction", "the sign"),
    (ReadsTheSampler, "columns", "no policy of the run sampled"),
    (Refills, "declarations", "2 refill rounds"),
    (PlaysGreedily, "declarations", "greedy_scores"),
    (SaysYes, "declarations", "offline is 'yes'"),
]


@pytest.mark.parametrize(("wrong", "check", "said"), WRONG, ids=[wrong.__name__ for wrong, _, _ in WRONG])
def test_a_wrong_offline_algorithm_is_caught_by_its_check(wrong: type[Algorithm[Any]], check: str, said: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_algorithm(wrong)
    assert caught.value.check == check
    assert said in str(caught.value)
