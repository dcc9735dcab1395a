"""The router kind: what chooses the experts of a mixture-of-experts layer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rollstock.plugin import C, Plugin

if TYPE_CHECKING:
    from torch import Tensor

    from rollstock.metrics import Metrics
    from rollstock.routing import RouterCall, RouterLayer, Routing


class Router(Plugin[C]):
    """Replaces the choice of experts in every mixture-of-experts layer of a model, in generation and in training alike.

    An answer depends on the call and on the router's state alone, never on the tokens beside it or on how often it was
    asked: a layer may be computed again for its gradient. Randomness comes from `RouterCall.uniforms`.
    """

    captures: ClassVar[bool] = False
    """Whether the experts that are chosen in generation come back in training, as `RouterCall.replayed`."""

    def setup(self, layers: Sequence[RouterLayer], *, seed: int) -> None:
        """Told once, before everything else: the layers of the model, and the seed of what is drawn, one for all roles.

        Raises UserError for a model that it cannot route.
        """

    @abstractmethod
    def route(self, call: RouterCall) -> Routing:
        """Choose `call.layer.top_k` experts for every token; gradients reach `call.logits` through the weights."""

    def auxiliary_loss(self, layers: Sequence[Routing], rows: Tensor, num_sequences: int) -> Tensor | None:
        """A loss [] to add in training, None for none; losses of slices must add up to that of the whole.

        layers: each layer's routing of the n response tokens of a slice, with `probabilities`, which carry gradients;
        rows [n]: the trajectory of the slice that each belongs to; num_sequences: trajectories of the whole update.
        """
        return None

    def after_update(self, load: Tensor) -> Metrics:
        """Called after each update of the model: `load` [layers, E] float64 counts the response tokens that each expert
        got, over the whole update. Returns metrics to add."""
        return {}

    def state(self) -> dict[str, Any]:
        """What must survive a restart and reach the generators with the weights (balancing biases), as JSON."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
