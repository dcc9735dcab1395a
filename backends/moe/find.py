"""The routers of a transformers model, found by what they return.

In transformers, a mixture-of-experts layer is a module with a child named `experts` and another that is called for the
routing. Nearly all architectures' routers return (logits [n, E], weights [n, k], experts [n, k]), under many class
names and with small differences in how weights follow from logits. Rather than a list of names, one small forward
pass shows which modules return that, and `scoring` finds out their rule. Architectures that do otherwise are refused,
until somebody registers an adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from rollstock import RouterLayer, Scoring, UserError
from rollstock.backends.moe.scoring import correction_bias, find_scoring

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NUM_TOKENS = 8


class RouterAdapter(Protocol):
    """How to read and change what the routers of one class return, and how they score."""

    def read(self, module: nn.Module, output: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [n, E], weights [n, k] and experts [n, k] int64, from what the module's forward returned."""

    def write(self, module: nn.Module, output: Any, weights: Tensor, experts: Tensor) -> Any:
        """What the module shall return in place of `output`."""

    def scoring(self, module: nn.Module) -> Scoring:
        """How weights and choice follow from the logits."""


@dataclass(frozen=True)
class _Seen:
    """One call of a module in the small forward pass."""

    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    output: Any


@dataclass(frozen=True)
class FoundRouter:
    """A router of a model: its module, the layer as plugins are told of it, and how to read and change its output."""

    module: nn.Module
    layer: RouterLayer
    adapter: RouterAdapter

    def bias(self, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Tensor | None:
        """[E]: what the model's own router adds to the scores for its choice, in a call with these arguments."""
        return correction_bias(self.module, arguments, options, self.layer.num_experts)


class _Triple:
    """The adapter of routers that return (logits, weights, experts), with the rule that was found out."""

    def __init__(self, scoring: Scoring) -> None:
        self._scoring = scoring

    def read(self, module: nn.Module, output: Any) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, experts = output
        return logits, weights, experts

    def write(self, module: nn.Module, output: Any, weights: Tensor, experts: Tensor) -> Any:
        return (output[0], weights, experts)

    def scoring(self, module: nn.Module) -> Scoring:
        return self._scoring


_adapters: dict[str, RouterAdapter] = {}


def register_adapter(class_name: str, adapter: RouterAdapter) -> None:
    """Make the routers of a class known: every module whose class has this name is then a router.

    Raises ValueError if the class has an adapter already.
    """
    if class_name in _adapters:
        raise ValueError(f"the router class {class_name!r} has an adapter already: {_adapters[class_name]!r}")
    _adapters[class_name] = adapter


def has_experts(model: nn.Module) -> bool:
    """Whether this is a mixture of experts: `find_routers` finds routers in it, or says why it understands none."""
    return any(_has_experts(module) or type(module).__name__ in _adapters for module in model.modules())


@torch.no_grad()
def find_routers(model: PreTrainedModel) -> list[FoundRouter]:
    """The routers of a model, in the order of its layers. Call it before the attention is replaced.

    Raises UserError for a dense model, and for one whose routers, or whose rule of choosing, are not understood.
    """
    blocks = [name for name, module in model.named_modules() if _has_experts(module)]
    registered = {name: module for name, module in model.named_modules() if type(module).__name__ in _adapters}
    if not blocks and not registered:
        raise UserError(
            f"router: {type(model).__name__} is a dense model, without experts to choose; leave `router` out of the "
            "config, or train a mixture-of-experts model"
        )
    seen = _watch(model, blocks, registered)
    found: list[FoundRouter] = []
    for name, call in seen.items():
        module = model.get_submodule(name)
        adapter = _adapters.get(type(module).__name__)
        if adapter is None:
            adapter = _Triple(_scoring(model, module, call))
        logits, _, experts = adapter.read(module, call.output)
        layer = RouterLayer(
            index=len(found),
            name=name,
            num_experts=logits.shape[-1],
            top_k=experts.shape[-1],
            scoring=adapter.scoring(module),
        )
        found.append(FoundRouter(module, layer, adapter))
    _check_all_found(model, blocks, [router.layer.name for router in found])
    return found


def _has_experts(module: nn.Module) -> bool:
    return isinstance(getattr(module, "experts", None), nn.Module)


def _watch(model: PreTrainedModel, blocks: list[str], registered: Mapping[str, nn.Module]) -> dict[str, _Seen]:
    """The modules that returned a routing in one small forward pass, in the order of their names in the model."""
    candidates = dict(registered)
    for block in blocks:
        for child, module in model.get_submodule(block).named_children():
            if child != "experts":
                candidates[f"{block}.{child}" if block else child] = module
    seen: dict[str, _Seen] = {}

    def watcher(name: str) -> Any:
        def watch(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
            if name in registered or _is_routing(output):
                seen[name] = _Seen(arguments, options, output)

        return watch

    hooks = [module.register_forward_hook(watcher(name), with_kwargs=True) for name, module in candidates.items()]
    try:
        embedding = model.get_input_embeddings()
        vocabulary = embedding.num_embeddings if isinstance(embedding, nn.Embedding) else 2
        tokens = torch.arange(_NUM_TOKENS, device=model.device)[None] % vocabulary
        model(input_ids=tokens, use_cache=False)
    except Exception as error:  # whatever a model trips over
        raise UserError(
            f"router: {type(model).__name__} cannot be looked into: its forward pass fails with "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    return dict(sorted(seen.items(), key=lambda item: order[item[0]]))


def _is_routing(output: Any) -> bool:
    """Whether this is (logits [n, E], weights [n, k], experts [n, k])."""
    if not (isinstance(output, tuple) and len(output) == 3 and all(isinstance(part, Tensor) for part in output)):
        return False
    logits, weights, experts = output
    return (
        logits.dim() == 2
        and weights.shape == experts.shape
        and weights.dim() == 2
        and len(logits) == len(weights) == _NUM_TOKENS
        and logits.is_floating_point()
        and weights.is_floating_point()
        and not experts.is_floating_point()
    )


def _scoring(model: PreTrainedModel, module: nn.Module, call: _Seen) -> Scoring:
    scoring = find_scoring(module, call.arguments, call.options)
    if scoring is None:
        raise UserError(_refusal(model, f"the rule by which its {type(module).__name__} weighs experts is not known"))
    return scoring


def _check_all_found(model: PreTrainedModel, blocks: list[str], found: list[str]) -> None:
    """Raise UserError for a layer of experts without a router: it would go its own way in silence."""
    for block in blocks:
        inside = f"{block}." if block else ""
        if not any(name.startswith(inside) for name in found):
            kind = type(model.get_submodule(block)).__name__
            raise UserError(_refusal(model, f"no part of its {kind} returns logits, weights and experts"))


def _refusal(model: PreTrainedModel, reason: str) -> str:
    return (
        f"router: the routers of {type(model).__name__} cannot be replaced: {reason}; leave `router` out of the "
        "config, or register an adapter (rollstock.backends.moe.register_adapter)"
    )
