"""Log-probabilities and entropies from logits, with one gradient buffer and no copy of the vocabulary axis.

For `functional`, whose `logprobs_and_entropy` is the public face. The plain form, `log_softmax` then `gather`, writes
two or three tensors as large as the logits in each direction, and with tens of thousands of tokens in a vocabulary
the time goes into the memory for them. Here a few rows at a time pass through a buffer that stays in the cache; what
is kept for the backward pass is one number a row, and the only large allocation is the gradient itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Shifted logits are cut off here, where exp is 0 in every floating type: 0 times the cutoff is 0, 0 * -inf is NaN.
_CUTOFF = -1e4
_ELEMENTS_PER_THREAD = 2**19  # 2 MiB of float32: two such buffers a thread stay within the caches of common processors
_ELEMENTS_ON_ACCELERATOR = 2**25  # large enough that launching kernels costs nothing beside running them


class TokenLogprobs(torch.autograd.Function):
    """`(logits [..., V], targets [...], temperature) -> (logprobs [...], entropy [...])`, both in float32 or float64.

    With z = logits / temperature and p = softmax(z): logprob = z[target] - logsumexp(z), entropy = -sum(p log p), and
        d logprob / d z_j = [j = target] - p_j
        d entropy / d z_j = -p_j (log p_j + entropy).
    An output that nothing depends on costs nothing in the backward pass; rows with zero gradients give exact zeros
    even where the logits are not finite.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Pass over the logits once, a few rows at a time."""
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        flat_targets = targets.reshape(-1, 1)
        logprobs, entropy, log_total = (
            torch.empty(flat_targets.shape, dtype=dtype, device=logits.device) for _ in range(3)
        )
        shifted, probs = (_workspace(logits, dtype) for _ in range(2))
        for rows, chunk in _row_chunks(logits, len(shifted)):
            size = len(chunk)
            scaled = _scaled(chunk, temperature, shifted[:size])
            largest = scaled.amax(-1, keepdim=True)
            target = scaled.gather(-1, flat_targets[rows]) - largest
            offsets = torch.sub(scaled, largest, out=shifted[:size]).clamp_min_(_CUTOFF)
            torch.softmax(offsets, -1, out=probs[:size])
            # The largest probability is 1 / sum(exp(offsets)), and at least 1 / V: its log gives the sum's.
            log_sum = probs[:size].amax(-1, keepdim=True).log_().neg_()
            logprobs[rows] = target - log_sum
            entropy[rows] = log_sum - offsets.mul_(probs[:size]).sum(-1, keepdim=True)
            log_total[rows] = largest + log_sum
        logprobs, entropy = logprobs.view(targets.shape), entropy.view(targets.shape)
        ctx.save_for_backward(logits, targets, entropy, log_total)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        """Recompute the probabilities, which is cheaper than having kept them."""
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None
        logits, targets, entropy, log_total = ctx.saved_tensors
        flat_targets, entropy = targets.reshape(-1, 1), entropy.reshape(-1, 1)
        temperature: float = ctx.temperature
        no_gradient = torch.zeros_like(log_total)
        by_logprob = no_gradient if grad_logprobs is None else grad_logprobs.reshape(-1, 1) / temperature
        by_entropy = None if grad_entropy is None else grad_entropy.reshape(-1, 1) / temperature

        grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        flat_grad = grad.view(-1, logits.shape[-1])
        buffer, probs_buffer = (_workspace(logits, log_total.dtype) for _ in range(2))
        for rows, chunk in _row_chunks(logits, len(buffer)):
            size = len(chunk)
            scaled = _scaled(chunk, temperature, buffer[:size])
            probs = flat_grad[rows] if grad.dtype == log_total.dtype else probs_buffer[:size]
            torch.softmax(scaled, -1, out=probs)
            if by_entropy is None:
                probs.mul_(-by_logprob[rows])
            else:
                log_probs = torch.sub(scaled, log_total[rows], out=buffer[:size]).clamp_min_(_CUTOFF)
                constant = by_logprob[rows] + by_entropy[rows] * entropy[rows]
                probs.mul_(log_probs.mul_(-by_entropy[rows]).sub_(constant))
            probs.scatter_add_(-1, flat_targets[rows], by_logprob[rows])
            if probs.dtype != grad.dtype:
                flat_grad[rows] = probs
        # 0 * NaN is NaN: rows that carry no gradient must not bring in one.
        silent = (by_logprob == 0) & ((no_gradient if by_entropy is None else by_entropy) == 0)
        poisoned = (silent & ~log_total.isfinite()).squeeze(-1)
        if poisoned.any():
            flat_grad[poisoned] = 0
        return grad, None, None


def _workspace(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialised `[rows, V]` buffer: as many rows as pay on this device, and no more than there are."""
    num_rows, size = logits.shape[:-1].numel(), logits.shape[-1]
    if logits.device.type == "cpu":
        threads = torch.get_num_threads()
        rows = threads * max(1, _ELEMENTS_PER_THREAD // size)
    else:
        rows = max(1, _ELEMENTS_ON_ACCELERATOR // size)
    return torch.empty(min(rows, max(1, num_rows)), size, dtype=dtype, device=logits.device)


def _scaled(chunk: Tensor, temperature: float, buffer: Tensor) -> Tensor:
    """`chunk / temperature` in the buffer's type; the chunk itself where that is the same thing."""
    if temperature == 1.0:
        return chunk if chunk.dtype == buffer.dtype else buffer.copy_(chunk)
    if chunk.dtype == buffer.dtype:
        return torch.div(chunk, temperature, out=buffer)
    return buffer.copy_(chunk).div_(temperature)


def _row_chunks(logits: Tensor, rows: int) -> Iterator[tuple[slice, Tensor]]:
    """Views of at most `rows` rows, `[<= rows, V]`, in order, each with its place among all rows of `logits`."""
    start = 0
    for block in _blocks(logits):
        for first in range(0, len(block), rows):
            chunk = block[first : first + rows]
            yield slice(start, start + len(chunk)), chunk
            start += len(chunk)


def _blocks(logits: Tensor) -> Iterator[Tensor]:
    """`[rows, V]` views that together are `logits`: a slice such as `logits[:, :-1]` is not copied to be
    flattened."""
    if logits.dim() == 2:
        yield logits
    elif logits.is_contiguous():
        yield logits.flatten(0, -2)
    else:
        for part in logits.unbind(0):
            yield from _blocks(part)
