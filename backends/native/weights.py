"""The engine's weights: taking the trainer's, by copy or by reference, and saying which they are.

For the native rollout. Names are those of the model in transformers; tied weights may come under either name.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rollstock import RunError, fingerprint, suggest
from rollstock.backends.models import named_weights


class EngineWeights:
    """The parameters and saved buffers of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = [name for name, _ in named_weights(model)]
        self._aliased: set[int] = set()
        self._arrived: str | None = None  # the fingerprint of what came, where it is not what is held

    def load(self, weights: Iterable[tuple[str, Tensor]], *, alias: bool) -> None:
        """Take `weights`; with `alias`, use the very tensors where type and device are the engine's.

        Raises RunError if a weight is unknown, of another shape, or missing (a saved buffer may be: it keeps its
        value).
        """
        held = self._model.state_dict(keep_vars=True)
        arrived: list[tuple[str, Tensor]] = []
        names: list[str] = []
        missing = {id(tensor): name for name, tensor in held.items() if isinstance(tensor, nn.Parameter)}
        for name, tensor in weights:
            if name not in held:
                raise RunError(f"the rollout's model has no weight {name!r}. {suggest(name, list(held))[:200]}")
            mine = held[name]
            if tensor.shape != mine.shape:
                raise RunError(
                    f"weight {name!r} is {list(tensor.shape)} at the trainer, {list(mine.shape)} in the rollout"
                )
            self._take(mine, tensor.detach(), alias=alias)
            missing.pop(id(mine), None)
            names.append(name)
            if tensor.dtype != mine.dtype:
                arrived.append((name, tensor))
        if missing:
            raise RunError(
                f"{len(missing)} weights did not arrive at the rollout, the first is {next(iter(missing.values()))!r}"
            )
        self._names = names
        self._arrived = self._fingerprint_of_arrived(dict(arrived)) if arrived else None

    def _take(self, mine: Tensor, tensor: Tensor, *, alias: bool) -> None:
        if alias and tensor.dtype == mine.dtype and tensor.device == mine.device:
            mine.data = tensor
            self._aliased.add(id(mine))
        elif id(mine) in self._aliased:  # writing into it would write into the trainer
            mine.data = tensor.to(mine.device, mine.dtype, copy=True)
            self._aliased.discard(id(mine))
        else:
            with torch.no_grad():
                mine.copy_(tensor)

    def _fingerprint_of_arrived(self, others: dict[str, Tensor]) -> str:
        held = self._model.state_dict(keep_vars=True)
        return fingerprint((name, others.get(name, held[name])) for name in self._names)

    def fingerprint(self) -> str:
        """The fingerprint of the weights, under the names they came with."""
        if self._arrived is not None:
            return self._arrived
        held = self._model.state_dict(keep_vars=True)
        return fingerprint((name, held[name]) for name in self._names)
