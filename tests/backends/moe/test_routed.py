"""A model that asks a router: the same as before under `topk`, and another's choice under another."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rollstock import ModelSpec, NoOptions, RoutedTokens, Router, RouterCall, Routing, RunError
from rollstock.backends.models import build_model
from rollstock.backends.moe import Record, RoutedModel
from rollstock.manager import make_manager
from rollstock.routing import prefix_keys

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])


def told(count: int = TOKENS.numel(), *, exploring: bool = True) -> RoutedTokens:
    keys = prefix_keys(TOKENS[0], torch.arange(TOKENS.numel()))[:count]
    return RoutedTokens(keys=keys, versions=torch.ones_like(keys), exploring=exploring)


class TopKByHand(Router[NoOptions]):
    """The model's own rule, from the logits alone."""

    def route(self, call: RouterCall) -> Routing:
        experts = call.choose()
        return Routing(experts=experts, weights=call.weights(experts))


class LastExperts(Router[NoOptions]):
    """The experts with the highest numbers, whatever the logits."""

    def route(self, call: RouterCall) -> Routing:
        last = torch.arange(call.layer.num_experts - call.layer.top_k, call.layer.num_experts)
        experts = last.expand(len(call.logits), -1).contiguous()
        return Routing(experts=experts, weights=call.weights(experts))


def passed(model: Any, routed: RoutedModel | None) -> tuple[Tensor, dict[str, Tensor], Record | None]:
    """Logits, gradients of a loss, and the record."""
    model.zero_grad()
    if routed is None:
        logits, record = model(input_ids=TOKENS, use_cache=False).logits, None
        logits.log_softmax(-1)[..., 7].sum().backward()
    else:
        with routed.routing(told()) as record:
            logits = model(input_ids=TOKENS, use_cache=False).logits
            logits.log_softmax(-1)[..., 7].sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, record


def make(name: str) -> Router[Any]:
    return make_manager().create_as(Router, {"name": name})


@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe", "mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_topk_is_the_models_own_to_the_bit_with_its_gradients(name: str, moe_spec: Callable[..., ModelSpec]) -> None:
    model = build_model(moe_spec(name))
    logits, gradients, _ = passed(model, None)
    routed = RoutedModel(model, make("topk"), seed=1)
    again, routed_gradients, record = passed(model, routed)
    assert torch.equal(logits, again)
    assert gradients.keys() == routed_gradients.keys()
    assert all(torch.equal(gradients[key], routed_gradients[key]) for key in gradients)
    assert record is not None
    assert record.experts().shape == (TOKENS.numel(), len(routed.layers), 2)


@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe", "mixtral"])
def test_the_rule_alone_gives_the_models_numbers_to_the_bit(name: str, moe_spec: Callable[..., ModelSpec]) -> None:
    model = build_model(moe_spec(name))
    logits, gradients, _ = passed(model, None)
    again, routed_gradients, _ = passed(model, RoutedModel(model, TopKByHand(), seed=1))
    assert torch.equal(logits, again)
    assert all(torch.equal(gradients[key], routed_gradients[key]) for key in gradients)


def test_another_choice_goes_through_other_experts(moe_spec: Callable[..., ModelSpec]) -> None:
    model = build_model(moe_spec())
    logits, _, _ = passed(model, None)
    other, gradients, record = passed(model, RoutedModel(model, LastExperts(), seed=1))
    assert not torch.allclose(logits, other)
    assert record is not None
    assert record.experts().unique().tolist() == [6, 7]
    used = gradients["model.layers.0.mlp.experts.down_proj"].flatten(1).any(dim=1)
    assert used.tolist() == [False] * 6 + [True] * 2


def test_outside_of_a_pass_the_model_is_as_it_was(moe_spec: Callable[..., ModelSpec]) -> None:
    model = build_model(moe_spec())
    names = list(model.state_dict())
    logits, _, _ = passed(model, None)
    routed = RoutedModel(model, LastExperts(), seed=1)
    passed(model, routed)
    assert torch.equal(passed(model, None)[0], logits)
    assert list(model.state_dict()) == names


def test_several_passes_may_read_the_tokens_in_turn(moe_spec: Callable[..., ModelSpec]) -> None:
    model = build_model(moe_spec())
    routed = RoutedModel(model, make("gumbel"), seed=1)
    with torch.no_grad(), routed.routing(told()) as whole:
        model(input_ids=TOKENS, use_cache=False)
    with torch.no_grad(), routed.routing(told()) as parts:  # the second pass lacks the first's keys and values
        model(input_ids=TOKENS[:, :4], use_cache=False)
        model(input_ids=TOKENS[:, 4:], use_cache=False)
    assert torch.equal(whole.experts()[:4], parts.experts()[:4])
    assert parts.experts().shape == whole.experts().shape


def test_a_pass_over_other_tokens_than_were_told_is_an_error(moe_spec: Callable[..., ModelSpec]) -> None:
    model = build_model(moe_spec())
    routed = RoutedModel(model, make("topk"), seed=1)
    with pytest.raises(RunError, match="was said to have 7"), routed.routing(told(7)):
        model(input_ids=TOKENS, use_cache=False)
    with pytest.raises(RunError, match="was run without its router"), routed.routing(told()):
        pass
    with routed.routing(told()):
        model(input_ids=TOKENS, use_cache=False)


def test_an_answer_of_the_wrong_shape_is_an_error(moe_spec: Callable[..., ModelSpec]) -> None:
    class OneExpert(Router[NoOptions]):
        def route(self, call: RouterCall) -> Routing:
            return Routing(experts=call.own.experts[:, :1], weights=call.own.weights[:, :1])

    model = build_model(moe_spec())
    routed = RoutedModel(model, OneExpert(), seed=1)
    with pytest.raises(RunError, match=r"'OneExpert' gave experts \[10, 1\]"), routed.routing(told()):
        model(input_ids=TOKENS, use_cache=False)
