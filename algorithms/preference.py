"""Pairs of responses of which one is preferred: found in a batch, turned into losses, and measured.

For the algorithms of this folder that learn from preferences, and for those of other packages. What a response is worth
(a log-prob against a reference's, a reward model's score) is left to the algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rollstock import Algorithm, Batch, Metric, Metrics

C = TypeVar("C")  # the dataclass of an algorithm's options
PreferenceKind: TypeAlias = Literal["sigmoid", "ipo", "hinge", "robust"]


class PairAlgorithm(Algorithm[C]):
    """An algorithm that learns from pairs in the data; nothing is sampled and nothing is scored. The loss is the
    subclass's."""

    offline = True
    whole_groups = True

    @property
    def samples_per_prompt(self) -> int:
        """Two: the chosen response and the rejected one."""
        return 2

    def advantages(self, batch: Batch) -> Tensor:
        """`[B, T]`: which way each response is pushed, 1 for the chosen and -1 for the rejected; for the files only."""
        return (2 * batch.scores - 1)[:, None] * batch.mask


@dataclass(frozen=True)
class Pairs:
    """P pairs: `better` and `worse` are indices [P] into a batch, `weights` [P] add up to 1 over those of a group."""

    better: Tensor
    worse: Tensor
    weights: Tensor

    def mean(self, values: Tensor) -> Metric:
        """A metric: the weighted mean of `values` [P]; its weight is the number of groups that have a pair."""
        total = float(self.weights.sum())
        if total == 0:
            return Metric(0.0, 0.0)
        return Metric(float((self.weights * values.detach()).double().sum()) / total, total)

    def metrics(self, rewards: Tensor) -> Metrics:
        """What the field records of pairs, from the worth [B] of every response: both sides' means, how far apart they
        are, and the share of pairs in the right order (equal ones are not)."""
        better, worse = rewards[self.better], rewards[self.worse]
        return {
            "rewards/chosen": self.mean(better),
            "rewards/rejected": self.mean(worse),
            "rewards/margins": self.mean(better - worse),
            "rewards/accuracies": self.mean((better > worse).to(rewards.dtype)),
        }


def preferred_pairs(scores: Tensor, groups: Tensor, valid: Tensor) -> Pairs:
    """Every pair of one group whose scores differ, from scores [B], groups [B] and `valid` [B]; others make none.

    `valid` is False for responses that cannot be compared, such as those without a token. Of n ranked responses each of
    the n (n - 1) / 2 pairs counts alike (arXiv:2203.02155, section 3.5).
    """
    same = (groups[:, None] == groups[None, :]) & valid[:, None] & valid[None, :]
    better, worse = torch.nonzero(same & (scores[:, None] > scores[None, :]), as_tuple=True)
    _, index, counts = torch.unique(groups[better], return_inverse=True, return_counts=True)
    return Pairs(better, worse, 1 / counts[index].to(scores.dtype))


def preference_loss(
    gaps: Tensor, *, beta: float, kind: PreferenceKind, label_smoothing: float = 0.0, margin: float = 0.0
) -> Tensor:
    """The loss of each pair [P], from how much more the better response is worth than the worse one (`gaps` [P]).

    With z = beta * gap - margin and e = `label_smoothing`, the share of labels that are taken to be wrong:

    | kind      | loss                                                        | source                              |
    |-----------|-------------------------------------------------------------|-------------------------------------|
    | `sigmoid` | -(1 - e) log sigmoid(z) - e log sigmoid(-z)                 | arXiv:2305.18290, 7; e: cDPO        |
    | `robust`  | (-(1 - e) log sigmoid(z) + e log sigmoid(-z)) / (1 - 2 e)   | arXiv:2403.00409                    |
    | `hinge`   | max(0, 1 - z)                                               | arXiv:2305.10425                    |
    | `ipo`     | (gap - 1 / (2 beta))^2, which knows no margin               | arXiv:2310.12036, 17 (beta is tau)  |

    Raises ValueError for another kind.
    """
    z = beta * gaps - margin
    match kind:
        case "sigmoid":
            return -(1 - label_smoothing) * logsigmoid(z) - label_smoothing * logsigmoid(-z)
        case "robust":
            unbiased = -(1 - label_smoothing) * logsigmoid(z) + label_smoothing * logsigmoid(-z)
            return unbiased / (1 - 2 * label_smoothing)
        case "hinge":
            return (1 - z).clamp(min=0)
        case "ipo":
            return (gaps - 1 / (2 * beta)).square()
    raise ValueError(f"kind must be one of {', '.join(get_args(PreferenceKind))}; got {kind!r}")
