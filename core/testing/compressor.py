"""The conformance kit of compressors: tensors come back with shape and type, close enough, and smaller on the way.

For authors of compressors, who call `check_compressor(MyCompressor)` in a test.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollstock.interfaces.compressor import Compressor, Payload
from rollstock.testing.kit import NotApplicable, Report, expect, fail, run_checks
from rollstock.testing.subject import Subject, check_json
from rollstock.testing.subject import check_options as check_plugin_options

SHAPES: tuple[tuple[int, ...], ...] = ((64, 64), (1000,), (3, 5, 7), (1,), (), (0,), (4, 0))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDS = tuple(2**n for n in range(6, 13))
"""After how many rounds error feedback is judged: one number of 1024 sent at a time needs a few thousand."""


@dataclass(frozen=True)
class CompressorCase:
    """The compressor under test, and the largest error that it may make."""

    subject: Subject[Compressor[Any]]
    tolerance: float
    ratio: float

    def make(self) -> Compressor[Any]:
        """A fresh compressor, set up."""
        compressor = self.subject.make()
        compressor.setup(seed=0, rank=0)
        return compressor


def check_compressor(
    compressor: type[Compressor[Any]] | Compressor[Any] | str,
    *,
    options: Mapping[str, Any] | None = None,
    tolerance: float = 1.0,
    ratio: float = 1.0,
    skip: Mapping[str, str] | None = None,
) -> Report:
    """Check a compressor, given as a class, an instance or an installed plugin's name.

    options: of the plugin; tolerance: the error of normally distributed numbers, relative to their norm (0: lossless
    to the bit; at most 1, which says that something is better than nothing); ratio: bytes on the wire relative to the
    tensor's, for a large one; skip: checks that do not hold on purpose, each with the reason. Raises
    ConformanceError.
    """
    case = CompressorCase(Subject(Compressor, compressor, options), tolerance, ratio)
    return run_checks(case.subject.label, CHECKS, case, skip=skip)


def check_options(case: CompressorCase) -> None:
    """Every option has a help text, and the defaults fit their own types and bounds; making a plugin leaves its
    config alone."""
    check_plugin_options(case.subject)


def check_shapes(case: CompressorCase) -> None:
    """What is decompressed has the shape, type and device of what was compressed, which stays as it was."""
    for shape in SHAPES:
        for dtype in DTYPES:
            tensor = _numbers(shape).to(dtype)
            kept = tensor.clone()
            payload, found = _trip(case.make(), tensor)
            expect(torch.equal(tensor, kept), "`compress` changes its tensor", mend="write into no argument")
            expect(
                tuple(payload.shape) == shape and payload.dtype == dtype,
                f"the payload of a {dtype} tensor {list(shape)} says {payload.dtype} {list(payload.shape)}",
                mend="Payload(..., shape=tuple(tensor.shape), dtype=tensor.dtype)",
            )
            expect(
                tuple(found.shape) == shape and found.dtype == dtype and found.device == tensor.device,
                f"a {dtype} tensor {list(shape)} comes back as {found.dtype} {list(found.shape)}",
                mend="`.reshape(payload.shape).to(payload.dtype)` at the end of `decompress`",
            )
            expect(bool(torch.isfinite(found).all()), f"{list(shape)} comes back not finite", mend="mind scales of 0")


def check_payload(case: CompressorCase) -> None:
    """A payload can travel: tensors, and values that are JSON; it decompresses on another compressor of the same
    options."""
    tensor = _numbers((32, 16))
    payload = case.make().compress(tensor, key="layer.weight")
    check_json(payload.values, "`values` of the payload")
    arrived: Payload = pickle.loads(pickle.dumps(payload))
    ours, theirs = case.make().decompress(payload), case.make().decompress(arrived)
    expect(
        torch.equal(ours, theirs),
        "a payload that travelled decompresses to something else",
        mend="put all that `decompress` needs into the payload: the other side has only that",
    )


def check_size(case: CompressorCase) -> None:
    """A large tensor is no larger on the wire than it was."""
    tensor = _numbers((256, 256))
    payload = case.make().compress(tensor, key="large")
    ratio = payload.num_bytes / (tensor.numel() * tensor.element_size())
    expect(
        0 < ratio <= case.ratio,
        f"256 KiB become {payload.num_bytes} bytes, {ratio:.3g} of the tensor (at most {case.ratio} is allowed)",
        mend="put the small tensors into `Payload.tensors`; `num_bytes` counts those",
    )


def check_error(case: CompressorCase) -> None:
    """The error is within the tolerance; zeros stay zeros, and the scale of the numbers does not matter."""
    for scale in (1.0, 1e-6, 1e4):
        tensor = scale * _numbers((64, 64))
        _, found = _trip(case.make(), tensor)
        error = float((found - tensor).norm() / tensor.norm())
        expect(
            error <= case.tolerance,
            f"the error of numbers of the order of {scale:g} is {error:.3g} of their norm (at most "
            f"{case.tolerance:g} is allowed)",
            mend="choose the scale by the tensor; half-precision types do not reach far",
        )
    zeros = torch.zeros(64, 8)
    _, found = _trip(case.make(), zeros)
    expect(torch.equal(found, zeros), "zeros do not come back as zeros", mend="mind a scale of 0")


def check_determinism(case: CompressorCase) -> None:
    """The same tensors give the same payloads, whatever torch's global generator."""
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        results.append(_trip(case.make(), _numbers((64, 8)))[1])
    expect(
        torch.equal(*results),
        "the same tensor comes back as two different ones",
        mend="seed a generator of your own (rollstock.derive_seed of the key and a counter) for stochastic rounding",
    )


def check_feedback(case: CompressorCase) -> None:
    """What a compressor keeps back it sends later: over many rounds the mean of what arrives comes nearer to the
    truth."""
    compressor = case.make()
    tensor = _numbers((32, 32))
    total = torch.zeros_like(tensor)
    first = last = 0.0
    for count in range(1, ROUNDS[-1] + 1):
        total += compressor.decompress(compressor.compress(tensor, key="steady"))
        if count == 1:
            first = float((total - tensor).norm())
            if not compressor.state():
                raise NotApplicable("it keeps nothing back (its state is empty)")
        if count in ROUNDS:
            last = float((total / count - tensor).norm())
            if last <= 0.5 * first:
                return
    fail(
        f"after {ROUNDS[-1]} rounds the mean is {last:.3g} from the truth, and {first:.3g} after the first",
        mend="add the residual of a key to its next tensor, and keep tensor minus what was sent",
    )


def check_streams(case: CompressorCase) -> None:
    """Streams of different keys do not mix."""
    tensors = {"first": _numbers((16, 8)), "second": 3 * _numbers((16, 8), seed=1)}
    together, alone = case.make(), {key: case.make() for key in tensors}
    for _ in range(3):
        for key, tensor in tensors.items():
            mixed = together.decompress(together.compress(tensor, key=key))
            single = alone[key].decompress(alone[key].compress(tensor, key=key))
            expect(
                torch.equal(mixed, single),
                f"the stream {key!r} arrives differently when another is sent in between",
                mend="keep residuals by `key`",
            )


def check_state(case: CompressorCase) -> None:
    """State is tensors by name, and a compressor that takes it back goes on exactly as the one that gave it."""
    compressor = case.make()
    for seed in range(3):
        compressor.compress(_numbers((16, 8), seed=seed), key="a")
    state = compressor.state()
    expect(
        isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values()),
        f"the state is {state!r:.100}",
        mend="return a dict of tensors",
    )
    other = case.make()
    other.load_state({name: value.clone() for name, value in state.items()})
    tensor = _numbers((16, 8), seed=9)
    ours, theirs = (each.decompress(each.compress(tensor, key="a")) for each in (compressor, other))
    expect(
        torch.equal(ours, theirs),
        "a compressor that took the state back sends something else than the one that gave it",
        mend="put every residual into `state`, and take it back in `load_state`",
    )


def _numbers(shape: tuple[int, ...], *, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _trip(compressor: Compressor[Any], tensor: Tensor) -> tuple[Payload, Tensor]:
    payload = compressor.compress(tensor, key="weight")
    expect(
        isinstance(payload, Payload),
        f"`compress` gives {type(payload).__name__}",
        mend="return a rollstock.Payload",
    )
    return payload, compressor.decompress(payload)


CHECKS = (
    check_options,
    check_shapes,
    check_payload,
    check_size,
    check_error,
    check_determinism,
    check_feedback,
    check_streams,
    check_state,
)
