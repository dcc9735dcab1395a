"""No compression changes no bit."""

import pytest
import torch

from rollstock.plugins.compressors.none import Uncompressed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5)])
def test_what_comes_out_is_what_went_in(dtype, shape):
    tensor = (torch.randn(shape) * 100).to(dtype)
    payload = Uncompressed().compress(tensor, key="w")
    found = Uncompressed().decompress(payload)
    assert found.dtype == dtype
    assert torch.equal(found, tensor)
    assert payload.num_bytes == tensor.numel() * tensor.element_size()
    assert payload.tensors["whole"].data_ptr() == tensor.data_ptr()


def test_a_flattened_payload_gets_its_shape_back():
    payload = Uncompressed().compress(torch.arange(6.0).reshape(2, 3), key="w")
    payload.tensors["whole"] = payload.tensors["whole"].flatten()
    assert Uncompressed().decompress(payload).shape == (2, 3)


def test_it_keeps_nothing():
    assert Uncompressed().state() == {}
