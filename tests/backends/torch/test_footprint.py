"""Micro-batches cut by what they keep for the backward pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rollstock import Batch, Totals
from rollstock.backends.torch.backend import TorchBackend
from rollstock.backends.torch.footprint import Footprint, cut_to_fit, footprint_of
from rollstock.testing import make_trajectory

Make = Callable[..., TorchBackend]


def groups_of(*sizes: int, whole_groups: bool = False) -> Batch:
    """Groups with so many responses of 4 tokens to a prompt of 6 of its own."""
    rows = [(group, k) for group, size in enumerate(sizes) for k in range(size)]
    batch = Batch.from_trajectories(
        [make_trajectory(4, group=group, seed=10 * group + k, prompt=[group + 1] * 6) for group, k in rows]
    )
    batch.whole_groups = whole_groups
    return batch


@pytest.mark.parametrize(
    ("most", "cut"),
    [
        (60, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (30, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (20, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (10, [[0], [1], [2], [3], [4], [5], [6], [7]]),
        (1, [[0], [1], [2], [3], [4], [5], [6], [7]]),
    ],
)
def test_groups_stay_together_as_far_as_they_fit(most: int, cut: list[list[int]]) -> None:
    batch = groups_of(4, 4)  # 6 + 16 tokens each
    assert cut_to_fit(batch, [list(range(8))], Footprint(1, 0, most), share_prompts=True) == cut


def test_groups_that_must_stay_whole_do() -> None:
    batch = groups_of(2, 3, whole_groups=True)
    assert cut_to_fit(batch, [[0, 1, 2, 3, 4]], Footprint(1, 0, 1), share_prompts=True) == [[0, 1], [2, 3, 4]]


def test_parts_are_even_and_empty_micro_batches_stay() -> None:
    batch = groups_of(1, 1, 1, 1, 1, 1)
    cut = cut_to_fit(batch, [list(range(6)), []], Footprint(1, 1, 5 * 14), share_prompts=False)
    assert cut == [[0, 1, 2], [3, 4, 5], []]


def test_an_update_is_the_same_however_small_its_parts(make_backend: Make, batch: Batch) -> None:
    def loss(micro: Any) -> Any:
        return micro.loss(-micro.logprobs, {})

    def updated(backend: TorchBackend) -> tuple[int, dict[str, torch.Tensor]]:
        calls: list[int] = []
        backend._network.register_forward_pre_hook(lambda *_: calls.append(1))
        backend.update(
            batch,
            loss,
            outputs=["logprobs"],
            temperature=1.0,
            micro_batches=[list(range(len(batch)))],
            totals=Totals.of(batch, response_limit=8),
        )
        return len(calls), dict(backend.weights())

    whole, parts = make_backend(), make_backend()
    found = footprint_of(parts._network, most=1, checkpointed=False)
    assert found is not None
    parts._footprint = found
    (once, expected), (often, weights) = updated(whole), updated(parts)
    assert (once, often > 3) == (1, True)
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=2e-5, msg=lambda text, n=name: n + text)
