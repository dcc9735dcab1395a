"""The optimizer of a spread model: each process updates the weights that it holds; the norm is that of all."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollstock import Metrics
from rollstock.backends.fsdp.sharding import own_part
from rollstock.backends.torch.config import TorchConfig
from rollstock.backends.torch.optimizer import Optimizer


class ShardedOptimizer(Optimizer):
    """AdamW over sharded parameters. All processes step alike, so that only one of them reports."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        config: TorchConfig,
        total_updates: int,
        *,
        reports: bool,
    ) -> None:
        super().__init__(parameters, config, total_updates)
        self._reports = reports

    def step(self) -> Metrics:
        """See `Optimizer.step`."""
        metrics = super().step()
        return metrics if self._reports else {}

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        norm = super()._norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _part(self, full: Tensor, like: Tensor) -> Tensor:
        return own_part(full, like)
