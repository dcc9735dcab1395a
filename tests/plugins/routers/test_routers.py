"""What each built-in router chooses and weighs, on logits that can be followed by hand."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rollstock import RouterCall, RouterLayer, Routing, Scoring
from rollstock.plugins.routers.gumbel import Gumbel, GumbelConfig
from rollstock.plugins.routers.replay import Replay
from rollstock.plugins.routers.topk import TopK, TopKConfig
from rollstock.plugins.routers.vote import Vote, VoteConfig, elect
from rollstock.testing import make_router_call

LOGITS = torch.tensor([[2.0, 0.0, 1.0, -1.0], [0.0, 0.5, 3.0, 2.5]])
LAYERS = [
    RouterLayer(index=i, name=f"layers.{i}", num_experts=4, top_k=2, scoring=Scoring(normalise=True)) for i in range(2)
]


def many(count: int = 4000, spread: float = 1.0) -> Tensor:
    """The same four logits for many tokens."""
    return (spread * torch.tensor([1.0, 0.5, 0.0, -1.0])).expand(count, -1).contiguous()


def shares(experts: Tensor) -> list[float]:
    """How often each expert was chosen first."""
    counts = torch.bincount(experts[:, 0], minlength=4).double()
    return (counts / counts.sum()).tolist()


class TestTopK:
    def test_it_answers_what_the_model_answers(self) -> None:
        call = make_router_call(LOGITS)
        assert TopK().route(call) is call.own

    def test_biases_decide_what_is_chosen_and_not_what_it_weighs(self) -> None:
        router = TopK(TopKConfig(bias_rate=0.1))
        router.setup(LAYERS, seed=0)
        router.load_state({"biases": [[-1.0, 0.0, 0.0, 0.0], [0.0] * 4]})
        found = router.route(make_router_call(LOGITS, layer=LAYERS[0]))
        assert found.experts.tolist() == [[2, 1], [2, 3]]
        torch.testing.assert_close(found.weights[0], torch.tensor([1.0, 0.0]).softmax(-1))
        assert router.route(make_router_call(LOGITS, layer=LAYERS[1])).experts.tolist() == [[0, 2], [2, 3]]


class TestGumbel:
    @staticmethod
    def make(**options: Any) -> Gumbel:
        router = Gumbel(GumbelConfig(**options))
        router.setup(LAYERS, seed=9)
        return router

    def test_experts_are_drawn_as_often_as_they_are_likely(self) -> None:
        found = self.make().route(make_router_call(many(), top_k=1))
        expected = many(1)[0].softmax(-1).tolist()
        assert shares(found.experts) == pytest.approx(expected, abs=0.03)

    def test_gradients_reach_the_logits_of_experts_that_were_not_chosen(self) -> None:
        """The model's own normalised weights give them none."""
        for router, reaches in ((self.make(noise=0.0), True), (TopK(), False)):
            logits = LOGITS.clone().requires_grad_()
            call = make_router_call(logits)
            found = router.route(call)
            (found.weights * torch.tensor([[1.0, 3.0]])).sum().backward()
            assert logits.grad is not None
            others = logits.grad.gather(1, torch.tensor([[1, 3], [0, 1]]))
            assert (others.abs() > 1e-3).all() if reaches else (others.abs() < 1e-7).all()

    def test_the_gradient_is_that_of_the_soft_sample(self) -> None:
        router = self.make(noise=0.0, temperature=0.5, schedule="constant")
        logits, soft = LOGITS.clone().requires_grad_(), LOGITS.clone().requires_grad_()
        found = router.route(make_router_call(logits))
        target = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
        (found.weights * target).sum().backward()
        ((soft / 0.5).softmax(-1).gather(1, found.experts) * target).sum().backward()
        torch.testing.assert_close(logits.grad, soft.grad)

    def test_forward_the_chosen_experts_weigh_what_the_model_gives_them(self) -> None:
        call = make_router_call(LOGITS)
        found = self.make().route(call)
        assert torch.equal(found.weights, call.weights(found.experts))

    def test_without_noise_it_chooses_what_the_model_does(self) -> None:
        assert torch.equal(self.make(noise=0.0).route(make_router_call(LOGITS)).experts, torch.tensor([[0, 2], [2, 3]]))

    @pytest.mark.parametrize("router", [Gumbel(), Vote()])
    def test_in_evaluation_there_is_no_noise(self, router: Gumbel | Vote) -> None:
        router.setup(LAYERS, seed=9)
        call = make_router_call(many(50), exploring=False)
        assert router.route(call) is call.own

    def test_noise_changes_with_seed_version_layer_and_token_alone(self) -> None:
        call = make_router_call(many(50), layer=LAYERS[0])
        first = self.make().route(call).experts
        assert torch.equal(self.make().route(make_router_call(many(50), layer=LAYERS[0])).experts, first)
        others = [
            self.make().route(make_router_call(many(50), layer=LAYERS[0], version=2)),
            self.make().route(make_router_call(many(50), layer=LAYERS[1])),
        ]
        router = Gumbel()
        router.setup(LAYERS, seed=10)
        others.append(router.route(call))
        assert all(not torch.equal(other.experts, first) for other in others)
        assert len({tuple(row) for row in first.tolist()}) > 1

    @pytest.mark.parametrize(
        ("schedule", "expected"),
        [("linear", [1.0, 0.6, 0.2, 0.2]), ("exponential", [1.0, 0.2**0.5, 0.2, 0.2]), ("constant", [1.0] * 4)],
    )
    def test_the_temperature_falls_with_the_version(self, schedule: Any, expected: Sequence[float]) -> None:
        router = self.make(schedule=schedule, final_temperature=0.2, steps=10)
        assert router.temperature(torch.tensor([1, 6, 11, 40])).tolist() == pytest.approx(expected)
        assert router.temperature(torch.tensor([-1, 0])).tolist() == pytest.approx([1.0, 1.0])


class TestVote:
    @staticmethod
    def make(**options: Any) -> Vote:
        router = Vote(VoteConfig(**options))
        router.setup(LAYERS, seed=9)
        return router

    def test_most_votes_win_then_the_score_then_the_lower_number(self) -> None:
        votes = torch.tensor([[0, 2, 3, 1], [1, 1, 1, 0], [1, 1, 1, 0]])
        scores = torch.tensor([[0.9, 0.0, 0.0, 0.5], [0.1, 0.3, 0.2, 0.9], [0.2, 0.2, 0.2, 0.9]])
        assert elect(votes, scores, 2).tolist() == [[2, 1], [1, 2], [0, 1]]
        assert elect(votes, scores, 4)[0].tolist() == [2, 1, 3, 0]

    def test_every_draw_has_as_many_votes_as_experts_are_chosen(self) -> None:
        votes = self.make().votes(make_router_call(many(200)))
        assert votes.sum(dim=-1).eq(6).all()
        assert int(votes.max()) == 3

    def test_it_explores_less_than_its_hottest_draw_and_more_than_its_coldest(self) -> None:
        def best(*temperatures: float) -> float:
            router = self.make(temperatures=list(temperatures))
            return shares(router.route(make_router_call(many(), top_k=1)).experts)[0]

        assert best(0.1) > best(0.1, 0.5, 1.0) > best(1.0)
        assert best(1.0) == pytest.approx(float(many(1)[0].softmax(-1)[0]), abs=0.03)

    def test_nobody_to_vote_is_refused(self) -> None:
        with pytest.raises(ValueError, match="nobody would vote"):
            VoteConfig(temperatures=[])


class TestReplay:
    @staticmethod
    def call(captured: Tensor, logits: Tensor = LOGITS) -> RouterCall:
        call = make_router_call(logits, layer=LAYERS[1])
        return dataclasses.replace(call, tokens=dataclasses.replace(call.tokens, captured=captured))

    def test_it_takes_the_experts_of_its_layer_where_they_are_known(self) -> None:
        captured = torch.tensor([[[0, 1], [3, 1]], [[0, 1], [255, 255]]], dtype=torch.uint8)
        found = Replay().route(self.call(captured))
        assert found.experts.tolist() == [[3, 1], [2, 3]]
        torch.testing.assert_close(found.weights[0], torch.tensor([-1.0, 0.0]).softmax(-1))

    def test_weights_follow_the_logits_of_the_training_pass(self) -> None:
        captured = torch.tensor([[[0, 1], [3, 1]]] * 2, dtype=torch.uint8)
        logits = LOGITS.clone().requires_grad_()
        (Replay().route(self.call(captured, logits)).weights * torch.tensor([1.0, 2.0])).sum().backward()
        assert logits.grad is not None
        assert (logits.grad.abs() > 1e-6).tolist() == [[False, True, False, True]] * 2

    def test_without_captured_experts_the_model_chooses(self) -> None:
        call = make_router_call(LOGITS)
        assert Replay().route(call) is call.own


def test_experts_beyond_uint8_are_captured_whole() -> None:
    layer = RouterLayer(index=0, name="gate", num_experts=300, top_k=1, scoring=Scoring())
    call = make_router_call(torch.zeros(2, 300), layer=layer)
    captured = torch.tensor([[[299]], [[32767]]], dtype=torch.int16)
    found: Routing = Replay().route(
        dataclasses.replace(call, tokens=dataclasses.replace(call.tokens, captured=captured))
    )
    assert found.experts.tolist() == [[299], call.own.experts[1].tolist()]
