"""How the losses of tokens become one scalar: sums over counts that may be global, so that slices add up.

For `MicroBatch.loss`, and for authors of algorithms, who find it among the functions of
`rollstock.algorithms.functional`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

AggregationMode: TypeAlias = Literal[
    "token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"
]


def aggregate(
    losses: Tensor, mask: Tensor, *, mode: AggregationMode, denominator: int | float | Tensor | None = None
) -> Tensor:
    """Reduce losses of tokens [B, T] to one scalar, a sum over a global count.

    | mode                      | what is added up     | divided by `denominator`; its default                   |
    |---------------------------|----------------------|---------------------------------------------------------|
    | `token_mean`              | tokens               | number of unmasked tokens                               |
    | `token_sum`               | tokens               | nothing: a denominator raises ValueError                |
    | `seq_mean_token_sum`      | each sequence's sum  | number of sequences with an unmasked token              |
    | `seq_mean_token_mean`     | each sequence's mean | number of sequences with an unmasked token              |
    | `seq_mean_token_sum_norm` | each sequence's sum  | a constant without default (leaving it out: ValueError) |

    `denominator` is the count over the whole mini-batch: every micro-batch on every rank. With it, the results of
    slices add up to the result of the whole, and so do the gradients, whichever sequences a slice holds. Its default
    counts only what is here, which is right when everything is here: a mean of the means of slices is another number.
    A count of 0 says that everything is masked, and gives 0.

    The constant is the whole divisor. Dr. GRPO (arXiv:2503.20783) takes the number of sequences times the largest
    response length allowed; the width T would make the loss depend on the padding, which is why it is not the
    default.
    """
    if mode not in get_args(AggregationMode):
        raise ValueError(f"mode must be one of {', '.join(get_args(AggregationMode))}; got {mode!r}")
    if losses.shape != mask.shape:
        raise ValueError(f"expected tensors of one shape, got losses {list(losses.shape)}, mask {list(mask.shape)}")
    if mode == "token_sum" and denominator is not None:
        raise ValueError("aggregate: token_sum divides by nothing; leave out denominator or use mode='token_mean'")
    if mode == "seq_mean_token_sum_norm" and denominator is None:
        raise ValueError("aggregate: seq_mean_token_sum_norm needs a denominator, such as num_sequences * max_tokens")
    full = losses if losses.dtype in (torch.float32, torch.float64) else losses.float()
    kept = torch.where(mask, full, 0.0)  # multiplying by the mask would keep NaN and inf alive
    if mode == "seq_mean_token_mean":
        kept = kept.sum(-1) / mask.sum(-1).clamp_min(1)
    total = kept.sum()
    if mode == "token_sum":
        return total
    if denominator is None:
        denominator = mask.sum() if mode == "token_mean" else mask.any(-1).sum()
    count = torch.as_tensor(denominator, dtype=total.dtype, device=total.device)
    return total / torch.where(count > 0, count, 1.0)
