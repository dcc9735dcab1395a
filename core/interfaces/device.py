"""The device kind: the chip. The core and the backends reach memory, streams, seeds and collectives through it
alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollstock.plugin import C, Plugin

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Memory:
    """Bytes of one device: all there are, those free now, those that this process holds, and the most it has held."""

    total: int
    free: int
    allocated: int
    peak: int


class Device(Plugin[C]):
    """One kind of chip. It has the calls that somebody makes, and no more."""

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why this chip cannot be used here (package missing, package broken, no driver, no device) and what to do; or
        None."""

    @abstractmethod
    def count(self) -> int:
        """How many devices this process can see; 0 where `unavailable` has a reason."""

    @abstractmethod
    def torch_device(self, index: int = 0) -> torch.device:
        """The torch device of `index`."""

    @abstractmethod
    def activate(self, index: int = 0) -> None:
        """Make `index` the current device and apply the options; raises UserError with the reason of `unavailable`."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed every generator of torch on this device and on the CPU."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work in flight is done."""

    @abstractmethod
    def memory(self, index: int = 0) -> Memory:
        """Bytes now, and the peak since `reset_peak_memory`."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Start a new peak, where the device keeps one."""

    @abstractmethod
    def release_memory(self) -> None:
        """Give cached blocks back to the system."""

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an exception says that an allocation failed, so that a smaller one may be tried."""

    @abstractmethod
    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        """A context in which matrix products run in `dtype`; None or float32: a context that changes nothing."""

    @abstractmethod
    def stream(self) -> AbstractContextManager[Any]:
        """A context whose work may run beside other work; on a chip without streams it changes nothing."""

    @property
    @abstractmethod
    def collective_backend(self) -> str:
        """What torch.distributed calls this chip's collectives: gloo, nccl, hccl."""

    @property
    @abstractmethod
    def visibility_variable(self) -> str | None:
        """The environment variable that hides devices from a process, if there is one."""

    def profiler_activities(self) -> Sequence[Any]:
        """What `torch.profiler` calls this chip's work (members of `ProfilerActivity`), so that a profile shows it
        beside the CPU's; nothing where torch's profiler knows no such chip."""
        return ()

    def statistics(self) -> dict[str, float]:
        """Numbers worth logging: utilisation, temperature, clock, as far as the chip tells; names without prefix."""
        return {}
