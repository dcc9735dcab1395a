"""Every check of the backend kit can fail."""

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollstock import (
    Backend,
    BackendState,
    Batch,
    Device,
    Loss,
    LossFunction,
    Metric,
    Metrics,
    MicroBatch,
    ModelSpec,
    UserError,
)
from rollstock.backends.torch.backend import TorchBackend
from rollstock.backends.torch.layout import Layout
from rollstock.testing import ConformanceError, check_backend
from rollstock.testing.backend import CHECKS

OPTIONS = {"learning_rate": 1e-3}


class KeepsNothing(TorchBackend):
    def share_kept(self, world_size: int) -> float:
        return 1 - 1 / world_size


class IgnoresTheSeed(TorchBackend):
    def setup(self, model: ModelSpec, device: Device[Any], *, trainable: bool, total_updates: int) -> None:
        drawn = dataclasses.replace(model, seed=random.randrange(2**30))
        super().setup(drawn, device, trainable=trainable, total_updates=total_updates)


class FingerprintIsAConstant(TorchBackend):
    def fingerprint(self) -> str:
        return "0" * 32


class NamesOfAWrapper(TorchBackend):
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((f"module.{name}", tensor) for name, tensor in super().weights())


class TiedTwice(TorchBackend):
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        found = dict(super().weights())
        return iter([*found.items(), ("lm_head.weight", found["model.embed_tokens.weight"])])


class IgnoresTemperature(TorchBackend):
    def forward(self, batch: Batch, columns: Sequence[str], *, temperature: float, micro_batches: Any) -> Any:
        return super().forward(batch, columns, temperature=1.0, micro_batches=micro_batches)


class ForwardIsPadded(TorchBackend):
    def forward(self, batch: Batch, columns: Sequence[str], **rest: Any) -> dict[str, Tensor]:
        return {name: batch.pad(value) for name, value in super().forward(batch, columns, **rest).items()}


class PlacesInTheOrderOfTheCut(TorchBackend):
    def forward(self, batch: Batch, columns: Sequence[str], *, temperature: float, micro_batches: Any) -> Any:
        found = super().forward(batch, columns, temperature=temperature, micro_batches=micro_batches)
        parts = {name: value.split(batch.lengths.tolist()) for name, value in found.items()}
        return {name: torch.cat([value[i] for cut in micro_batches for i in cut]) for name, value in parts.items()}


class Update(TorchBackend):
    """What the wrong updates below have in common: they change the loss on its way to the right one."""

    def changed(self, loss: Loss, num_slices: int) -> Loss:
        return loss

    def update(self, batch: Batch, loss: LossFunction, *, micro_batches: Any, **rest: Any) -> Metrics:
        def other(micro: MicroBatch) -> Loss:
            return self.changed(loss(micro), len(micro_batches))

        return super().update(batch, other, micro_batches=micro_batches, **rest)


class MeanOverMicroBatches(Update):
    def changed(self, loss: Loss, num_slices: int) -> Loss:
        return Loss(loss.value / num_slices, loss.metrics)


class Ascends(Update):
    def changed(self, loss: Loss, num_slices: int) -> Loss:
        return Loss(-loss.value, loss.metrics)


class DropsMetrics(TorchBackend):
    def update(self, *arguments: Any, **options: Any) -> Metrics:
        found = super().update(*arguments, **options)
        return {name: metric for name, metric in found.items() if name != "lr"}


class HidesSkippedUpdates(TorchBackend):
    def update(self, *arguments: Any, **options: Any) -> Metrics:
        return {**super().update(*arguments, **options), "skipped_updates": Metric(0.0, 1.0, "sum")}


class DecaysOnNaN(TorchBackend):
    def update(self, *arguments: Any, **options: Any) -> Metrics:
        found = super().update(*arguments, **options)
        if found["skipped_updates"].value:
            next(self.weights())[1].mul_(0.99)
        return found


class ForgetsTheOptimizer(TorchBackend):
    def load_state(self, state: BackendState) -> None:
        kept = self.state()
        moments = {name: tensor.clone() for name, tensor in kept.tensors["optimizer"].items()}
        super().load_state(BackendState({"model": state.tensors["model"], "optimizer": moments}, kept.values))


class StateIsNoJSON(TorchBackend):
    def state(self) -> BackendState:
        found = super().state()
        return BackendState(found.tensors, {**found.values, "when": {1, 2}})


class TakesWhatFits(TorchBackend):
    def load_state(self, state: BackendState) -> None:
        try:
            super().load_state(state)
        except UserError:
            return


class ValuesAreFixed(TorchBackend):
    def update(self, batch: Batch, loss: LossFunction, *, outputs: Sequence[str], **rest: Any) -> Metrics:
        def detached(micro: MicroBatch) -> Loss:
            found = loss(micro)
            return Loss(found.value * 0, found.metrics) if "values" in outputs else found

        return super().update(batch, detached, outputs=outputs, **rest)


class ValueHeadForGenerators(TorchBackend):
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().weights()
        if self._network.value_head is not None:
            yield "value_head.weight", self._network.value_head.weight.detach()


class SharedValuesAreFixed(TorchBackend):
    def _outputs(
        self, batch: Batch, layout: Layout | None, names: Sequence[str], temperature: float
    ) -> dict[str, Tensor]:
        found = super()._outputs(batch, layout, names, temperature)
        return {n: v.detach() if n == "values" and len(found) > 1 else v for n, v in found.items()}


class ScoresAreFixed(ValuesAreFixed):
    def _outputs(
        self, batch: Batch, layout: Layout | None, names: Sequence[str], temperature: float
    ) -> dict[str, Tensor]:
        return {n: v.detach() for n, v in super()._outputs(batch, layout, names, temperature).items()}


class ScoresOneTokenEarly(TorchBackend):
    def setup(self, model: ModelSpec, device: Device[Any], *, trainable: bool, total_updates: int) -> None:
        super().setup(model, device, trainable=trainable, total_updates=total_updates)
        self._early = self._network.head == "score"

    def _outputs(
        self, batch: Batch, layout: Layout | None, names: Sequence[str], temperature: float
    ) -> dict[str, Tensor]:
        if self._early:
            self._network.head = "value"
        try:
            return super()._outputs(batch, layout, ["values"] if self._early else names, temperature)
        finally:
            if self._early:
                self._network.head = "score"

    def forward(self, batch: Batch, columns: Sequence[str], **rest: Any) -> dict[str, Tensor]:
        found = super().forward(batch, ["values"] if self._early else columns, **rest)
        return {"token_scores": found["values"]} if self._early else found

    def update(self, batch: Batch, loss: LossFunction, **rest: Any) -> Metrics:
        def renamed(micro: MicroBatch) -> Loss:
            if self._early:
                micro = MicroBatch(micro.batch, micro.totals, {"token_scores": micro.values})
            return loss(micro)

        return super().update(batch, renamed, **rest)


class AlwaysTrains(TorchBackend):
    def setup(self, model: ModelSpec, device: Device[Any], *, trainable: bool, total_updates: int) -> None:
        super().setup(model, device, trainable=True, total_updates=total_updates)


class ExportsNothing(TorchBackend):
    def save_config(self, path: Path) -> None:
        return


class ExportsTheStart(TorchBackend):
    def export_weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor * 0.5 for name, tensor in super().export_weights(tensors).items()}


class FailsOnClose(TorchBackend):
    def close(self) -> None:
        raise RuntimeError("nothing to close")


WRONG: list[tuple[type[Backend[Any]], str, str]] = [
    (KeepsNothing, "share", "{1: 0.0, 2: 0.5, 4: 0.75, 8: 0.875}"),
    (IgnoresTheSeed, "seed", "model.seed"),
    (FingerprintIsAConstant, "seed", "not that of `weights()`"),
    (NamesOfAWrapper, "weights", "module.model"),
    (TiedTwice, "weights", "tied"),
    (IgnoresTemperature, "forward", "temperature 0.7"),
    (ForwardIsPadded, "forward", "one float32 number"),
    (PlacesInTheOrderOfTheCut, "slicing", "single trajectories"),
    (MeanOverMicroBatches, "slicing", "gradient's norm"),
    (Ascends, "update", "less likely"),
    (DropsMetrics, "update", "'lr'"),
    (HidesSkippedUpdates, "skipping", "skipped_updates is 0"),
    (DecaysOnNaN, "skipping", "changes weights"),
    (ForgetsTheOptimizer, "state", "not those of the state"),
    (StateIsNoJSON, "state", "JSON"),
    (TakesWhatFits, "misfit", "without a word"),
    (ValuesAreFixed, "values", "squared error"),
    (ValueHeadForGenerators, "shared", "fingerprint"),
    (SharedValuesAreFixed, "shared", "values not nearer"),
    (ScoresAreFixed, "score", "squared error of the scores"),
    (ScoresOneTokenEarly, "score", "the exported classifier says"),
    (AlwaysTrains, "reference", "optimizer"),
    (ExportsNothing, "export", "config.json"),
    (ExportsTheStart, "export", "exported"),
    (FailsOnClose, "close", "nothing to close"),
]


@pytest.mark.parametrize(("wrong", "check", "said"), WRONG, ids=[wrong.__name__ for wrong, _, _ in WRONG])
def test_a_wrong_backend_is_caught_by_its_check(
    wrong: type[Backend[Any]], check: str, said: str, all_but: Callable[..., Any]
) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_backend(wrong, options=OPTIONS, skip=all_but(CHECKS, check))
    assert caught.value.check == check
    assert said in str(caught.value)


def test_a_learning_rate_of_zero_is_pointed_out() -> None:
    with pytest.raises(ConformanceError, match="learning rate") as caught:
        check_backend("torch", options={"learning_rate": 0.0})
    assert caught.value.check == "update"
