"""The optimizer of the torch backend: AdamW with clipping, a schedule, and a state of plain tensors.

For the backend, which hands it named parameters. What a gradient is of, and when there is one, is left to the backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rollstock import Metric, Metrics, UserError
from rollstock.backends.torch.config import TorchConfig
from rollstock.backends.torch.schedule import rate_factor

_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


class Optimizer:
    """AdamW. Matrices decay, vectors (norms, biases) do not. `updates` counts calls of `step`, skipped ones too."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], config: TorchConfig, total_updates: int) -> None:
        self._named = list(parameters)
        self._config = config
        self._total_updates = total_updates
        self.updates = 0
        self.skipped = 0
        decaying = [p for _, p in self._named if p.dim() >= 2]
        others = [p for _, p in self._named if p.dim() < 2]
        self._adamw = torch.optim.AdamW(
            [{"params": decaying, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            **_implementation([p for _, p in self._named]),
        )

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def step(self) -> Metrics:
        """Clip, and take one step; a gradient that is not finite changes nothing and is counted. The gradients are
        gone after it.

        Returns `grad_norm` (before clipping), `lr` and `skipped_updates`.
        """
        rate = self.learning_rate()
        gradients = [p.grad for _, p in self._named if p.grad is not None]
        norm = self._norm(gradients)
        finite = bool(norm.isfinite())
        if finite:
            if self._config.max_grad_norm > 0:
                parameters = [p for _, p in self._named]
                torch.nn.utils.clip_grads_with_norm_(parameters, self._config.max_grad_norm, norm)
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
        self.zero_grad()
        self.updates += 1
        self.skipped += not finite
        return {
            "grad_norm": Metric(float(norm), 1.0 if finite else 0.0),
            "lr": Metric(rate, 1.0, "last"),
            "skipped_updates": Metric(float(not finite), 1.0, "sum"),
        }

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of all gradients together."""
        return torch.nn.utils.get_total_norm(gradients)

    def learning_rate(self) -> float:
        """The rate of the next update."""
        config = self._config
        warmup = config.warmup_updates or round(config.warmup_ratio * self._total_updates)
        return config.learning_rate * rate_factor(
            self.updates,
            schedule=config.schedule,
            warmup_updates=warmup,
            total_updates=self._total_updates,
            min_ratio=config.min_lr_ratio,
        )

    def tensors(self) -> dict[str, Tensor]:
        """The moments and step counts, as `<parameter>|<name>`; empty before the first step."""
        return {
            f"{name}|{key}": value
            for name, parameter in self._named
            for key, value in self._adamw.state.get(parameter, {}).items()
        }

    def values(self) -> dict[str, Any]:
        """The counters, as JSON."""
        return {"updates": self.updates, "skipped": self.skipped}

    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Take back `tensors` and `values`, to the bit. Raises UserError, naming it, for a tensor that does not fit."""
        states: dict[str, dict[str, Tensor]] = {name: {} for name, _ in self._named}
        parameters = dict(self._named)
        for full, value in tensors.items():
            name, _, key = full.rpartition("|")
            if name not in states:
                raise UserError(f"the checkpoint's optimizer has {full!r}, but the model trains no such weight")
            parameter = parameters[name]
            if key != "step" and value.shape != parameter.shape:
                found, expected = list(value.shape), list(parameter.shape)
                raise UserError(f"the checkpoint's optimizer has {full!r} of shape {found}, the weight has {expected}")
            # `step` stays where AdamW keeps it: on the CPU, unless the fused form counts on the device.
            on_device = key != "step" or self._counts_on_device()
            own = value.detach() if key == "step" else self._part(value.detach(), parameter)
            states[name][key] = own.clone().to(parameter.device if on_device else "cpu")
        self._adamw.state.clear()
        for name, parameter in self._named:
            if states[name]:
                self._adamw.state[parameter] = states[name]
        self.updates = int(values["updates"])
        self.skipped = int(values["skipped"])

    def _part(self, full: Tensor, like: Tensor) -> Tensor:
        """What is kept here of a whole tensor that goes with a parameter."""
        return full

    def _counts_on_device(self) -> bool:
        return bool(self._adamw.param_groups[0]["fused"])


def _implementation(parameters: Sequence[nn.Parameter]) -> dict[str, bool]:
    """The fastest form of AdamW that torch has for these parameters."""
    if all(p.device.type in _FUSED_DEVICES and p.is_floating_point() for p in parameters):
        return {"fused": True}
    return {"foreach": True}
