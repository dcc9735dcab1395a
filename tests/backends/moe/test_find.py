"""Which modules of a model are its routers, and by which rule they weigh."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollstock import ModelSpec, Scoring, UserError
from rollstock.backends.models import build_model
from rollstock.backends.moe import find, find_routers, register_adapter

RULES = {
    "qwen3_moe": Scoring(normalise=True),
    "olmoe": Scoring(),
    "mixtral": Scoring(normalise=True),
    "qwen2_moe": Scoring(),
    "deepseek_v3": Scoring(
        function="sigmoid", normalise=True, scale=2.5, num_groups=4, kept_groups=2, group_top=2
    ),
    "deepseek_v2": Scoring(num_groups=4, kept_groups=2, group_top=1),
    "granitemoe": Scoring(function="softmax_of_chosen"),
    "gpt_oss": Scoring(function="softmax_of_chosen"),
    "minimax_m2": Scoring(function="sigmoid", normalise=True),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_the_rule_of_an_architecture_is_found_out(name: str, moe_spec: Callable[..., ModelSpec]) -> None:
    found = find_routers(build_model(moe_spec(name)))
    dense = 1 if name.startswith("deepseek") else 0
    assert [router.layer.index for router in found] == list(range(2 - dense))
    assert [router.layer.name.split(".")[2] for router in found] == [str(i) for i in range(dense, 2)]
    for router in found:
        assert (router.layer.num_experts, router.layer.top_k) == (8, 2)
        assert router.layer.scoring == RULES[name]


@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe", "mixtral"])
def test_the_rule_gives_the_models_own_weights_to_the_bit(name: str, moe_spec: Callable[..., ModelSpec]) -> None:
    for router in find_routers(build_model(moe_spec(name))):
        hidden = torch.randn(50, 32, generator=torch.Generator().manual_seed(1))
        logits, weights, experts = router.module(hidden)
        assert torch.equal(router.layer.scoring.weights(logits, experts), weights)
        assert torch.equal(router.layer.scoring.choice_scores(logits).topk(2).indices, experts)


def test_a_correction_bias_is_part_of_the_choice(moe_spec: Callable[..., ModelSpec]) -> None:
    (router,) = find_routers(build_model(moe_spec("deepseek_v3")))
    favoured: Tensor = router.module.e_score_correction_bias  # type: ignore[assignment]
    favoured[3] = 100.0
    hidden = torch.randn(50, 32, generator=torch.Generator().manual_seed(1))
    logits, weights, experts = router.module(hidden)
    bias = router.bias((hidden,), {})
    assert bool((experts == 3).any(dim=-1).all())
    chosen = router.layer.scoring.choice_scores(logits, bias).topk(2).indices
    assert torch.equal(chosen.sort(dim=-1).values, experts.sort(dim=-1).values)
    torch.testing.assert_close(router.layer.scoring.weights(logits, experts), weights)


def test_looking_into_a_model_leaves_it_and_the_generators_as_they_were(moe_spec: Callable[..., ModelSpec]) -> None:
    model = build_model(moe_spec())
    before, state = model.state_dict(), torch.get_rng_state()
    kept = {name: tensor.clone() for name, tensor in before.items()}
    find_routers(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules() if type(module).__name__.endswith("Router"))


def test_a_dense_model_is_refused(moe_spec: Callable[..., ModelSpec]) -> None:
    with pytest.raises(UserError, match="LlamaForCausalLM is a dense model, without experts"):
        find_routers(build_model(moe_spec("llama")))


def test_a_router_whose_rule_is_not_known_is_refused(moe_spec: Callable[..., ModelSpec]) -> None:
    with pytest.raises(UserError, match="PhimoeTopKRouter weighs experts is not known.*register an adapter"):
        find_routers(build_model(moe_spec("phimoe")))


def test_a_router_that_returns_something_else_is_refused(moe_spec: Callable[..., ModelSpec]) -> None:
    with pytest.raises(UserError, match="no part of its Llama4TextMoe returns logits, weights and experts"):
        find_routers(build_model(moe_spec("llama4_text")))


class Llama4Adapter:
    """Llama 4 weighs all experts, those not chosen with 0: the choice is read from the weights and written there."""

    def read(self, module: nn.Module, output: Any) -> tuple[Tensor, Tensor, Tensor]:
        scores, logits = output
        weights, experts = scores.topk(int(module.top_k))  # type: ignore[arg-type]
        return logits, weights, experts

    def write(self, module: nn.Module, output: Any, weights: Tensor, experts: Tensor) -> Any:
        return torch.zeros_like(output[0]).scatter(-1, experts, weights), output[1]

    def scoring(self, module: nn.Module) -> Scoring:
        return Scoring(function="sigmoid")


@pytest.fixture
def _llama4() -> Iterator[None]:
    register_adapter("Llama4Router", Llama4Adapter())
    yield
    del find._adapters["Llama4Router"]


@pytest.mark.usefixtures("_llama4")
def test_an_adapter_makes_a_class_known(moe_spec: Callable[..., ModelSpec]) -> None:
    found = find_routers(build_model(moe_spec("llama4_text")))
    assert [router.layer.name for router in found] == [f"model.layers.{i}.feed_forward.router" for i in range(2)]
    with pytest.raises(ValueError, match="has an adapter already"):
        register_adapter("Llama4Router", Llama4Adapter())
