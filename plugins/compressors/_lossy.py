"""What lossy compressors share: error feedback, its state, and which tensors travel as they are.

For the built-in lossy compressors, which say in `shrink` and `restore` how a flat tensor becomes a payload and back.

Error feedback (arXiv:1901.09847, algorithm 2): what a payload leaves out of a tensor is kept and added to the next one
of the same key. So everything is sent in the end: over any number of rounds, the sum of what arrives and the residual
is the sum of the tensors, to rounding.

A tensor travels whole, to the bit, if it is not of a floating-point type, if a payload would be no smaller, or if it
holds a number that is not finite. The last is for the receiver's sake: a gradient that overflowed arrives as such on
every process, all of them skip the update, and the residual stays clean.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from rollstock import Compressor, Payload, UserError, derive_seed, option

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_RESIDUAL, _ROUND = "residual:", "round:"


@dataclass(kw_only=True)
class FeedbackOptions:
    """Options that every lossy compressor has."""

    feedback: bool = option(
        True, "keep what is left out of a tensor, and add it to the next one of its key; costs a float32 copy of each"
    )


F = TypeVar("F", bound=FeedbackOptions)


class LossyCompressor(Compressor[F]):
    """Computes in float32, or in float64 for tensors of that type. Residuals have that type too, and the tensor's
    device."""

    def __init__(self, config: F | None = None) -> None:
        super().__init__(config)
        self.seed = self.rank = 0
        self.residuals: dict[str, Tensor] = {}
        self.rounds: dict[str, int] = {}

    def setup(self, *, seed: int, rank: int) -> None:
        """See `Compressor.setup`."""
        self.seed, self.rank = seed, rank

    @abstractmethod
    def shrink(self, values: Tensor, dtype: torch.dtype, *, key: str) -> Payload:
        """A payload of a flat, finite tensor of at least one number, [n] float32 or float64, that is to be restored
        as `dtype`. Shape and dtype of the payload are filled in afterwards."""

    @abstractmethod
    def restore(self, payload: Payload) -> Tensor:
        """The flat tensor, in any floating-point type, of a payload that `shrink` gave."""

    def compress(self, tensor: Tensor, *, key: str) -> Payload:
        """See `Compressor.compress`. Raises UserError for a sparse tensor, and for a key whose residual has another
        size (its tensor has changed, or the state is of another model or number of processes)."""
        if tensor.layout != torch.strided:
            raise UserError(
                f"compressor {self.plugin_name!r}: {key!r} has the layout {tensor.layout}: give a dense tensor"
            )
        shape, dtype = tuple(tensor.shape), tensor.dtype
        flat = tensor.detach().reshape(-1)
        if dtype not in DTYPES or not flat.numel() or not is_finite(flat):
            return Payload({"whole": flat}, shape, dtype)
        values = self._with_residual(flat, key)
        payload = self.shrink(values, dtype, key=key)
        payload.shape, payload.dtype = shape, dtype
        if payload.num_bytes >= payload.raw_bytes:
            payload = Payload({"whole": narrow(values, dtype)}, shape, dtype)
        if self.config.feedback:
            self._keep(values - self.decompress(payload).reshape(-1), key, whole="whole" in payload.tensors)
        return payload

    def decompress(self, payload: Payload) -> Tensor:
        """See `Compressor.decompress`; numbers beyond the range of the tensor's type become its largest."""
        if "whole" in payload.tensors:
            return payload.tensors["whole"].reshape(payload.shape)
        return narrow(self.restore(payload), payload.dtype).reshape(payload.shape)

    def noise(self, key: str, device: torch.device) -> torch.Generator:
        """The generator of the next random numbers of a key: a function of seed, process, key and round."""
        number = self.rounds[key] = self.rounds.get(key, 0) + 1
        seed = derive_seed(self.seed, "compressor", self.rank, key, number)
        return torch.Generator(device=device).manual_seed(seed)

    def state(self) -> dict[str, Tensor]:
        """Residuals, and rounds as int64 scalars, by key. The tensors are replaced, never written into."""
        rounds = {f"{_ROUND}{key}": torch.tensor(number) for key, number in self.rounds.items()}
        return {f"{_RESIDUAL}{key}": residual for key, residual in self.residuals.items()} | rounds

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take back what `state` gave, in place of all that is there. Raises UserError for an unknown name."""
        for name in state:
            if not name.startswith((_RESIDUAL, _ROUND)):
                raise UserError(
                    f"compressor {self.plugin_name!r}: the state has {name!r}, neither a residual nor a round; "
                    f"give the state that a compressor of this kind has saved"
                )
        self.residuals = {n.removeprefix(_RESIDUAL): value for n, value in state.items() if n.startswith(_RESIDUAL)}
        self.rounds = {n.removeprefix(_ROUND): int(value) for n, value in state.items() if n.startswith(_ROUND)}

    def _with_residual(self, flat: Tensor, key: str) -> Tensor:
        """The numbers of a tensor and what is owed to its key, in the type that is computed in."""
        values = flat.to(torch.promote_types(flat.dtype, torch.float32))
        residual = self.residuals.get(key) if self.config.feedback else None
        if residual is None:
            return values
        if residual.numel() != values.numel():
            raise UserError(
                f"compressor {self.plugin_name!r}: {key!r} has {values.numel()} numbers, and its residual "
                f"{residual.numel()}: a key names one tensor, and a state fits the model that it was saved with"
            )
        limit = torch.finfo(values.dtype).max
        return (values + residual.to(values.device, values.dtype)).clamp_(-limit, limit)

    def _keep(self, residual: Tensor, key: str, *, whole: bool) -> None:
        """Owe a residual to a key; a tensor that travels whole mostly leaves none, and then takes no memory."""
        if whole and not residual.any():
            self.residuals.pop(key, None)
        else:
            self.residuals[key] = residual


def is_finite(flat: Tensor) -> bool:
    """Whether all numbers of a tensor of at least one are finite (the extremes are NaN if any number is)."""
    least, most = torch.aminmax(flat)
    return bool(torch.isfinite(least) & torch.isfinite(most))


def narrow(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in another floating-point type; those beyond its range become its largest, not infinite."""
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)
