"""Sparsified and quantised at once."""

import pytest
import torch

from rollstock.plugins.compressors.hybrid import Hybrid, HybridConfig


def test_the_numbers_that_are_sent_share_scales_block_by_block() -> None:
    tensor = torch.zeros(256)
    tensor[[3, 70, 128, 255]] = torch.tensor([127.0, -50.4, 2.54, -1.27])
    payload = Hybrid(HybridConfig(count=4, block_size=2)).compress(tensor, key="w")
    assert payload.tensors["codes"].tolist() == [127, -50, 127, -64]  # 1.27 / 0.02 is 63.5
    assert payload.tensors["scales"].tolist() == pytest.approx([1.0, 0.02])
    found = Hybrid().decompress(payload)
    assert torch.nonzero(found).flatten().tolist() == [3, 70, 128, 255]
    assert found[[3, 70, 128, 255]].tolist() == pytest.approx([127.0, -50.0, 2.54, -1.28])


# A half sent: a byte each, a scale for 256, and a bit for each number of the tensor, 0.6328 of 4 bytes. A tenth sent: a
# byte, a scale, and 5.3 bits each.
@pytest.mark.parametrize(
    ("options", "dtype", "ratio"),
    [
        ({}, torch.float32, 0.1583),
        ({}, torch.bfloat16, 0.3166),
        ({"share": 0.1}, torch.float32, 0.0425),
        ({"share": 0.1}, torch.bfloat16, 0.085),
    ],
)
def test_the_defaults_take_a_sixth_of_float32_and_a_tenth_of_the_numbers_a_24th(
    options: dict[str, float], dtype: torch.dtype, ratio: float
) -> None:
    payload = Hybrid(HybridConfig(**options)).compress(torch.randn(100_000).to(dtype), key="w")
    assert 0.97 * ratio < payload.num_bytes / payload.raw_bytes < ratio


def test_half_of_the_numbers_is_sent_by_default() -> None:
    assert HybridConfig().num_sent(1000) == 500


def test_all_tensors_of_a_small_model_together_lose_over_70_percent() -> None:
    model = torch.nn.TransformerEncoderLayer(32, 2, 64)
    payloads = [Hybrid().compress(p, key=name) for name, p in model.named_parameters()]
    assert sum(p.num_bytes for p in payloads) < 0.3 * sum(p.raw_bytes for p in payloads)


def test_one_residual_makes_up_for_both_losses() -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    compressor = Hybrid(HybridConfig(share=0.2))
    rounds = 150
    total = sum(compressor.decompress(compressor.compress(tensor, key="w")) for _ in range(rounds))
    assert float((total / rounds - tensor).norm() / tensor.norm()) < 0.05
