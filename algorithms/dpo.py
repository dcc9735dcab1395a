"""Direct preference optimisation (DPO), arXiv:2305.18290, equation 7; also IPO, conservative and robust DPO, SimPO.

Learns from pairs of responses that the data holds, one chosen and one rejected, without sampling and without a reward
model: how much likelier the policy makes a response than the reference does is its implicit reward, and that of the
chosen one shall be the larger. Assumes that the reference (the model that training starts from) is near the data:
fine-tune it on the chosen responses first. Two equal responses have a loss, and no gradient.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from rollstock import Loss, MicroBatch, hookimpl, option
from rollstock.algorithms.preference import PairAlgorithm, PreferenceKind, preference_loss, preferred_pairs


@dataclass(kw_only=True)
class DPOConfig:
    """Options of DPO."""

    beta: float = option(
        0.1, "how strongly the policy is held near the reference; above 0; IPO's tau", minimum=0, maximum=1_000
    )
    kind: PreferenceKind = option("sigmoid", "loss of a pair; sigmoid is DPO, or conservative DPO with label_smoothing")
    label_smoothing: float = option(
        0.0, "share of pairs taken to be labelled the wrong way round (sigmoid, robust)", minimum=0, maximum=0.49
    )
    reference_free: bool = option(False, "compare log-probs alone, without a reference model")
    average_logprobs: bool = option(False, "compare means over a response's tokens, not their sums")
    margin: float = option(0.0, "how far the chosen reward must lead (all but ipo)", minimum=0, maximum=1e6)
    sft_coef: float = option(
        0.0, "weight of the chosen response's mean cross-entropy, added to the loss", minimum=0, maximum=1_000
    )

    def __post_init__(self) -> None:
        if self.beta == 0:
            raise ValueError("beta must be above 0: with 0 no pair has a gradient")
        if self.label_smoothing and self.kind not in ("sigmoid", "robust"):
            raise ValueError(
                f"label_smoothing does nothing with kind: {self.kind}; use sigmoid or robust, or set it to 0"
            )
        if self.kind == "robust" and not self.label_smoothing:
            raise ValueError("kind: robust without label_smoothing is kind: sigmoid; say how many labels may be wrong")
        if self.margin and self.kind == "ipo":
            raise ValueError("margin does nothing with kind: ipo, whose target is 1 / (2 beta); set it to 0")


class DPO(PairAlgorithm[DPOConfig]):
    """A classification of pairs by the policy's own log-probs; nothing is sampled and nothing is scored."""

    needs = frozenset({"ref_logprobs"})

    def needed_columns(self) -> Set[str]:
        """The reference model's log-probs, unless the comparison does without."""
        return frozenset() if self.config.reference_free else self.needs

    def loss(self, micro: MicroBatch) -> Loss:
        """The mean loss of the pairs, found by their scores, with the term for the chosen responses."""
        lengths = micro.mask.sum(dim=1).clamp(min=1)
        logprobs = _sums(micro.logprobs, micro.mask)  # [b]
        reference = torch.zeros_like(logprobs) if self.config.reference_free else _sums(micro.ref_logprobs, micro.mask)
        worth = logprobs - reference
        if self.config.average_logprobs:
            worth = worth / lengths
        pairs = preferred_pairs(micro.scores, micro.groups, micro.mask.any(dim=1))
        losses = preference_loss(
            worth[pairs.better] - worth[pairs.worse],
            beta=self.config.beta,
            kind=self.config.kind,
            label_smoothing=self.config.label_smoothing,
            margin=self.config.margin,
        )
        metrics = {
            **pairs.metrics(self.config.beta * worth.detach()),
            "logps/chosen": pairs.mean(logprobs[pairs.better]),
            "logps/rejected": pairs.mean(logprobs[pairs.worse]),
        }
        if self.config.sft_coef:
            nll = -(logprobs / lengths)[pairs.better]
            losses = losses + self.config.sft_coef * nll
            metrics["actor/chosen_nll"] = pairs.mean(nll)
        return micro.group_loss(pairs.weights * losses, metrics, name="actor/loss")


def _sums(values: Tensor, mask: Tensor) -> Tensor:
    """[b]: the sum over each response's own tokens."""
    return torch.where(mask, values, 0.0).sum(dim=1)


@hookimpl
def rollstock_algorithm() -> type[DPO]:
    """Give `DPO`."""
    return DPO
