"""A torch module for a chip that is not here: it has the documented names, records their calls, and nothing else."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

CALLS: dict[str, tuple[str, ...]] = {
    "is_available": (),
    "device_count": (),
    "set_device": ("device",),
    "synchronize": ("device",),
    "manual_seed_all": ("seed",),
    "mem_get_info": ("device",),
    "memory_allocated": ("device",),
    "memory_reserved": ("device",),
    "max_memory_allocated": ("device",),
    "reset_peak_memory_stats": ("device",),
    "empty_cache": (),
    "current_stream": ("device",),
    "utilization": ("device",),
}
"""What torch.cuda (docs.pytorch.org/docs/stable/cuda.html) and torch.npu (`__all__` of torch_npu.npu) both have."""


class RecordedAPI:
    """Stands for `torch.cuda` or `torch.npu`; `calls` lists what was called, in order. Unknown names do not exist."""

    def __init__(self, answers: dict[str, Any], extra: dict[str, tuple[str, ...]]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.parameters = {**CALLS, **extra}
        for name, parameters in self.parameters.items():
            setattr(self, name, self._recorder(name, parameters, answers.get(name)))

    def _recorder(self, name: str, parameters: tuple[str, ...], answer: Any) -> Callable[..., Any]:
        def call(*positional: Any, **named: Any) -> Any:
            assert len(positional) <= len(parameters)
            assert set(named) <= set(parameters[len(positional) :])
            self.calls.append((name, *positional, *named.items()))
            return answer

        return call

    def Stream(self) -> "RecordedStream":  # noqa: N802  # torch's name
        return RecordedStream("side", self.calls)

    def stream(self, stream: "RecordedStream") -> AbstractContextManager[None]:
        self.calls.append(("stream", stream.name))
        return nullcontext()


class RecordedStream:
    def __init__(self, name: str, calls: list[tuple[Any, ...]]) -> None:
        self.name, self._calls = name, calls

    def wait_stream(self, stream: "RecordedStream") -> None:
        self._calls.append(("wait_stream", self.name, stream.name))


@pytest.fixture
def recorded() -> Callable[..., RecordedAPI]:
    """A chip with two devices of 1000 bytes: 300 free, 500 held by torch, of which 400 are in use."""

    def make(**extra: tuple[str, ...]) -> RecordedAPI:
        answers = {
            "is_available": True,
            "device_count": 2,
            "mem_get_info": (300, 1000),
            "memory_allocated": 400,
            "memory_reserved": 500,
            "max_memory_allocated": 450,
            "utilization": 37,
        }
        api = RecordedAPI(answers, extra)
        answers["current_stream"] = RecordedStream("current", api.calls)
        api.current_stream = api._recorder("current_stream", ("device",), answers["current_stream"])
        api.matmul, api.conv = SimpleNamespace(allow_hf32=None), SimpleNamespace(allow_hf32=None)
        return api

    return make
