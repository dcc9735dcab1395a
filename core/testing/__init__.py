"""What plugin authors test with: a conformance kit for each kind, and small made-up models, batches and runs.

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
    "check_backend": "backend",
    "check_compressor": "compressor",
    "check_device": "device",
    "check_environment": "environment",
    "check_executor": "executor",
    "check_extension": "extension",
    "check_reward": "reward",
    "check_rollout": "rollout",
    "check_router": "router",
    "check_scheduler": "scheduler",
    "check_tracker": "tracker",
    "check_transport": "transport",
    "ConformanceError": "kit",
    "Report": "kit",
    "installed": "install",
    "make_batch": "batches",
    "make_trajectory": "batches",
    "make_router_call": "router",
    "make_sample": "environment",
    "read_metrics": "runs",
    "tiny_config": "runs",
    "tiny_model": "models",
    "tiny_run": "runs",
    "tiny_tokenizer": "models",
}

__all__ = [  # the kits, by kind; their results; what else helps in a test
    "check_algorithm", "check_backend", "check_compressor", "check_device", "check_environment", "check_executor",
    "check_extension", "check_reward", "check_rollout", "check_router", "check_scheduler", "check_tracker",
    "check_transport", "ConformanceError", "Report", "installed", "make_batch", "make_trajectory", "make_router_call",
    "make_sample", "read_metrics", "tiny_config", "tiny_model", "tiny_run", "tiny_tokenizer",
]  # fmt: skip


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
    from rollstock.testing.backend import check_backend
    from rollstock.testing.batches import make_batch, make_trajectory
    from rollstock.testing.compressor import check_compressor
    from rollstock.testing.device import check_device
    from rollstock.testing.environment import check_environment, make_sample
    from rollstock.testing.executor import check_executor
    from rollstock.testing.extension import check_extension
    from rollstock.testing.install import installed
    from rollstock.testing.kit import ConformanceError, Report
    from rollstock.testing.models import tiny_model, tiny_tokenizer
    from rollstock.testing.reward import check_reward
    from rollstock.testing.rollout import check_rollout
    from rollstock.testing.router import check_router, make_router_call
    from rollstock.testing.runs import read_metrics, tiny_config, tiny_run
    from rollstock.testing.scheduler import check_scheduler
    from rollstock.testing.tracker import check_tracker
    from rollstock.testing.transport import check_transport
