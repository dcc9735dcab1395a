"""What plugin authors test with: a conformance kit for each kind, and small made-up models and batches.

`check_algorithm(MyAlgorithm)` and its siblings run every check of a kind and raise `ConformanceError`, an
AssertionError that says what is wrong, what was promised, and how to mend it. pytest finds the fixtures of
`rollstock.testing.pytest_plugin` by itself. Names are imported when they are first used: importing this package does
not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES: dict[str, str] = {
    "check_algorithm": "algorithm",
    "ConformanceError": "kit",
    "NotApplicable": "kit",
    "Report": "kit",
}

__all__ = ["ConformanceError", "NotApplicable", "Report", "check_algorithm"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rollstock.testing' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"rollstock.testing.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


if TYPE_CHECKING:
    from rollstock.testing.algorithm import check_algorithm
    from rollstock.testing.kit import ConformanceError, NotApplicable, Report
