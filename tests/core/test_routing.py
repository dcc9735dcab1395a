"""What a router is told: scores by a model's own rule, keys of tokens, and numbers that are drawn from them."""

import dataclasses

import pytest
import torch

from rollstock import RouterLayer, Scoring
from rollstock.routing import captured_dtype, filled, missing, prefix_keys, token_keys
from rollstock.testing import make_router_call

LOGITS = torch.tensor([[2.0, 0.0, 1.0, -1.0]])
P = [0.6439, 0.0871, 0.2369, 0.0321]  # softmax of LOGITS


@pytest.mark.parametrize(
    ("scoring", "expected"),
    [
        (Scoring(), [P[2], P[3]]),
        (Scoring(normalise=True), [0.8808, 0.1192]),
        (Scoring(function="softmax_of_chosen"), [0.8808, 0.1192]),
        (Scoring(function="sigmoid"), [0.7311, 0.2689]),
        (Scoring(function="sigmoid", normalise=True, scale=2.5), [2.5 * 0.7311, 2.5 * 0.2689]),
    ],
)
def test_weights_by_each_rule(scoring: Scoring, expected: list[float]) -> None:
    assert scoring.weights(LOGITS, torch.tensor([[2, 3]]))[0].tolist() == pytest.approx(expected, abs=5e-4)


def test_probabilities_sum_to_one_for_sigmoids_too() -> None:
    assert Scoring().probabilities(LOGITS)[0].tolist() == pytest.approx(P, abs=1e-4)
    assert float(Scoring(function="sigmoid").probabilities(LOGITS).sum()) == pytest.approx(1.0)


def test_only_experts_of_the_best_groups_may_be_chosen() -> None:
    """Groups (0, 1), (2, 3): the second has the better pair, the first the best expert."""
    logits = torch.tensor([[2.0, -3.0, 1.5, 1.4]])
    by_pair = Scoring(function="sigmoid", num_groups=2, kept_groups=1, group_top=2).choice_scores(logits)
    by_best = Scoring(function="sigmoid", num_groups=2, kept_groups=1, group_top=1).choice_scores(logits)
    assert by_pair.isinf()[0].tolist() == [True, True, False, False]
    assert by_best.isinf()[0].tolist() == [False, False, True, True]


def test_a_bias_moves_the_choice_and_the_models_own_is_added_to_it() -> None:
    call = make_router_call(LOGITS)
    assert call.choose().tolist() == [[0, 2]]
    assert call.choose(bias=torch.tensor([0.0, 0.0, 0.0, 1.0])).tolist() == [[3, 0]]
    own = dataclasses.replace(call, bias=torch.tensor([-2.0, 0.0, 0.0, 0.0]))
    assert own.choose().tolist() == [[2, 1]]
    assert own.choose(bias=torch.tensor([2.0, 0.0, 0.0, 0.0])).tolist() == [[0, 2]]


def test_a_key_is_that_of_a_token_and_all_before_it() -> None:
    tokens = torch.tensor([5, 3, 5, 3])
    keys = prefix_keys(tokens, torch.arange(4))
    assert len(keys.unique()) == 4
    assert torch.equal(prefix_keys(torch.tensor([5, 3, 9]), torch.arange(3))[:2], keys[:2])
    assert prefix_keys(torch.tensor([3, 5]), torch.arange(2))[1] != keys[1]
    continued = keys[2] + token_keys(tokens[3:], torch.tensor([3]))
    assert int(continued) == int(keys[3])


def test_uniforms_depend_on_all_that_they_are_named_by() -> None:
    layers = [RouterLayer(index=i, name="gate", num_experts=4, top_k=2, scoring=Scoring()) for i in range(2)]
    logits = torch.zeros(300, 4)
    numbers = make_router_call(logits, layer=layers[0]).uniforms(3)
    assert bool(((numbers > 0) & (numbers < 1)).all())
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.03)
    assert torch.equal(numbers, make_router_call(logits, layer=layers[0]).uniforms(3))
    others = [
        make_router_call(logits, layer=layers[0]).uniforms(4),
        make_router_call(logits, layer=layers[0]).uniforms(3, draw=1),
        make_router_call(logits, layer=layers[1]).uniforms(3),
        make_router_call(logits, layer=layers[0], version=2).uniforms(3),
    ]
    for other in others:
        assert not bool((other == numbers).any())


def test_captured_experts_have_the_smallest_type_with_room_for_a_missing_one() -> None:
    assert captured_dtype(255) == torch.uint8
    assert captured_dtype(256) == torch.int16
    assert missing(torch.uint8) == 255
    captured = torch.zeros((1, 2, 3), dtype=torch.uint8)
    assert filled(captured, 3).tolist() == [[[0] * 3] * 2, [[255] * 3] * 2, [[255] * 3] * 2]
