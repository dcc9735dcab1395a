"""The rule by which a model's own router turns logits into weights and a choice, found by asking it.

For `find`. The router is called with random hidden states, large enough that its logits differ; every rule that
`rollstock.Scoring` can state is then held against its answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rollstock import Scoring

_NUM_PROBES = 64
_SPREAD = 2.0  # standard deviation of the logits that are asked for
_TOLERANCE = 1e-5
_BIAS_NAMES = ("e_score_correction_bias", "expert_bias", "correction_bias")


def correction_bias(
    module: nn.Module, arguments: tuple[Any, ...], options: Mapping[str, Any], num_experts: int
) -> Tensor | None:
    """[E]: what a router adds to its scores for the choice alone: a buffer of its own, or an argument of its call."""
    for name in _BIAS_NAMES:
        found = options.get(name, getattr(module, name, None))
        if isinstance(found, Tensor) and found.numel() == num_experts:
            return found.detach().flatten()
    for value in arguments[1:]:
        if isinstance(value, Tensor) and value.numel() == num_experts and value.is_floating_point():
            return value.detach().flatten()
    return None


def find_scoring(module: nn.Module, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Scoring | None:
    """The rule of a router that was called with these arguments, hidden states first; None if there is none that fits.

    It fits if it gives the router's weights, and its choice as well.
    """
    answers = _ask(module, arguments, options)
    if answers is None:
        return None
    logits, weights, experts = answers
    bias = correction_bias(module, arguments, options, logits.shape[-1])
    fitting = []
    for rule in _rules():
        scale = _scale(rule.weights(logits, experts), weights)
        if scale is not None:
            fitting.append(replace(rule, scale=scale))
    # Two rules may be one mathematically, and round differently: the one that rounds as the model does comes first.
    fitting.sort(key=lambda rule: not torch.equal(rule.weights(logits, experts), weights))
    for rule in fitting:
        for grouped in _groupings(module, rule):
            chosen = grouped.choice_scores(logits, None if bias is None else bias.float()).topk(experts.shape[-1])
            if torch.equal(chosen.indices.sort(dim=-1).values, experts.sort(dim=-1).values):
                return grouped
    return None


def _ask(
    module: nn.Module, arguments: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The router's answer to random hidden states; None if it takes none."""
    hidden = arguments[0] if arguments else options.get("hidden_states")
    if not isinstance(hidden, Tensor):
        return None
    shape = (*(1 for _ in range(hidden.dim() - 2)), _NUM_PROBES, hidden.shape[-1])
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(hidden)

    def ask(states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if arguments:
            output = module(states, *arguments[1:], **options)
        else:
            output = module(**{**options, "hidden_states": states})
        logits, weights, experts = output
        return logits.float(), weights.float(), experts

    try:
        spread = float(ask(noise)[0].std())
        return ask(noise * (_SPREAD / spread if spread > 0 and math.isfinite(spread) else 1.0))
    except Exception:  # a router that needs more than hidden states: whatever it raises, its rule stays unknown
        return None


def _rules() -> Iterator[Scoring]:
    """The commonest first: where two are the same in effect, the plainer one is meant."""
    yield Scoring()
    yield Scoring(normalise=True)
    yield Scoring(function="sigmoid", normalise=True)
    yield Scoring(function="sigmoid")
    yield Scoring(function="softmax_of_chosen")


def _scale(found: Tensor, expected: Tensor) -> float | None:
    """The factor between the weights by a rule and the router's own; None if it is not the same for all."""
    if not (bool(found.isfinite().all()) and bool(expected.isfinite().all()) and float(found.min()) > 0):
        return None
    ratio = expected.double() / found.double()
    middle = float(ratio.median())
    if middle <= 0 or float((ratio - middle).abs().max()) > _TOLERANCE * middle:
        return None
    rounded = round(middle, 4)
    return rounded if abs(rounded - middle) <= _TOLERANCE * middle else middle


def _groupings(module: nn.Module, rule: Scoring) -> Iterator[Scoring]:
    """The rule with the module's groups of experts, where it has some; a group counts by its best expert or its best
    two."""
    groups = getattr(module, "num_group", getattr(module, "n_group", None))
    kept = getattr(module, "topk_group", None)
    if isinstance(groups, int) and isinstance(kept, int) and 1 <= kept < groups:
        for top in (2, 1):
            yield replace(rule, num_groups=groups, kept_groups=kept, group_top=top)
    yield rule
