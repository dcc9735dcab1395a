"""What the rollout kit works with: an engine with known weights, and requests for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rollstock.interfaces.device import Device
from rollstock.interfaces.model import ModelSpec
from rollstock.interfaces.rollout import GenerationRequest, Rollout
from rollstock.testing import models
from rollstock.testing.subject import Subject

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_NEW_TOKENS = 8
PROMPTS: tuple[tuple[int, ...], ...] = ((2, 11, 3, 12), (5, 11, 6, 12, 9), (4, 12), (1, 2, 3, 4, 5, 6, 7, 8, 9))
VERSION = 3


@dataclass(frozen=True)
class RolloutCase:
    """The engine under test, with the model, tokenizer and device that it is set up with."""

    subject: Subject[Rollout[Any]]
    model: ModelSpec
    tokenizer: Any
    device: Device[Any]
    tolerance: float

    def make(self) -> Rollout[Any]:
        """An engine with the weights of `plain`, as version 3."""
        engine = self.bare()
        engine.load_weights(self.weights(), VERSION)
        return engine

    def bare(self) -> Rollout[Any]:
        """An engine that has not been given weights yet."""
        engine = self.subject.make()
        engine.setup(self.model, self.device, self.tokenizer)
        return engine

    def plain(self) -> PreTrainedModel:
        """The model as transformers makes it."""
        return models.plain_model(self.model)

    def weights(self) -> list[tuple[str, Tensor]]:
        """A copy of the weights of `plain`, on the device."""
        place = self.device.torch_device()
        return [(name, tensor.to(place)) for name, tensor in models.named_weights(self.plain())]

    def context_length(self) -> int | None:
        """The most tokens that the model reads, if its config says so."""
        found = getattr(self.plain().config, "max_position_embeddings", None)
        return int(found) if found else None


def requests(
    *,
    prompts: Sequence[tuple[int, ...]] = PROMPTS,
    samples: int = 2,
    seed: int = 0,
    limits: Sequence[int | None] = (None,),
) -> list[GenerationRequest]:
    """`samples` requests for each prompt, side by side, each with a seed of its own; `limits` in turn."""
    return [
        GenerationRequest(prompt=prompt, seed=seed + 7919 * index + k, max_new_tokens=limits[(index + k) % len(limits)])
        for index, prompt in enumerate(prompts)
        for k in range(samples)
    ]
