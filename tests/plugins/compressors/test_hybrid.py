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


@pytest.mark.parametrize(("dtype", "ratio"), [(torch.float32, 0.0425), (torch.bfloat16, 0.085)])
def test_the_defaults_take_a_24th_of_float32(dtype: torch.dtype, ratio: float) -> None:
    payload = Hybrid().compress(torch.randn(100_000).to(dtype), key="w")
    assert payload.num_bytes / payload.raw_bytes < ratio


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
