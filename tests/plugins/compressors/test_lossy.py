"""What all lossy compressors promise: error feedback, state, and tensors that travel whole."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollstock import UserError
from rollstock.plugins.compressors._lossy import LossyCompressor
from rollstock.plugins.compressors.hybrid import Hybrid, HybridConfig
from rollstock.plugins.compressors.int8 import Int8, Int8Config
from rollstock.plugins.compressors.topk import TopK, TopKConfig

MAKERS: dict[str, Any] = {
    "int8": lambda **options: Int8(Int8Config(**options)),
    "topk": lambda **options: TopK(TopKConfig(**options)),
    "hybrid": lambda **options: Hybrid(HybridConfig(**options)),
}
METHODS = sorted(MAKERS)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trip(compressor: LossyCompressor[Any], tensor: Tensor, key: str = "w") -> Tensor:
    return compressor.decompress(compressor.compress(tensor, key=key))


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    rounds=st.integers(1, 6),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
    stochastic=st.booleans(),
)
def test_what_was_sent_and_the_residual_are_the_sum_of_all_gradients(
    method: str, sizes: list[int], rounds: int, dtype: torch.dtype, seed: int, stochastic: bool
) -> None:
    compressor = MAKERS[method](**({} if method == "topk" else {"stochastic": stochastic}))
    gradients = [numbers(*sizes, seed=seed + n).to(dtype) for n in range(rounds)]
    sent = torch.stack([trip(compressor, gradient).double() for gradient in gradients]).sum(0)
    residual = compressor.residuals.get("w", torch.zeros(1)).double()
    total = torch.stack([gradient.double() for gradient in gradients]).sum(0)
    owed = residual.reshape(total.shape) if residual.numel() == total.numel() else residual
    assert torch.allclose(sent + owed, total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_without_feedback_nothing_is_kept(method: str) -> None:
    compressor = MAKERS[method](feedback=False)
    first, second = trip(compressor, numbers(900)), trip(compressor, numbers(900))
    assert compressor.state() == {}
    assert torch.equal(first, second)


@pytest.mark.parametrize("method", METHODS)
def test_a_residual_is_float32_whatever_the_gradient_is(method: str) -> None:
    compressor = MAKERS[method]()
    for dtype in (torch.bfloat16, torch.float32):
        compressor.compress(numbers(900).to(dtype), key=str(dtype))
    assert {residual.dtype for residual in compressor.residuals.values()} == {torch.float32}
    compressor.compress(numbers(900).double(), key="double")
    assert compressor.residuals["double"].dtype == torch.float64


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_travels_whole_and_leaves_the_residual_alone(
    method: str, dtype: torch.dtype, bad: float
) -> None:
    compressor = MAKERS[method]()
    compressor.compress(numbers(30, 30).to(dtype), key="w")
    before = compressor.state()["residual:w"].clone()
    gradient = numbers(30, 30).to(dtype)
    gradient[3, 4] = bad
    payload = compressor.compress(gradient, key="w")
    assert payload.num_bytes == payload.raw_bytes
    assert torch.equal(compressor.decompress(payload), gradient) or bad != bad
    assert compressor.decompress(payload).isnan().sum() == gradient.isnan().sum()
    assert torch.equal(compressor.state()["residual:w"], before)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_of_a_type_stay_finite(method: str, dtype: torch.dtype) -> None:
    compressor = MAKERS[method]()
    largest = torch.finfo(dtype).max
    gradient = torch.full((700,), largest, dtype=dtype)
    for _ in range(3):
        found = trip(compressor, gradient)
        assert found.isfinite().all()
        assert found.max() > 0.99 * largest
    assert compressor.residuals["w"].isfinite().all() if compressor.residuals else True


@pytest.mark.parametrize("method", METHODS)
def test_the_smallest_numbers_of_a_type_do_no_harm(method: str) -> None:
    gradient = torch.full((700,), 1e-45)
    assert (trip(MAKERS[method](), gradient) <= 2e-45).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,)])
def test_small_tensors_arrive_to_the_bit_and_leave_no_residual(method: str, shape: tuple[int, ...]) -> None:
    compressor = MAKERS[method]()
    tensor = numbers(*shape).to(torch.bfloat16)
    payload = compressor.compress(tensor, key="w")
    found = compressor.decompress(payload)
    assert torch.equal(found, tensor)
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    assert payload.num_bytes <= payload.raw_bytes
    assert compressor.residuals == {}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.uint8])
def test_other_types_travel_whole(method: str, dtype: torch.dtype) -> None:
    tensor = (numbers(40, 40) * 9).to(dtype)
    compressor = MAKERS[method]()
    assert torch.equal(trip(compressor, tensor), tensor)
    assert compressor.state() == {}


@pytest.mark.parametrize("method", METHODS)
def test_how_a_tensor_lies_in_memory_does_not_matter(method: str) -> None:
    tensor = numbers(40, 30)
    for view, plain in [
        (tensor.t(), tensor.t().contiguous()),
        (tensor[::2, 1::3], tensor[::2, 1::3].clone()),
        (tensor[:, 0], tensor[:, 0].clone()),
        (tensor[:1].expand(20, 30), tensor[:1].repeat(20, 1)),
    ]:
        kept = tensor.clone()
        assert torch.equal(trip(MAKERS[method](), view), trip(MAKERS[method](), plain))
        assert torch.equal(tensor, kept)


@pytest.mark.parametrize("method", METHODS)
def test_a_gradient_that_has_a_gradient_is_taken(method: str) -> None:
    assert not trip(MAKERS[method](), numbers(30, 30).requires_grad_()).requires_grad


@pytest.mark.parametrize("method", METHODS)
def test_sparse_layouts_are_refused(method: str) -> None:
    with pytest.raises(UserError, match="'w' has the layout torch.sparse_coo: give a dense tensor"):
        MAKERS[method]().compress(torch.eye(3).to_sparse(), key="w")


@pytest.mark.parametrize("method", METHODS)
def test_a_residual_of_another_size_is_refused(method: str) -> None:
    compressor = MAKERS[method]()
    compressor.compress(numbers(900), key="w")
    with pytest.raises(UserError, match="'w' has 901 numbers, and its residual 900"):
        compressor.compress(numbers(901), key="w")


@pytest.mark.parametrize("method", METHODS)
def test_a_state_is_not_written_into_and_replaces_what_is_there(method: str) -> None:
    compressor = MAKERS[method]()
    compressor.compress(numbers(900), key="w")
    state = compressor.state()
    kept = {name: tensor.clone() for name, tensor in state.items()}
    compressor.compress(numbers(900, seed=1), key="w")
    compressor.compress(numbers(900, seed=1), key="v")
    assert all(torch.equal(state[name], kept[name]) for name in kept)
    compressor.load_state(state)
    assert compressor.state().keys() == {"residual:w"}


def test_keys_may_look_like_names_of_a_state() -> None:
    compressor = MAKERS["int8"](stochastic=True)
    key = "round:residual:w.0"
    compressor.compress(numbers(900), key=key)
    other = MAKERS["int8"](stochastic=True)
    other.load_state(compressor.state())
    assert other.rounds == {key: 1}
    assert other.residuals.keys() == {key}


@pytest.mark.parametrize("method", METHODS)
def test_a_state_of_something_else_is_refused(method: str) -> None:
    with pytest.raises(UserError, match="the state has 'momentum', neither a residual nor a round"):
        MAKERS[method]().load_state({"momentum": torch.zeros(3)})


@pytest.mark.parametrize("method", METHODS)
def test_training_with_compressed_gradients_reaches_nearly_the_loss_of_plain(method: str) -> None:
    inputs = numbers(256, 20)
    targets = inputs @ numbers(20, 8, seed=1) + 0.1 * numbers(256, 8, seed=2)

    def loss_after(compressor: LossyCompressor[Any] | None) -> tuple[float, float]:
        weights = torch.zeros(20, 8, requires_grad=True)
        for step in range(150):
            loss = (inputs @ weights - targets).square().mean()
            (gradient,) = torch.autograd.grad(loss, weights)
            if step == 0:
                first = loss.item()
            with torch.no_grad():
                weights -= 0.3 * (gradient if compressor is None else trip(compressor, gradient))
        return first, loss.item()

    first, plain = loss_after(None)
    _, compressed = loss_after(MAKERS[method]())
    assert plain < 0.001 * first
    assert compressed < 1.1 * plain


def test_training_with_the_largest_numbers_alone_does_not_get_there_without_feedback() -> None:
    """What feedback is for: a direction that always comes second is never learned from."""
    losses = {}
    for feedback in (True, False):
        weights = torch.zeros(2)
        compressor = MAKERS["topk"](count=1, feedback=feedback)
        for step in range(100):
            # The first number's gradient is large and of changing sign, the second's small and steady.
            gradient = torch.tensor([(-1.0) ** step * 10.0, weights[1].item() - 1.0])
            weights -= 0.1 * trip(compressor, gradient)
        losses[feedback] = float((weights[1] - 1).abs())
    assert losses[False] == 1.0
    assert losses[True] < 0.5
