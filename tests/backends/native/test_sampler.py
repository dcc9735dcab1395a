"""Choosing tokens, against a slow reference and against the distribution that was asked for."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstock.backends.native.sampler import choose, invert, truncate
from rollstock.uniforms import uniforms


def slowly_truncated(row: list[float], top_k: int, top_p: float) -> list[float]:
    """One row, token by token, by the definitions in `truncate`."""
    if 0 < top_k < len(row):
        row = [p if sum(q > p for q in row) < top_k else 0.0 for p in row]
    if top_p < 1:
        total = math.fsum(row)
        best = max(row)
        row = [p if p == best or math.fsum(q for q in row if q > p) < top_p * total else 0.0 for p in row]
    return row


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.integers(1, 40),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.0, 1.0),
    steps=st.sampled_from([2, 5, 1000]),
)
def test_top_k_and_top_p_keep_what_their_definitions_say(
    seed: int, size: int, top_k: int, top_p: float, steps: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.rand((3, size), generator=generator) * steps).floor() / steps * 4  # few steps: many equal tokens
    probs = torch.softmax(logits, -1)
    got = truncate(probs, top_k=top_k, top_p=top_p)
    for row, kept in zip(probs.tolist(), got.tolist(), strict=True):
        after_k = slowly_truncated(row, top_k, 1.0)
        edges = [math.fsum(q for q in after_k if q > p) / math.fsum(after_k) for p in after_k]
        if all(abs(edge - top_p) > 1e-6 for edge in edges):  # nearer than that, rounding decides
            assert kept == slowly_truncated(row, top_k, top_p)


def test_top_k_then_top_p_by_hand() -> None:
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    assert truncate(probs, top_k=3).tolist() == [pytest.approx([0.4, 0.3, 0.2, 0.0])]
    assert truncate(probs, top_p=0.65).tolist() == [pytest.approx([0.4, 0.3, 0.0, 0.0])]
    assert truncate(probs, top_p=0.39).tolist() == [pytest.approx([0.4, 0.0, 0.0, 0.0])]
    assert truncate(probs, top_p=0.0).tolist() == [pytest.approx([0.4, 0.0, 0.0, 0.0])]
    # of the 0.9 that top-k leaves, 0.4 is 44% and 0.7 is 78%
    assert truncate(probs, top_k=3, top_p=0.45).tolist() == [pytest.approx([0.4, 0.3, 0.0, 0.0])]
    assert truncate(probs, top_k=3, top_p=0.79).tolist() == [pytest.approx([0.4, 0.3, 0.2, 0.0])]
    assert truncate(torch.full((1, 4), 0.25), top_k=2).tolist() == [[0.25] * 4]  # equal tokens stay together


def test_a_nucleus_wider_than_the_first_look_is_complete() -> None:
    logits = torch.zeros((2, 20000))
    logits[1, 7] = 20.0
    kept = truncate(torch.softmax(logits, -1), top_p=0.9) > 0
    assert kept.sum(-1).tolist() == [20000, 1]


@pytest.mark.parametrize("size", [1, 5, 255, 256, 257, 1000])
def test_inverting_gives_the_first_token_whose_running_sum_exceeds_the_draw(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    weights = torch.rand((64, size), generator=generator)
    weights[:, ::3] = 0.0
    weights[:, -1] += 0.01
    draws = torch.rand(64, generator=generator, dtype=torch.float64)
    total = weights.double().cumsum(-1)
    expected = (total <= (draws * total[:, -1])[:, None]).sum(-1)
    assert invert(weights, draws).tolist() == expected.tolist()


def test_no_draw_reaches_a_token_of_weight_zero() -> None:
    weights = torch.zeros((4, 600))
    weights[:, 300] = 1e-30
    weights[:, 450] = 2e-30
    draws = torch.tensor([0.0, 0.33, 0.34, 1.0 - 2.0**-53], dtype=torch.float64)
    assert invert(weights, draws).tolist() == [300, 300, 450, 450]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.5, 5, 1.0), (1.0, 0, 0.7)]
)
def test_tokens_are_drawn_from_the_distribution_asked_for(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn((1, 300), generator=torch.Generator().manual_seed(1)) * 2
    draws = 40_000
    tokens, logprobs = choose(
        logits.expand(draws, -1),
        uniforms(torch.arange(draws), torch.tensor(17)),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    probs = torch.softmax(logits[0].double() / temperature, -1)
    torch.testing.assert_close(logprobs, probs.log()[tokens].float(), atol=1e-5, rtol=0)
    kept = truncate(probs[None], top_k=top_k, top_p=top_p)[0]
    expected = kept / kept.sum() * draws
    counts = torch.bincount(tokens, minlength=300).double()
    assert counts[kept == 0].sum() == 0
    common = expected >= 5
    statistic = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    freedom = int(common.sum()) - 1
    assert freedom > 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_temperature_zero_takes_the_most_probable_token_and_its_logprob_at_one() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 5.0]])
    tokens, logprobs = choose(logits, torch.rand(2, dtype=torch.float64), temperature=0.0, top_k=1, top_p=0.1)
    assert tokens.tolist() == [0, 2]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[[0, 1], [0, 2]])


def test_the_logprob_has_the_temperature_in_it(cases: dict[str, dict[str, float]]) -> None:
    case = cases["temperature_in_logprobs"]
    tokens, logprobs = choose(
        torch.tensor([case["logits"]]), torch.zeros(1, dtype=torch.float64), temperature=case["temperature"], top_k=1
    )
    assert tokens.tolist() == [case["token"]]
    assert float(logprobs) == pytest.approx(case["right_logprob"], abs=1e-4)


@pytest.mark.parametrize("forbidden", [2000.0, 0.5], ids=["nearly all", "some"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_forbidden_tokens_are_never_chosen_and_logprobs_stay_those_of_the_whole(
    temperature: float, forbidden: float
) -> None:
    logits = torch.tensor([[forbidden, 1.0, 0.0], [0.0, 3.0, 1.0]]).repeat_interleave(50, dim=0)
    uniform = torch.linspace(0, 0.999, 50, dtype=torch.float64).repeat(2)
    tokens, logprobs = choose(logits, uniform, temperature=temperature, forbidden=torch.tensor([0]))
    assert not (tokens == 0).any()
    if temperature:
        assert set(tokens[:50].tolist()) == {1, 2}  # though nearly all of the mass was the forbidden one's
    whole = torch.log_softmax(logits / (temperature or 1.0), dim=-1).gather(1, tokens[:, None])[:, 0]
    assert torch.allclose(logprobs, whole, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("size", [40, 700])
@pytest.mark.parametrize("forbidden", [None, [0, 3]])
def test_rows_that_share_logits_choose_as_if_each_had_its_own(
    temperature: float, size: int, forbidden: list[int] | None
) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn((3, size), generator=generator) * 3
    logits[1, 0] = 60.0  # nearly all of the mass
    rows = torch.tensor([2, 0, 0, 1, 2, 1, 0, 2, 2])
    uniform = torch.rand(9, generator=generator, dtype=torch.float64)
    options = {
        "temperature": temperature,
        "top_k": 9,
        "top_p": 0.9,
        "forbidden": None if forbidden is None else torch.tensor(forbidden),
    }
    shared, own = choose(logits, uniform, rows=rows, **options), choose(logits[rows], uniform, **options)
    assert torch.equal(shared[0], own[0])
    assert torch.equal(shared[1], own[1])
    assert len(set(own[0].tolist())) > 1
