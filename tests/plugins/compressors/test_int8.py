"""Quantisation by blocks, against numbers computed by hand."""

import pytest
import torch

from rollstock.plugins.compressors._blocks import dequantise, quantise
from rollstock.plugins.compressors.int8 import Int8, Int8Config


def test_codes_and_scales_are_those_computed_by_hand() -> None:
    values = torch.tensor([127.0, -3.4, 0.5, 1.5, 0.254, -0.1, 0.001, 0.0, 0.0, 0.0])
    codes, scales, size = quantise(values, 4, None)
    # Blocks of 4, of scale 1, 0.002 and 0; halves go to the even neighbour.
    assert scales.tolist() == pytest.approx([1.0, 0.002, 0.0])
    assert codes.tolist() == [127, -3, 0, 2, 127, -50, 0, 0, 0, 0]
    assert size == 4
    expected = [127.0, -3.0, 0.0, 2.0, 0.254, -0.1, 0.0, 0.0, 0.0, 0.0]
    assert dequantise(codes, scales, size).tolist() == pytest.approx(expected)


def test_a_payload_is_a_byte_a_number_and_four_a_block() -> None:
    payload = Int8().compress(torch.randn(1000), key="w")
    assert {name: (t.dtype, t.numel()) for name, t in payload.tensors.items()} == {
        "codes": (torch.int8, 1000),
        "scales": (torch.float32, 4),
    }
    assert (payload.num_bytes, payload.raw_bytes) == (1016, 4000)
    assert payload.values == {"block_size": 256}
    assert payload.tensors["codes"].untyped_storage().nbytes() == 1000


def test_without_blocks_there_is_one_scale() -> None:
    payload = Int8(Int8Config(block_size=None)).compress(torch.randn(30, 30), key="w")
    assert payload.num_bytes == 904


def test_a_payload_is_read_whatever_the_block_size_of_the_reader() -> None:
    tensor = torch.randn(1000)
    payload = Int8(Int8Config(block_size=16)).compress(tensor, key="w")
    assert torch.equal(Int8().decompress(payload), Int8(Int8Config(block_size=16)).decompress(payload))


@pytest.mark.parametrize(("stochastic", "steps"), [(False, 0.5), (True, 1.0)])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_error_of_a_number_is_at_most_half_a_step_or_one(stochastic: bool, steps: float, scale: float) -> None:
    tensor = scale * torch.randn(100, 256, generator=torch.Generator().manual_seed(0))
    compressor = Int8(Int8Config(stochastic=stochastic))
    found = compressor.decompress(compressor.compress(tensor, key="w"))
    step = tensor.abs().amax(-1, keepdim=True) / 127
    assert ((found - tensor).abs() <= steps * step * (1 + 1e-4)).all()


def test_stochastic_rounding_is_right_in_the_mean_and_to_the_nearest_is_not() -> None:
    tensor = torch.cat([torch.tensor([127.0]), torch.full((255,), 0.3)])
    means = {}
    for stochastic in (True, False):
        compressor = Int8(Int8Config(stochastic=stochastic, feedback=False))
        sent = [compressor.decompress(compressor.compress(tensor, key="w"))[1:].mean() for _ in range(200)]
        means[stochastic] = float(torch.stack(sent).mean())
    # 51,000 draws of 0 or 1 with mean 0.3 have a standard error of 0.002.
    assert means[True] == pytest.approx(0.3, abs=0.01)
    assert means[False] == 0.0


def test_stochastic_rounding_leaves_multiples_of_the_scale_alone() -> None:
    tensor = torch.arange(-127.0, 128.0)
    compressor = Int8(Int8Config(stochastic=True))
    assert torch.equal(compressor.decompress(compressor.compress(tensor, key="w")), tensor)


def test_rounding_is_a_function_of_seed_process_key_and_round() -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))

    def sent(*, seed: int = 0, rank: int = 0, key: str = "w", rounds: int = 1) -> torch.Tensor:
        compressor = Int8(Int8Config(stochastic=True, feedback=False))
        compressor.setup(seed=seed, rank=rank)
        for _ in range(rounds):
            payload = compressor.compress(tensor, key=key)
        return compressor.decompress(payload)

    assert torch.equal(sent(), sent())
    for other in (sent(seed=1), sent(rank=1), sent(key="v"), sent(rounds=2)):
        assert not torch.equal(sent(), other)
