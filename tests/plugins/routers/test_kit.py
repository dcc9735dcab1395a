"""The built-in routers keep the promises of their kind."""

from typing import Any

import pytest

from rollstock.testing import check_router

BALANCED = {"auxiliary_loss": 0.01, "bias_rate": 0.05}


@pytest.mark.parametrize("options", [{}, BALANCED], ids=["plain", "balanced"])
@pytest.mark.parametrize("name", ["topk", "gumbel", "vote", "replay"])
def test_a_router_passes_its_kit(name: str, options: dict[str, Any]) -> None:
    report = check_router(name, options=options)
    left_out = set() if options else {"auxiliary_loss"}
    assert set(report.skipped) == left_out | (set() if name == "replay" else {"capture"})


@pytest.mark.parametrize("name", ["topk", "gumbel", "vote", "replay"])
def test_a_router_passes_its_kit_with_many_experts(name: str) -> None:
    check_router(name, num_experts=64, top_k=8)
