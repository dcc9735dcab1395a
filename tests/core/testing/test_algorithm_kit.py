"""Every check of the algorithm kit can fail: each wrong algorithm here is caught by the check that is meant for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from rollstock import Algorithm, Batch, Loss, Metric, Metrics, MicroBatch, NoOptions, option
from rollstock.testing import ConformanceError, check_algorithm


class Right(Algorithm[NoOptions]):
    """Centred rewards within groups, and no ratio: the simplest algorithm that keeps every promise."""

    samples_per_prompt = 4  # type: ignore[assignment]  # a constant does for a property

    def advantages(self, batch: Batch) -> Tensor | Mapping[str, Tensor]:
        same = (batch.groups[:, None] == batch.groups[None, :]).float()
        mean = same @ batch.scores / same.sum(dim=1)
        return (batch.scores - mean)[:, None] * batch.mask

    def loss(self, micro: MicroBatch) -> Loss:
        return micro.loss(-micro.advantages * micro.logprobs)


def test_a_right_algorithm_passes_every_check_that_applies() -> None:
    report = check_algorithm(Right)
    assert len(report.passed) == 18
    assert report.skipped == {"critic": "it needs no values, so it has no critic"}


class Unfinished(Algorithm[NoOptions]):
    def loss(self, micro: MicroBatch) -> Loss:
        return micro.loss(micro.logprobs)


class Base(Right):
    """So that wrong algorithms differ from the right one by one line."""


@dataclass(kw_only=True)
class BadDefault:
    clip: float = option(-1.0, "clip range", minimum=0)


class DefaultOutOfBounds(Right, Algorithm[BadDefault]):
    @classmethod
    def config_class(cls) -> type[Any]:
        return BadDefault


@dataclass(kw_only=True)
class NoHelp:
    clip: float = 0.2


class OptionWithoutHelp(Right):
    @classmethod
    def config_class(cls) -> type[Any]:
        return NoHelp


class EarlyButNotNeeded(Base):
    early = frozenset({"old_logprobs"})


class AsksForValuesOfTheActor(Base):
    trains_with = frozenset({"logprobs", "values"})


class NeedsAText(Base):
    needs = "old_logprobs"  # type: ignore[assignment]  # the mistake


class ReadsUndeclared(Base):
    def loss(self, micro: MicroBatch) -> Loss:
        return micro.loss(-micro.advantages * micro.logprobs + 0.0 * micro.ref_logprobs)


class ReadsEntropyUndeclared(Base):
    def loss(self, micro: MicroBatch) -> Loss:
        return micro.loss(-micro.advantages * micro.logprobs - 0.01 * micro.entropy)


class ReadsOldLogprobsEarly(Base):
    needs = frozenset({"old_logprobs"})

    def advantages(self, batch: Batch) -> Tensor:
        return batch.scores[:, None] * batch.mask + 0.0 * batch.old_logprobs


class DeclaresTooMuch(Base):
    needs = frozenset({"ref_logprobs"})


class NeedsWhatNobodyHas(Base):
    needs = frozenset({"ref_logprob"})


class WrongShape(Base):
    def advantages(self, batch: Batch) -> Tensor:
        return batch.scores


class ForgetsAdvantages(Base):
    def advantages(self, batch: Batch) -> Mapping[str, Tensor]:
        return {"returns": batch.scores[:, None] * batch.mask}


class LossIsATensor(Base):
    def loss(self, micro: MicroBatch) -> Loss:
        return (-micro.advantages * micro.logprobs).sum()  # type: ignore[return-value]  # the mistake


class LossIgnoresTheModel(Base):
    def loss(self, micro: MicroBatch) -> Loss:
        return micro.loss(-micro.advantages * micro.logprobs.detach())


class MetricIsAFloat(Base):
    def loss(self, micro: MicroBatch) -> Loss:
        return micro.loss(-micro.advantages * micro.logprobs, {"actor/x": 1.0})  # type: ignore[dict-item]  # the mistake


class DrawsFromTheGlobalGenerator(Base):
    def advantages(self, batch: Batch) -> Tensor:
        return torch.rand(()) * batch.scores[:, None] * batch.mask


class WritesIntoTheBatch(Base):
    def advantages(self, batch: Batch) -> Tensor:
        batch.scores.sub_(batch.scores.mean())
        return batch.scores[:, None] * batch.mask


class CountsItsCalls(Base):
    def __init__(self, config: NoOptions | None = None) -> None:
        super().__init__(config)
        self.calls = 0

    def advantages(self, batch: Batch) -> Tensor:
        self.calls += 1
        return self.calls * batch.scores[:, None] * batch.mask


class MeanOfTheSlice(Base):
    def loss(self, micro: MicroBatch) -> Loss:
        losses = -micro.advantages * micro.logprobs
        return Loss(losses[micro.mask].mean() if micro.mask.any() else losses.sum())


class MetricWithoutWeight(Base):
    def loss(self, micro: MicroBatch) -> Loss:
        drift = (micro.logprobs - micro.rollout_logprobs).detach()[micro.mask]
        value = float(drift.mean()) if len(drift) else 0.0
        return micro.loss(-micro.advantages * micro.logprobs, {"actor/drift": Metric(value)})


class GroupsByPlace(Base):
    def advantages(self, batch: Batch) -> Tensor:
        scores = batch.scores.view(-1, 4) if len(batch) % 4 == 0 else batch.scores.view(1, -1)
        return (scores - scores.mean(dim=1, keepdim=True)).reshape(-1, 1) * batch.mask


class GroupIdsAsIndices(Base):
    def advantages(self, batch: Batch) -> Tensor:
        weight = torch.tensor([1.0, 2.0, 3.0])[batch.groups.clamp(max=2)]
        return weight[:, None] * batch.scores[:, None] * batch.mask


class AveragesOverPadding(Base):
    def advantages(self, batch: Batch) -> Tensor:
        return batch.scores[:, None] * batch.mask / batch.mask.shape[1]


class LeaksIntoObservations(Base):
    def advantages(self, batch: Batch) -> Tensor:
        places = torch.arange(batch.max_length)
        return batch.scores[:, None] * (places < batch.lengths[:, None])


class ReadsMaskedValues(Base):
    needs = frozenset({"ref_logprobs"})

    def advantages(self, batch: Batch) -> Tensor:
        return (batch.scores + 0.01 * batch.ref_logprobs.sum(dim=1))[:, None] * batch.mask


class DiscountsObservations(Base):
    def advantages(self, batch: Batch) -> Tensor:
        return 0.9 ** torch.arange(batch.max_length) * batch.scores[:, None] * batch.mask


class DividesByTheSpread(Base):
    def advantages(self, batch: Batch) -> Tensor:
        same = (batch.groups[:, None] == batch.groups[None, :]).float()
        mean = same @ batch.scores / same.sum(dim=1)
        spread = (same @ (batch.scores - mean) ** 2 / (same.sum(dim=1) - 1)).sqrt()
        return ((batch.scores - mean) / spread)[:, None] * batch.mask


class LossWithoutTokens(Base):
    def loss(self, micro: MicroBatch) -> Loss:
        loss = micro.loss(-micro.advantages * micro.logprobs)
        return Loss(loss.value + 0.01 * (micro.totals.tokens == 0), loss.metrics)


class WrongSign(Base):
    def loss(self, micro: MicroBatch) -> Loss:
        return micro.loss(micro.advantages * micro.logprobs)


class PunishesReward(Base):
    def advantages(self, batch: Batch) -> Tensor:
        found = super().advantages(batch)
        assert isinstance(found, Tensor)
        return -found


class LossOfItsOwn(Base):
    def loss(self, micro: MicroBatch) -> Loss:
        losses = torch.where(micro.mask, -micro.advantages * micro.logprobs, 0.0)
        return Loss(losses.sum() / max(micro.totals.tokens, 1))


class CountsWeights(Base):
    def loss(self, micro: MicroBatch) -> Loss:
        weights = micro.batch["token_weights"] if "token_weights" in micro.batch else micro.mask.float()
        return micro.loss(-micro.advantages * micro.logprobs / weights.clamp(min=0.5))


class PaysTokensUnsaid(Base):
    def advantages(self, batch: Batch) -> Tensor:
        found = super().advantages(batch)
        assert isinstance(found, Tensor)
        return found + batch.step_rewards if "step_rewards" in batch else found


class PromisesToPayTokens(Base):
    reads_step_rewards = True


class CriticWithoutReturns(Base):
    needs = frozenset({"values"})

    def advantages(self, batch: Batch) -> Tensor:
        return (batch.scores[:, None] - batch["values"]) * batch.mask

    def critic_loss(self, micro: MicroBatch) -> Loss:
        return micro.loss((micro.values - micro.scores[:, None]) ** 2)


class CriticRunsAway(CriticWithoutReturns):
    def advantages(self, batch: Batch) -> Mapping[str, Tensor]:  # type: ignore[override]  # the wider type of the interface
        returns = batch.scores[:, None] * batch.mask
        return {"advantages": returns - batch["values"] * batch.mask, "returns": returns}

    def critic_loss(self, micro: MicroBatch) -> Loss:
        return micro.loss(-((micro.values - micro.returns) ** 2))


class CriticMeansOfSlices(CriticRunsAway):
    def critic_loss(self, micro: MicroBatch) -> Loss:
        return Loss(((micro.values - micro.returns) ** 2)[micro.mask].mean())


class Forgetful(Base):
    def __init__(self, config: NoOptions | None = None) -> None:
        super().__init__(config)
        self.scale = 1.0

    def advantages(self, batch: Batch) -> Tensor:
        found = super().advantages(batch)
        assert isinstance(found, Tensor)
        return self.scale * found

    def after_update(self, batch: Batch, metrics: Mapping[str, Metric]) -> Metrics:
        self.scale *= 0.9
        return {}


class HalfRemembers(Forgetful):
    def state(self) -> dict[str, Any]:
        return {"scale": self.scale}


class StateIsNoJSON(Base):
    def state(self) -> dict[str, Any]:
        return {"scale": torch.ones(1)}


class ChoosesTwice(Base):
    def select(self, batch: Batch) -> Sequence[int]:
        return [0, 0]


class ValidatesWithAText(Base):
    def validate(self, config: object) -> Sequence[str]:
        return "group_size: 1 does nothing"


WRONG: list[tuple[type[Algorithm[Any]], str, str]] = [
    (Unfinished, "class", "lacks advantages"),
    (DefaultOutOfBounds, "options", "at least 0"),
    (OptionWithoutHelp, "options", "no help text"),
    (EarlyButNotNeeded, "declarations", "old_logprobs"),
    (AsksForValuesOfTheActor, "declarations", "values"),
    (NeedsAText, "declarations", "needs is"),
    (ReadsUndeclared, "columns", "add 'ref_logprobs' to `needs`"),
    (ReadsEntropyUndeclared, "columns", "add 'entropy' to `trains_with`"),
    (ReadsOldLogprobsEarly, "columns", "add 'old_logprobs' to `early`"),
    (DeclaresTooMuch, "columns", "never reads"),
    (NeedsWhatNobodyHas, "columns", "ref_logprobs"),
    (WrongShape, "columns", "shape"),
    (ForgetsAdvantages, "columns", "without `advantages`"),
    (LossIsATensor, "columns", "micro.loss"),
    (LossIgnoresTheModel, "results", "without detaching"),
    (MetricIsAFloat, "results", "actor/x"),
    (DrawsFromTheGlobalGenerator, "determinism", "derive_seed"),
    (WritesIntoTheBatch, "determinism", "scores"),
    (CountsItsCalls, "determinism", "after_update"),
    (MeanOfTheSlice, "slicing", "micro.loss"),
    (MetricWithoutWeight, "slicing", "actor/drift"),
    (GroupsByPlace, "order", "batch.groups"),
    (GroupIdsAsIndices, "order", "batch.groups"),
    (AveragesOverPadding, "padding", "grows"),
    (LeaksIntoObservations, "masking", "batch.mask"),
    (ReadsMaskedValues, "masking", "masked"),
    (DiscountsObservations, "observations", "skip masked tokens"),
    (DividesByTheSpread, "degenerate", "not finite"),
    (LossWithoutTokens, "degenerate", "no token"),
    (WrongSign, "direction", "the sign"),
    (PunishesReward, "preference", "batch.scores"),
    (LossOfItsOwn, "weights", "not twice"),
    (CountsWeights, "weights", "not twice"),
    (PaysTokensUnsaid, "step_rewards", "does not say so"),
    (PromisesToPayTokens, "step_rewards", "would be lost"),
    (CriticWithoutReturns, "critic", "returns"),
    (CriticRunsAway, "critic", "away"),
    (CriticMeansOfSlices, "critic", "slices"),
    (Forgetful, "state", "after_update"),
    (HalfRemembers, "state", "load_state"),
    (StateIsNoJSON, "state", "JSON"),
    (ChoosesTwice, "selection", "at most once"),
    (ValidatesWithAText, "validation", "list of sentences"),
]


@pytest.mark.parametrize(("wrong", "check", "said"), WRONG, ids=[wrong.__name__ for wrong, _, _ in WRONG])
def test_a_wrong_algorithm_is_caught_by_its_check(wrong: type[Algorithm[Any]], check: str, said: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_algorithm(wrong)
    assert caught.value.check == check
    assert said in str(caught.value)
    assert f"algorithm {wrong.__name__} fails" in str(caught.value)


def test_a_check_can_be_skipped_with_a_reason_and_only_so() -> None:
    report = check_algorithm(WrongSign, skip={"direction": "it unlearns", "preference": "it unlearns"})
    assert report.skipped["direction"] == "it unlearns"
    with pytest.raises(ValueError, match="why"):
        check_algorithm(Right, skip={"direction": ""})
    with pytest.raises(ValueError, match="Did you mean 'direction'"):
        check_algorithm(Right, skip={"directoin": "it unlearns"})


def test_columns_of_an_extension_are_made_up_by_the_caller() -> None:
    class NeedsBaseline(Right):
        needs = frozenset({"greedy_reward"})

        def advantages(self, batch: Batch) -> Tensor:
            return (batch.scores - batch.greedy_reward)[:, None] * batch.mask

    columns: dict[str, Callable[[Batch], Tensor]] = {"greedy_reward": lambda batch: torch.full((len(batch),), 0.5)}
    assert "columns" in check_algorithm(NeedsBaseline, columns=columns).passed


def test_an_instance_is_checked_with_its_own_options() -> None:
    @dataclass(kw_only=True)
    class Sign:
        sign: float = option(1.0, "of the loss")

    class Signed(Right):
        config: Any

        @classmethod
        def config_class(cls) -> type[Any]:
            return Sign

        def loss(self, micro: MicroBatch) -> Loss:
            return micro.loss(-self.config.sign * micro.advantages * micro.logprobs)

    check_algorithm(Signed)
    with pytest.raises(ConformanceError, match="direction"):
        check_algorithm(Signed(Sign(sign=-1.0)))  # type: ignore[arg-type]  # its own config class
