"""A transformers model whose routers ask a plugin.

For backends and engines. Between `with` statements the model is as it was: the plugin is asked only inside
`RoutedModel.routing`, which says what the tokens of a forward pass are, and records what was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollstock import RoutedTokens, Router, RouterCall, RouterLayer, Routing, RunError, UserError
from rollstock.backends.moe.find import FoundRouter, find_routers
from rollstock.routing import captured_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Record:
    """What was chosen for some tokens, in one forward pass or in several that read them in turn.

    A layer that is computed again, for its gradient, begins with the first token again, and is not recorded again.
    """

    def __init__(self, tokens: RoutedTokens, num_layers: int) -> None:
        self.tokens = tokens
        self._read = [0] * num_layers  # tokens that each layer was asked about
        self._asked: list[list[tuple[RouterCall, Routing]]] = [[] for _ in range(num_layers)]

    def take(self, layer: RouterLayer, count: int) -> tuple[RoutedTokens, bool]:
        """The next `count` tokens of a layer, and whether it reads them for the first time.

        Raises RunError if there are not so many.
        """
        total = len(self.tokens.keys)
        read = self._read[layer.index]
        start = read % total if total else 0
        if start + count > total:
            raise RunError(
                f"the layer {layer.name} routes {count} tokens after {start} others, but the pass was said to have "
                f"{total}: this model's layers do not all see the tokens that it reads"
            )
        self._read[layer.index] += count
        return (self.tokens if count == total else self.tokens.part(start, start + count)), read < total

    def check_complete(self, layers: Sequence[RouterLayer]) -> None:
        """Raise RunError if a layer was not asked about every token: whoever ran the model went around its router."""
        for layer in layers:
            if self._read[layer.index] < len(self.tokens.keys):
                raise RunError(
                    f"the layer {layer.name} was run without its router for {len(self.tokens.keys)} tokens, of which "
                    f"it was asked about {self._read[layer.index]}"
                )

    def add(self, call: RouterCall, answer: Routing) -> None:
        """Keep what was asked and answered."""
        self._asked[call.layer.index].append((call, answer))

    def experts(self) -> Tensor:
        """[n, layers, k] in the type of captured experts: what each token was given."""
        dtype = captured_dtype(max(asked[0][0].layer.num_experts for asked in self._asked))
        by_layer = [torch.cat([answer.experts for _, answer in asked]) for asked in self._asked]
        return torch.stack(by_layer, dim=1).to(dtype)

    def routing(self, layer: int, index: Tensor) -> Routing:
        """A layer's routing of the tokens at `index`, with probabilities, which carry gradients; of a single pass."""
        ((call, answer),) = self._asked[layer]
        whole = answer.probabilities
        return Routing(
            experts=answer.experts[index],
            weights=answer.weights[index],
            probabilities=call.probabilities(call.logits[index]) if whole is None else whole[index],
        )


class RoutedModel:
    """A model with its routers replaced by a plugin's choice.

    Raises UserError for a dense model, for one whose routers are not understood, and for one that the plugin refuses.
    """

    def __init__(self, model: PreTrainedModel, router: Router[Any], *, seed: int) -> None:
        """`seed`: of whatever the router draws; generation and training must have the same."""
        found = find_routers(model)
        self.router = router
        self.layers: list[RouterLayer] = [each.layer for each in found]
        if router.captures and len({layer.top_k for layer in self.layers}) > 1:
            raise UserError(
                f"router: {router.plugin_name!r} keeps the experts of all layers in one column, but the layers of "
                f"{type(model).__name__} choose {sorted({layer.top_k for layer in self.layers})} experts"
            )
        self._record: Record | None = None
        router.setup(self.layers, seed=seed)
        for each in found:
            each.module.forward = self._replaced(each, each.module.forward)

    @property
    def num_experts(self) -> int:
        """The most experts of a layer."""
        return max(layer.num_experts for layer in self.layers)

    @contextmanager
    def routing(self, tokens: RoutedTokens) -> Iterator[Record]:
        """Let the plugin route the forward passes inside, which read `tokens` in this order, and their backward."""
        assert self._record is None, "one record at a time"
        self._record = Record(tokens, len(self.layers))
        try:
            yield self._record
            self._record.check_complete(self.layers)
        finally:
            self._record = None

    def _replaced(self, found: FoundRouter, own: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of one router; kept on the instance, so that weights keep their names."""

        def forward(*arguments: Any, **options: Any) -> Any:
            output = own(*arguments, **options)
            record = self._record
            if record is None:
                return output
            logits, weights, experts = found.adapter.read(found.module, output)
            tokens, is_first = record.take(found.layer, len(logits))
            call = RouterCall(
                logits=logits,
                own=Routing(experts=experts, weights=weights),
                layer=found.layer,
                tokens=tokens,
                bias=found.bias(arguments, options),
            )
            answer = self._ask(call)
            if is_first:
                record.add(call, answer)
            return found.adapter.write(found.module, output, answer.weights, answer.experts)

        return forward

    def _ask(self, call: RouterCall) -> Routing:
        answer = self.router.route(call)
        if answer.experts.shape != call.own.experts.shape or answer.weights.shape != call.own.weights.shape:
            raise RunError(
                f"router {self.router.plugin_name!r} gave experts {list(answer.experts.shape)} and weights "
                f"{list(answer.weights.shape)} at {call.layer.name}, where the model has {list(call.own.experts.shape)}"
            )
        return answer
