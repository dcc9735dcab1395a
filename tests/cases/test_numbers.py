"""Every entry of numbers.json is read by the tests that check it."""

import ast
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FUNCTIONAL, LOSSES = "tests/algorithms/test_functional.py", "tests/algorithms/test_functional_losses.py"
READERS = {
    "loss_slicing": ["tests/core/test_micro.py", FUNCTIONAL],
    "temperature_in_logprobs": ["tests/algorithms/test_logprobs.py", "tests/backends/native/test_sampler.py"],
    "eos_is_pad": ["tests/core/test_batch.py"],
    "kl_gradient": [LOSSES],
    "gae_over_observations": [FUNCTIONAL, "tests/algorithms/test_ppo.py"],
    "gae": [FUNCTIONAL, "tests/algorithms/test_ppo.py"],
    "group_of_8_with_3_correct": [FUNCTIONAL, "tests/algorithms/test_grpo.py"],
    "group_1110": [FUNCTIONAL],
    "group_of_one": [FUNCTIONAL],
    "empty_response": [FUNCTIONAL, "tests/algorithms/test_ppo.py"],
    "cispo": [LOSSES, "tests/algorithms/test_cispo.py"],
    "dual_clip": [LOSSES],
    "kl_estimators": [LOSSES],
    "entropy": ["tests/algorithms/test_logprobs.py"],
    "aggregation": [FUNCTIONAL],
    "adaptive_kl_horizon": ["tests/algorithms/test_ppo.py"],
    "retokenise": ["tests/core/test_conversation.py"],
    "bf16_master": ["tests/backends/torch/test_optimizer.py"],
    "resume_at_epoch_end": ["tests/core/test_seeding.py"],
    "balanced_partitions": ["tests/core/test_partition.py"],
}
"""For each entry the files with a test that checks it."""


def test_every_entry_has_a_reader(cases: dict[str, Any]) -> None:
    assert READERS.keys() == cases.keys()


@pytest.mark.parametrize("entry", READERS)
def test_each_reader_has_a_test_that_looks_the_entry_up(entry: str) -> None:
    for path in READERS[entry]:
        tree = ast.parse((ROOT / path).read_text())
        tests = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
        assert any(_looks_up(test, entry) for test in tests), f"no test of {path} reads {entry}"


def _looks_up(function: ast.FunctionDef, entry: str) -> bool:
    """Whether a function has `cases[entry]` (or `CASES[entry]`) in it."""
    return any(
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id.lower() == "cases"
        and isinstance(node.slice, ast.Constant)
        and node.slice.value == entry
        for node in ast.walk(function)
    )
