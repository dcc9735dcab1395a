"""Values keep what they are on their way through Ray, and large tensors are not copied into the pickle."""

import pickle
import warnings

import numpy as np
import pytest
import torch

from rollstock.testing import make_batch

pytest.importorskip("ray")
from rollstock.plugins.executors._parcel import SMALL, Columns, Parcel


def through(value: object) -> object:
    """As Ray does it: pickled with buffers beside, and read from memory that must not be written to."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(Parcel.pack(value), protocol=5, buffer_callback=buffers.append)
    return pickle.loads(head, buffers=[bytes(buffer.raw()) for buffer in buffers]).unpack()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (70, 90)])
def test_tensors_of_every_type_and_shape_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    found = through({"x": tensor, "again": [tensor]})
    assert isinstance(found, dict)
    assert found["x"].dtype == dtype
    assert torch.equal(found["x"], tensor)
    assert found["again"][0] is found["x"]


def test_a_view_a_transposed_tensor_and_one_that_wants_a_gradient_come_back_as_their_values() -> None:
    whole = torch.arange(20_000.0).reshape(100, 200)
    found = through([whole[:, 3], whole.T, whole.clone().requires_grad_()])
    assert isinstance(found, list)
    assert torch.equal(found[0], whole[:, 3])
    assert torch.equal(found[1], whole.T)
    assert torch.equal(found[2], whole)
    assert not found[2].requires_grad


def test_the_memory_of_large_tensors_and_arrays_is_beside_the_pickle_and_is_theirs() -> None:
    tensor, array = torch.randn(SMALL), np.arange(SMALL)
    parcel = Parcel.pack((tensor, array, "text"))
    assert len(parcel.head) < 1000
    assert parcel.num_bytes > tensor.nbytes + array.nbytes
    tensor[0] = 7.0  # not a copy, as the parcel sees it
    assert parcel.unpack()[0][0] == 7.0


def test_small_tensors_belong_to_who_reads_them() -> None:
    found = through(torch.zeros(3))
    assert isinstance(found, torch.Tensor)
    found += 1
    assert found.tolist() == [1.0, 1.0, 1.0]


def test_nothing_is_said_of_memory_that_must_not_be_written_to() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        through(torch.zeros(10 * SMALL))


def test_a_batch_comes_back_and_can_be_cut() -> None:
    batch = make_batch(4)
    found = through(batch)
    assert isinstance(found, type(batch))
    assert found.columns == batch.columns
    assert found.task_ids == batch.task_ids
    assert torch.equal(found.mask, batch.mask)
    assert torch.equal(found.select([2, 0]).packed().tokens, batch.select([2, 0]).packed().tokens)


def test_a_function_that_no_module_holds_comes_along() -> None:
    found = through(lambda x: x + 1)
    assert callable(found)
    assert found(1) == 2


def test_columns_are_joined_on_the_way_and_lists_again_behind_it() -> None:
    lists = {"logprobs": [torch.arange(n, dtype=torch.float32) for n in (3, 0, 5)], "none": []}
    assert Columns.fit(lists)
    found = through(Columns(lists))
    assert isinstance(found, Columns)
    back = found.lists()
    assert back["none"] == []
    assert [part.tolist() for part in back["logprobs"]] == [part.tolist() for part in lists["logprobs"]]


@pytest.mark.parametrize(
    "value",
    [
        {"a": [torch.tensor(1.0)]},
        {"a": [torch.zeros(1), torch.zeros(1, dtype=torch.int64)]},
        {"a": torch.zeros(2)},
        [1],
    ],
)
def test_what_is_no_columns_is_left_as_it_is(value: object) -> None:
    assert not Columns.fit(value)
