"""rollstock: reinforcement learning of language models and control policies, a minimal core and plugins.

The names below are the public ones; everything a plugin needs is among them. They are imported when they are first
used, so that listing plugins imports neither torch nor anything else that is slow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ != "rollstock":
    raise ImportError(
        f"the folder of rollstock's core was imported as {__name__!r}: import `rollstock` (`pip install -e .`), "
        "and run Python with PYTHONSAFEPATH=1 where the repository's root is the current directory"
    )

_HOMES: dict[str, str] = {
    "Batch": "batch",
    "PackedTokens": "batch",
    "Trajectory": "batch",
    "ConfigError": "errors",
    "PluginError": "errors",
    "RollstockError": "errors",
    "RunError": "errors",
    "UserError": "errors",
    "WorkerLostError": "errors",
    "nearest": "errors",
    "suggest": "errors",
    "import_optional": "extras",
    "hookimpl": "hookspecs",
    "Algorithm": "interfaces.algorithm",
    "Backend": "interfaces.backend",
    "BackendState": "interfaces.backend",
    "Compressor": "interfaces.compressor",
    "Payload": "interfaces.compressor",
    "Device": "interfaces.device",
    "Memory": "interfaces.device",
    "Environment": "interfaces.environment",
    "Message": "interfaces.environment",
    "Sample": "interfaces.environment",
    "Split": "interfaces.environment",
    "Task": "interfaces.environment",
    "Executor": "interfaces.executor",
    "Retry": "interfaces.executor",
    "WorkerGroup": "interfaces.executor",
    "WorkerSpec": "interfaces.executor",
    "Extension": "interfaces.extension",
    "HEAD_OUTPUTS": "interfaces.model",
    "Head": "interfaces.model",
    "ModelSpec": "interfaces.model",
    "BatchReward": "interfaces.reward",
    "Reward": "interfaces.reward",
    "Completion": "interfaces.rollout",
    "GenerationRequest": "interfaces.rollout",
    "GenerationResult": "interfaces.rollout",
    "Rollout": "interfaces.rollout",
    "Sampling": "interfaces.rollout",
    "Router": "interfaces.router",
    "Scheduler": "interfaces.scheduler",
    "WorkerLoad": "interfaces.scheduler",
    "RunInfo": "interfaces.tracker",
    "Tracker": "interfaces.tracker",
    "Buffer": "interfaces.transport",
    "Transport": "interfaces.transport",
    "LowRank": "lowrank",
    "Metric": "metrics",
    "Metrics": "metrics",
    "merge_metrics": "metrics",
    "Loss": "micro",
    "LossFunction": "micro",
    "MicroBatch": "micro",
    "Totals": "micro",
    "REQUIRED": "options",
    "option": "options",
    "balanced_partitions": "partition",
    "PLUGIN_API": "plugin",
    "NoOptions": "plugin",
    "Plugin": "plugin",
    "AggregationMode": "reduction",
    "aggregate": "reduction",
    "RoutedTokens": "routing",
    "RouterCall": "routing",
    "RouterLayer": "routing",
    "Routing": "routing",
    "Scoring": "routing",
    "Run": "run",
    "log_to_file": "rundir",
    "RunConfig": "schema",
    "mask_secrets": "secrets",
    "derive_seed": "seeding",
    "encode_sample": "tokens",
    "read_tokenizer": "tokens",
    "fingerprint": "weights",
}

__all__ = [  # in the order of their modules
    "Batch", "PackedTokens", "Trajectory", "ConfigError", "PluginError", "RollstockError", "RunError", "UserError",
    "WorkerLostError", "nearest", "suggest", "import_optional", "hookimpl", "Algorithm", "Backend", "BackendState",
    "Compressor", "Payload", "Device", "Memory", "Environment", "Message", "Sample", "Split", "Task", "Executor",
    "Retry", "WorkerGroup", "WorkerSpec", "Extension", "HEAD_OUTPUTS", "Head", "ModelSpec", "BatchReward", "Reward",
    "Completion", "GenerationRequest", "GenerationResult", "Rollout", "Sampling", "Router", "Scheduler", "WorkerLoad",
    "RunInfo", "Tracker", "Buffer", "Transport", "Metric", "Metrics", "merge_metrics", "LowRank", "Loss",
    "LossFunction", "MicroBatch", "Totals", "REQUIRED", "option", "balanced_partitions", "PLUGIN_API", "NoOptions",
    "Plugin", "AggregationMode", "aggregate", "RoutedTokens", "RouterCall", "RouterLayer", "Routing", "Scoring", "Run",
    "log_to_file", "RunConfig", "mask_secrets", "derive_seed", "encode_sample", "read_tokenizer", "fingerprint",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rollstock' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"rollstock.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


if TYPE_CHECKING:
    from rollstock.batch import Batch, PackedTokens, Trajectory
    from rollstock.errors import (
        ConfigError,
        PluginError,
        RollstockError,
        RunError,
        UserError,
        WorkerLostError,
        nearest,
        suggest,
    )  # fmt: skip
    from rollstock.extras import import_optional
    from rollstock.hookspecs import hookimpl
    from rollstock.interfaces.algorithm import Algorithm
    from rollstock.interfaces.backend import Backend, BackendState
    from rollstock.interfaces.compressor import Compressor, Payload
    from rollstock.interfaces.device import Device, Memory
    from rollstock.interfaces.environment import Environment, Message, Sample, Split, Task
    from rollstock.interfaces.executor import Executor, Retry, WorkerGroup, WorkerSpec
    from rollstock.interfaces.extension import Extension
    from rollstock.interfaces.model import HEAD_OUTPUTS, Head, ModelSpec
    from rollstock.interfaces.reward import BatchReward, Reward
    from rollstock.interfaces.rollout import Completion, GenerationRequest, GenerationResult, Rollout, Sampling
    from rollstock.interfaces.router import Router
    from rollstock.interfaces.scheduler import Scheduler, WorkerLoad
    from rollstock.interfaces.tracker import RunInfo, Tracker
    from rollstock.interfaces.transport import Buffer, Transport
    from rollstock.lowrank import LowRank
    from rollstock.metrics import Metric, Metrics, merge_metrics
    from rollstock.micro import Loss, LossFunction, MicroBatch, Totals
    from rollstock.options import REQUIRED, option
    from rollstock.partition import balanced_partitions
    from rollstock.plugin import PLUGIN_API, NoOptions, Plugin
    from rollstock.reduction import AggregationMode, aggregate
    from rollstock.routing import RoutedTokens, RouterCall, RouterLayer, Routing, Scoring
    from rollstock.run import Run
    from rollstock.rundir import log_to_file
    from rollstock.schema import RunConfig
    from rollstock.secrets import mask_secrets
    from rollstock.seeding import derive_seed
    from rollstock.tokens import encode_sample, read_tokenizer
    from rollstock.weights import fingerprint
