"""From logits to tokens: temperature, top-k, top-p, and a draw by inverting the cumulative distribution.

For the engine's inner loop: everything is vectorised over the rows of a batch, and a row's token depends on that row's
logits and uniform number alone. Where the numbers come from is left to `uniforms`, when to stop to `stopping`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 256  # tokens summed at once when inverting: two searches among a few hundred, not one in the vocabulary
_MOST_FORBIDDEN = 0.99  # the mass of forbidden tokens beside which the others' probabilities keep their digits
_FIRST_SORT = 1024  # how many of the most probable tokens top-p looks at before it looks at more


def choose(
    logits: Tensor,
    uniform: Tensor,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    forbidden: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose a token in every row; returns token ids `[B]` int64 and their log-probs `[B]` float32, in nats.

    logits: `[U, V]`; uniform: `[B]` in [0, 1); rows: `[B]`, which of the logits are each row's, None: those at its
    place. The log-probs are those of the whole distribution at `temperature`, before anything cut it, because that is
    what a trainer recomputes. Temperature 0 takes the most probable token and reports its log-prob at temperature 1.
    top_k 0 and top_p 1 cut nothing; top-p applies to what top-k leaves, renormalised. `forbidden`, token ids `[n]`, are
    never chosen; the other cuts see what they leave.
    """
    logits = logits.float()
    if temperature == 0:
        tokens = (logits if forbidden is None else logits.index_fill(1, forbidden, -torch.inf)).argmax(dim=-1)
        logprobs = _pick(logits, tokens) - logits.logsumexp(dim=-1)
        return (tokens, logprobs) if rows is None else (tokens[rows], logprobs[rows])
    if temperature != 1:
        logits = logits / temperature
    probs = torch.softmax(logits, dim=-1)
    if forbidden is not None and bool((probs[:, forbidden].sum(dim=-1) < _MOST_FORBIDDEN).all()):
        probs.index_fill_(1, forbidden, 0.0)
    elif forbidden is not None:  # so much of the mass is theirs that little or nothing of the others is left in `probs`
        allowed = torch.softmax(logits.index_fill(1, forbidden, -torch.inf), dim=-1)
        tokens = invert(truncate(allowed, top_k=top_k, top_p=top_p), uniform, rows)
        whole = logits.logsumexp(dim=-1)
        return tokens, _pick(logits, tokens, rows) - (whole if rows is None else whole[rows])
    tokens = invert(truncate(probs, top_k=top_k, top_p=top_p), uniform, rows)
    return tokens, _pick(probs, tokens, rows).log()


def truncate(probs: Tensor, *, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """`probs` `[B, V]` with 0 for every token that top-k or top-p drops; what is left is not renormalised.

    top-k keeps the tokens that fewer than `top_k` others exceed. top-p keeps the tokens for which all more probable
    ones together have less than `top_p` of the mass. Tokens of equal probability are kept or dropped together, and one
    is always kept.
    """
    if 0 < top_k < probs.shape[-1]:
        smallest = probs.topk(top_k, dim=-1).values[:, -1:]
        probs = probs.masked_fill(probs < smallest, 0.0)
    if top_p < 1:
        probs = probs.masked_fill(probs < _nucleus_edge(probs, top_p), 0.0)
    return probs


def _nucleus_edge(probs: Tensor, top_p: float) -> Tensor:
    """The smallest probability that top-p keeps, `[B, 1]`.

    Sorting a whole vocabulary costs far more than the rest of sampling, and the nucleus is mostly small: look at the
    most probable tokens, and at more only if some row needs it. How far is looked changes no row's answer.
    """
    target = top_p * probs.sum(dim=-1, dtype=torch.float64)[:, None]
    size = min(_FIRST_SORT, probs.shape[-1])
    while True:
        values = probs.topk(size, dim=-1).values
        total = values.double().cumsum(dim=-1)
        if size == probs.shape[-1] or bool((total[:, -1:] >= target).all()):
            break
        size = min(size * 8, probs.shape[-1])
    kept = total - values < target
    kept[:, 0] = True
    return values.masked_fill(~kept, torch.inf).amin(dim=-1, keepdim=True)


def invert(weights: Tensor, uniform: Tensor, rows: Tensor | None = None) -> Tensor:
    """The first token of each row at which the running sum of `weights` `[U, V]` exceeds `uniform` `[B]` times their
    total; rows: see `choose`.

    The sum runs over blocks and then inside one block, in float64: cheaper than a running sum over the vocabulary, and
    without its rounding, which would favour or starve rare tokens. A token of weight 0 is never chosen.
    """
    size = weights.shape[-1]
    if size <= _BLOCK:
        return _search(_of(weights, rows).double(), uniform)[0]
    whole = size // _BLOCK * _BLOCK
    sums = weights[:, :whole].view(len(weights), whole // _BLOCK, _BLOCK).sum(dim=-1)
    if whole < size:
        sums = torch.cat([sums, weights[:, whole:].sum(dim=-1, keepdim=True)], dim=-1)
    block, rest = _search(_of(sums, rows).double(), uniform)
    places = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    within = places.clamp(max=size - 1)
    inside = weights.gather(1, within) if rows is None else weights[rows[:, None], within]
    index, _ = _search(inside.double().masked_fill(places >= size, 0.0), rest)
    return block * _BLOCK + index


def _of(values: Tensor, rows: Tensor | None) -> Tensor:
    """[B, X]: what each row has of `values` [U, X]."""
    return values if rows is None else values.index_select(0, rows)


def _search(weights: Tensor, fraction: Tensor) -> tuple[Tensor, Tensor]:
    """The entry of each row in which `fraction` `[B]` of its total falls, and how far into that entry, in [0, 1)."""
    total = weights.cumsum(dim=-1)
    end = total[:, -1]
    point = torch.minimum(fraction * end, torch.nextafter(end, torch.zeros_like(end)))
    index = (total <= point[:, None]).sum(dim=-1)
    width = _pick(weights, index)
    return index, ((point - (_pick(total, index) - width)) / width).clamp(0.0, 1.0 - 2.0**-53)


def _pick(values: Tensor, index: Tensor, rows: Tensor | None = None) -> Tensor:
    """[B]: the entry at `index` `[B]` of each row's `values` `[U, V]`; rows: see `choose`."""
    return values.gather(1, index[:, None])[:, 0] if rows is None else values[rows, index]
