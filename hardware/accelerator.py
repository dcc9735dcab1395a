"""What CUDA and Ascend chips have in common: torch gives both the same interface, as `torch.cuda` and `torch.npu`.

For the devices of this folder. Whether a chip can be used, and what its options do, is left to each of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from rollstock import Device, Memory, UserError

if TYPE_CHECKING:
    import torch

C = TypeVar("C")  # the dataclass of a device's options


class Accelerator(Device[C]):
    """A chip beside the processor, with memory, streams and generators of its own."""

    device_type: ClassVar[str]
    """What torch calls it in `torch.device`."""

    @abstractmethod
    def api(self) -> Any:
        """The module of torch for this chip; only called where `unavailable` has nothing to say."""

    @abstractmethod
    def apply_options(self) -> None:
        """Set what the options ask for; called whenever a device is activated."""

    def count(self) -> int:
        """See `Device.count`."""
        return 0 if self.unavailable() is not None else int(self.api().device_count())

    def torch_device(self, index: int = 0) -> torch.device:
        """See `Device.torch_device`."""
        import torch

        return torch.device(self.device_type, index)

    def activate(self, index: int = 0) -> None:
        """See `Device.activate`; raises UserError too for an index that is not there."""
        reason = self.unavailable()
        if reason is not None:
            raise UserError(reason)
        count = self.api().device_count()
        if not 0 <= index < count:
            raise UserError(f"there is no {self.device_type} device {index}: this process sees {count}, counted from 0")
        self.api().set_device(index)
        self.apply_options()

    def seed(self, seed: int) -> None:
        """See `Device.seed`."""
        import torch

        torch.manual_seed(seed)
        self.api().manual_seed_all(seed)

    def synchronize(self) -> None:
        """See `Device.synchronize`."""
        self.api().synchronize()

    def memory(self, index: int = 0) -> Memory:
        """See `Device.memory`. Free is what can still be allocated: blocks that torch keeps for later are free."""
        api = self.api()
        free, total = api.mem_get_info(index)
        allocated = int(api.memory_allocated(index))
        kept = int(api.memory_reserved(index)) - allocated
        return Memory(int(total), int(free) + kept, allocated, int(api.max_memory_allocated(index)))

    def reset_peak_memory(self) -> None:
        """See `Device.reset_peak_memory`."""
        self.api().reset_peak_memory_stats()

    def release_memory(self) -> None:
        """See `Device.release_memory`."""
        self.api().empty_cache()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See `Device.is_out_of_memory`."""
        import torch

        return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
            isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
        )

    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        """See `Device.autocast`."""
        import torch

        return nullcontext() if dtype in (None, torch.float32) else torch.autocast(self.device_type, dtype=dtype)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """See `Device.stream`. It begins after the current stream's work, and later work there waits for its end."""
        api = self.api()
        outer, side = api.current_stream(), api.Stream()
        side.wait_stream(outer)
        with api.stream(side):
            yield
        outer.wait_stream(side)
