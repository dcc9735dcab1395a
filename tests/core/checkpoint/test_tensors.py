"""Tensors come back from a checkpoint to the bit, whatever their type, shape or memory."""

import io
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rollstock.checkpoint import CheckpointCorruptError, tensors


def round_trip(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = io.BytesIO()
    tensors.write(tensors.plan(named), out)
    out.seek(0)
    return tensors.read(out, "memory")


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        ours, theirs = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor))
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("dtype", sorted(tensors._names_of_dtypes(), key=str), ids=str)
def test_every_dtype_comes_back_to_the_bit(dtype: torch.dtype) -> None:
    width = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(0)
    high = 2 if dtype == torch.bool else 256  # random bytes: NaNs with payloads and infinities are among them
    raw = torch.randint(0, high, (6 * width,), generator=generator, dtype=torch.uint8).view(dtype).reshape(2, 3)
    assert_same_bits(round_trip({"x": raw}), {"x": raw})


def test_empty_scalar_strided_and_parameter_tensors_come_back() -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    named = {
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 5, dtype=torch.bfloat16),
        "transposed": base.t(),
        "every_other": base[::2, 1::2],
        "expanded": torch.ones(1, 3).expand(2, 3),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "flag": torch.tensor([True, False, True]),
    }
    assert_same_bits(round_trip(named), named)


def test_one_tensor_under_two_names_is_stored_once_and_comes_back_shared() -> None:
    weight = torch.randn(64, 64)
    out = io.BytesIO()
    tensors.write(tensors.plan({"embed": weight, "head": weight.view(64, 64), "slice": weight[1:]}), out)
    assert len(out.getvalue()) < 2 * weight.nbytes + 2000
    out.seek(0)
    found = tensors.read(out, "memory")
    assert found["embed"].data_ptr() == found["head"].data_ptr()
    assert found["slice"].data_ptr() != found["embed"][1:].data_ptr()
    assert_same_bits(found, {"embed": weight, "head": weight, "slice": weight[1:]})


def test_an_uncompressed_file_opens_in_the_safetensors_package(tmp_path: Path) -> None:
    named = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.randn(2).bfloat16(), "e": torch.empty(0)}
    with (tmp_path / "x.safetensors").open("wb") as out:
        tensors.write(tensors.plan(named), out)
    found = load_file(tmp_path / "x.safetensors")
    assert_same_bits({name: found[name] for name in named}, named)


def test_a_file_of_the_safetensors_package_is_read(tmp_path: Path) -> None:
    named = {"a": torch.randn(3, 4), "b": torch.arange(5)}
    save_file(named, tmp_path / "x.safetensors")
    with (tmp_path / "x.safetensors").open("rb") as source:
        found = tensors.read(source, "x")
    assert_same_bits({name: found[name] for name in named}, named)


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        st.tuples(st.sampled_from([torch.float32, torch.bool, torch.int16]), st.lists(st.integers(0, 3), max_size=3)),
        max_size=5,
    )
)
def test_any_set_of_names_and_shapes_comes_back(drawn: dict[str, tuple[torch.dtype, list[int]]]) -> None:
    named = {name: torch.ones(shape, dtype=dtype) for name, (dtype, shape) in drawn.items() if name != "__metadata__"}
    assert_same_bits(round_trip(named), named)


@pytest.mark.parametrize(
    "tensor", [torch.empty(2, device="meta"), torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.complex128)], ids=str
)
def test_a_tensor_without_raw_bytes_is_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(TypeError, match=r"layer\.weight"):
        tensors.plan({"layer.weight": tensor})


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not json", "header cannot be read"),
        (json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode(), "does not take 4 bytes"),
        (json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}).encode(), "does not begin"),
        (json.dumps({"x": {"dtype": "Q7", "shape": [1], "data_offsets": [0, 4]}}).encode(), "unknown dtype"),
        (b'{"__metadata__": {"rollstock.aliases": "{\\"a\\": \\"b\\"}"}}', "names a tensor 'b'"),
        (json.dumps({"x": {"shape": [1], "data_offsets": [0, 4]}}).encode(), "header cannot be read"),
    ],
)
def test_a_wrong_header_is_an_error_not_a_crash(header: bytes, message: str) -> None:
    with pytest.raises(CheckpointCorruptError, match=message):
        tensors.read(io.BytesIO(len(header).to_bytes(8, "little") + header + bytes(4 * (b'"dtype"' in header))), "file")


def test_a_stream_too_short_or_too_long_is_an_error() -> None:
    out = io.BytesIO()
    tensors.write(tensors.plan({"x": torch.ones(4)}), out)
    with pytest.raises(CheckpointCorruptError, match="too early"):
        tensors.read(io.BytesIO(out.getvalue()[:-1]), "file")
    with pytest.raises(CheckpointCorruptError, match="after its last tensor"):
        tensors.read(io.BytesIO(out.getvalue() + b"x"), "file")
    with pytest.raises(CheckpointCorruptError, match="header claims"):
        tensors.read(io.BytesIO(b"\xff" * 8), "file")
