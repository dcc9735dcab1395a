"""The conformance kit of devices: availability, seeds, memory and precision of a chip.

For authors of device plugins, who call `check_device(MyDevice)` in a test. Where the chip is not there, the kit
checks that the plugin says so, and leaves out the rest with that reason.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from rollstock.errors import UserError
from rollstock.interfaces.device import Device, Memory
from rollstock.testing.kit import NotApplicable, Report, expect, fail, run_checks
from rollstock.testing.subject import Subject
from rollstock.testing.subject import check_options as check_plugin_options

MIB = 1 << 20
TOO_MUCH = 1 << 50  # bytes: more than any machine has


@dataclass(frozen=True)
class DeviceCase:
    """The device under test."""

    subject: Subject[Device[Any]]

    def make(self) -> Device[Any]:
        """An active device; NotApplicable with its reason where the chip cannot be used."""
        device = self.subject.make()
        reason = device.unavailable()
        if reason is not None:
            raise NotApplicable(f"not on this machine: {reason}")
        device.activate()
        return device


def check_device(
    device: type[Device[Any]] | Device[Any] | str,
    *,
    options: Mapping[str, Any] | None = None,
    skip: Mapping[str, str] | None = None,
) -> Report:
    """Check a device, given as a class, an instance or an installed plugin's name.

    options: of the plugin; skip: checks that do not hold on purpose, each with the reason. Raises ConformanceError.
    """
    case = DeviceCase(Subject(Device, device, options))
    return run_checks(case.subject.label, CHECKS, case, skip=skip)


def check_options(case: DeviceCase) -> None:
    """Every option has a help text, and the defaults fit their own types and bounds; making a plugin leaves its
    config alone."""
    check_plugin_options(case.subject)


def check_availability(case: DeviceCase) -> None:
    """`unavailable` is None or a reason; with a reason there are 0 devices, and `activate` raises a UserError that
    gives it."""
    device = case.subject.make()
    reason = device.unavailable()
    count = device.count()
    expect(
        isinstance(count, int) and count >= 0, f"count() is {count!r}", mend="return how many devices this process sees"
    )
    if reason is None:
        expect(count > 0, "it is available with no device", mend="let `unavailable` say that there is none")
        return
    expect(
        isinstance(reason, str) and len(reason) > 10,
        f"unavailable() is {reason!r}",
        mend="return None, or a sentence that says what is missing and what to do",
    )
    expect(
        count == 0, f"it cannot be used ({reason}), and counts {count} devices", mend="count 0 where there is a reason"
    )
    try:
        device.activate()
    except UserError as error:
        expect(
            reason in str(error),
            f"the error of `activate` does not give the reason: {error}",
            mend="raise rollstock.UserError with the text of `unavailable`",
        )
    else:
        fail("`activate` works although the device is not available", mend="raise rollstock.UserError with the reason")


def check_names(case: DeviceCase) -> None:
    """Each index has a torch device; the collective backend and the visibility variable have names."""
    device = case.subject.make()
    collective, variable = device.collective_backend, device.visibility_variable
    expect(
        isinstance(collective, str) and collective,
        f"collective_backend is {collective!r}",
        mend="return what torch.distributed calls it: gloo, nccl, hccl",
    )
    expect(
        variable is None or (isinstance(variable, str) and variable),
        f"visibility_variable is {variable!r}",
        mend="return the name of an environment variable, or None",
    )
    device = case.make()
    places = [device.torch_device(index) for index in range(device.count())]
    expect(
        all(isinstance(place, torch.device) for place in places),
        f"torch_device gives {places}",
        mend="return a torch.device for every index below count()",
    )


def check_seed(case: DeviceCase) -> None:
    """One seed gives one sequence of random numbers, on the device and on the CPU; another seed, another."""
    device = case.make()
    places = {torch.device("cpu"), device.torch_device()}

    def draw(seed: int) -> list[torch.Tensor]:
        device.seed(seed)
        return [torch.rand(8, device=place).cpu() for place in sorted(places, key=str)]

    first, again, other = draw(1), draw(1), draw(2)
    mend = "seed torch's generator of the CPU and those of all devices"
    same = all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    expect(same, "one seed gives two sequences of random numbers", mend=mend)
    differ = all(not torch.equal(one, two) for one, two in zip(first, other, strict=True))
    expect(differ, "two seeds give one sequence of random numbers", mend=mend)
    device.seed(2**63 - 1)


def check_memory(case: DeviceCase) -> None:
    """Memory is in bytes: free at most all, the peak at least what is held, and what is allocated shows in it."""
    device = case.make()
    _check_bytes(device.memory())
    device.reset_peak_memory()
    before = device.memory()
    held = torch.ones(64 * MIB, dtype=torch.uint8, device=device.torch_device())
    device.synchronize()
    during = device.memory()
    _check_bytes(during)
    grown = max(during.allocated - before.allocated, during.peak - before.peak, before.free - during.free)
    expect(
        grown >= 32 * MIB,
        f"64 MiB were allocated, and memory went from {before} to {during}",
        mend="report bytes of the device, as they are now",
    )
    del held
    gc.collect()
    device.release_memory()
    _check_bytes(device.memory())


def _check_bytes(memory: Memory) -> None:
    values = (memory.total, memory.free, memory.allocated, memory.peak)
    expect(
        all(isinstance(value, int) and value >= 0 for value in values) and memory.total > 0,
        f"memory() is {memory}",
        mend="all four are whole numbers of bytes",
    )
    expect(memory.free <= memory.total, f"more is free than there is: {memory}", mend="free is a part of total")
    expect(
        memory.peak >= memory.allocated,
        f"the peak is below what is held: {memory}",
        mend="peak is the most that was held",
    )


def check_out_of_memory(case: DeviceCase) -> None:
    """`is_out_of_memory` knows a failed allocation from any other error."""
    device = case.make()
    mend = "look for torch.OutOfMemoryError, and for what this device's allocator raises; for nothing else"
    try:
        torch.empty(TOO_MUCH, dtype=torch.uint8, device=device.torch_device())
    except Exception as error:
        expect(device.is_out_of_memory(error), f"a failed allocation is not known as one: {error!r:.200}", mend=mend)
    else:
        raise NotApplicable("the allocator promises more memory than there can be")
    for wrong in (ValueError("out of range"), RuntimeError("shape mismatch"), KeyError("memory")):
        expect(not device.is_out_of_memory(wrong), f"{wrong!r} counts as a failed allocation", mend=mend)


def check_autocast(case: DeviceCase) -> None:
    """In `autocast(dtype)` matrix products run in that type; with None or float32 nothing changes."""
    device = case.make()
    matrix = torch.eye(4, device=device.torch_device())

    def product(context: AbstractContextManager[Any]) -> torch.dtype:
        with context:
            return (matrix @ matrix).dtype

    for dtype in (None, torch.float32):
        found = product(device.autocast(dtype))
        expect(
            found == torch.float32,
            f"in autocast({dtype}) products are {found}",
            mend="return contextlib.nullcontext() there",
        )
    try:
        lower = device.autocast(torch.bfloat16)
    except UserError:
        return
    found = product(lower)
    expect(
        found == torch.bfloat16,
        f"in autocast(torch.bfloat16) products are {found}",
        mend="return torch.autocast of the device's type, or raise rollstock.UserError where it cannot",
    )


def check_streams(case: DeviceCase) -> None:
    """Work inside `stream()` is done after `synchronize()`."""
    device = case.make()
    with device.stream():
        total = torch.ones(1000, device=device.torch_device()).sum()
    device.synchronize()
    expect(
        float(total.cpu()) == 1000.0,
        f"a sum on a stream is {float(total)}",
        mend="`synchronize` waits for every stream",
    )


def check_statistics(case: DeviceCase) -> None:
    """Statistics are numbers by plain names."""
    device = case.make()
    found: Callable[[], Mapping[str, object]] = device.statistics
    for name, value in found().items():
        expect(
            isinstance(name, str) and "/" not in name and isinstance(value, int | float),
            f"statistics() has {name!r}: {value!r}",
            mend="names without prefix, such as `utilisation`, and numbers",
        )


CHECKS = (
    check_options,
    check_availability,
    check_names,
    check_seed,
    check_memory,
    check_out_of_memory,
    check_autocast,
    check_streams,
    check_statistics,
)
