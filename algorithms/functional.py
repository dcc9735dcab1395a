"""The mathematics that algorithms share: pure functions on tensors, without state and without configuration objects.

For authors of algorithms and extensions, built-in or third-party; the names and signatures are stable. What is left
to others: which functions a method combines and with which options (the algorithm), and which counts a loss is
divided by (the core, which knows the whole mini-batch).

Conventions. Tensors of tokens are response-only and right-padded, `[B, T]`, with a boolean `mask` that is True on the
tokens that the policy chose; False slots may also lie between them (observations in a dialogue). Values of sequences
are `[B]`, groups are integers `[B]` in any order. Half precision is computed in float32.

- Masked slots may hold anything, NaN included: nothing of it reaches a result or a gradient, and results are 0 there.
- Functions without a mask work slot by slot. A slot that holds a value that is not finite, or not below 1e18, gives
  a result that shows it but no gradient, so that `aggregate` can leave it out cleanly.
- Advantages, returns and weights are constants to the policy gradient: they come back detached.
- Shapes that differ raise ValueError instead of being broadcast, unknown names of options raise ValueError with the
  known ones.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor

from rollstock import AggregationMode, aggregate
from rollstock.algorithms._logprobs import TokenLogprobs

GroupStd: TypeAlias = Literal["unbiased", "biased"]
KLKind: TypeAlias = Literal["k1", "k2", "k3", "abs", "k1+", "k3+"]
KLControl: TypeAlias = Literal["fixed", "horizon", "ratio"]
WeightLevel: TypeAlias = Literal["token", "sequence"]

__all__ = [
    # means over tokens; `aggregate` is the core's own, which divides every loss with it
    "AggregationMode", "aggregate", "masked_mean", "masked_whiten",
    # advantages
    "GroupStd", "discounted_returns", "gae", "group_normalise", "leave_one_out", "overlong_penalty", "reinforce_pp",
    # losses
    "KLKind", "WeightLevel", "cispo_loss", "clipped_surrogate", "clipped_value_loss", "gspo_ratio",
    "importance_weights", "kl_estimate", "sapo_loss",
    # how strongly a policy is held near its reference
    "KLControl", "next_kl_coefficient",
    # from logits
    "logprobs_and_entropy",
]  # fmt: skip

_WHITEN_EPS = 1e-8  # added to the variance
_TOO_LARGE = 1e18  # its square still fits into float32
_MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: far outside every clip range, and far inside float32


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean of `x` over the True slots of `mask` (of the same shape, whatever it is); 0 if there are none."""
    _same_shape(x=x, mask=mask)
    return _kept(x, mask).sum() / mask.sum().clamp_min(1)


def masked_whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Scale the unmasked values of `x` [B, T] to unit variance (unbiased) and, with `shift_mean`, to mean 0.

    The statistics are those of all rows together, so call it on a whole batch, never on a slice. Equal values, or a
    single one, become exactly 0 (their mean without `shift_mean`).
    """
    _same_shape(x=x, mask=mask)
    kept, count = _kept(x, mask), mask.sum()
    if not mask.any():
        return kept
    # Measured from one of the values themselves, equal values differ by exactly 0, whatever their size.
    anchor = kept[mask][0].detach()
    offsets = torch.where(mask, kept - anchor, 0.0)
    offset_mean = offsets.sum() / count
    deviations = torch.where(mask, offsets - offset_mean, 0.0)
    variance = deviations.square().sum() / (count - 1).clamp_min(1)
    whitened = deviations * torch.rsqrt(variance + _WHITEN_EPS)
    return whitened if shift_mean else torch.where(mask, whitened + (anchor + offset_mean), 0.0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, arXiv:1506.02438, equation 16. Returns (advantages, returns), both [B, T].

    `rewards` and `values` are [B, T]; a value is that of the state in which the token was chosen. Masked tokens carry
    nothing and break no recursion: the token after an observation is the direct successor of the one before it,
    undiscounted. An episode ends after its last unmasked token; to bootstrap a truncated one, add gamma times the
    value of what would have come next to its last reward.
    """
    _same_shape(rewards=rewards, values=values, mask=mask)
    rewards, values = _kept(rewards, mask).detach(), _kept(values, mask).detach()
    upcoming = _backward_scan(values, torch.where(mask, 0.0, 1.0).to(values.dtype))  # the value at or after each slot
    next_values = torch.nn.functional.pad(upcoming[:, 1:], (0, 1))[:, : values.shape[1]]
    errors = torch.where(mask, rewards + gamma * next_values - values, 0.0)
    advantages = torch.where(mask, _backward_scan(errors, _decay(mask, gamma * lam, errors)), 0.0)
    return advantages, advantages + values


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """The discounted sum of the rewards [B, T] from each unmasked token on, [B, T]; masked tokens are skipped."""
    _same_shape(rewards=rewards, mask=mask)
    rewards = _kept(rewards, mask).detach()
    return torch.where(mask, _backward_scan(rewards, _decay(mask, gamma, rewards)), 0.0)


def group_normalise(scores: Tensor, groups: Tensor, *, std: GroupStd | None = "unbiased", eps: float = 1e-6) -> Tensor:
    """GRPO's advantages [B]: scores centred within their group and divided by its standard deviation + `eps`.

    arXiv:2402.03300, section 4.1.2. `std` divides the squares by n - 1 (`unbiased`) or n (`biased`); None only
    centres (Dr. GRPO, arXiv:2503.20783). A group of one, and a group whose scores are all equal, give exactly 0.
    """
    if std is not None:
        _known("std", std, GroupStd)
    deviations, index, counts = _centred(scores, groups)
    if std is None:
        return deviations
    degrees = counts if std == "biased" else (counts - 1).clamp_min(1)
    squares = torch.zeros_like(counts, dtype=deviations.dtype).index_add_(0, index, deviations.square())
    scale = (squares / degrees).sqrt()[index] + eps
    return torch.where(deviations == 0, 0.0, deviations / scale)


def leave_one_out(scores: Tensor, groups: Tensor) -> Tensor:
    """RLOO's advantages [B], arXiv:2402.14740: each score less the mean of the others in its group; 0 if alone."""
    deviations, index, counts = _centred(scores, groups)
    sizes = counts.to(deviations.dtype)
    return deviations * (sizes / (sizes - 1).clamp_min(1))[index]


def reinforce_pp(token_rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """REINFORCE++'s advantages [B, T], arXiv:2501.03262: discounted returns, whitened over the whole batch."""
    return masked_whiten(discounted_returns(token_rewards, mask, gamma=gamma), mask)


def overlong_penalty(lengths: Tensor, *, limit: int, buffer: int) -> Tensor:
    """What responses of `lengths` tokens lose, from 0 to 1, of the shape of `lengths`: the soft overlong punishment of
    DAPO, arXiv:2503.14476, equation 13.

    Nothing up to `limit - buffer` tokens, from there on linearly more, and 1 from `limit` on. Raises ValueError for a
    buffer below 1 or above the limit, which would punish even empty responses.
    """
    if not 1 <= buffer <= limit:
        raise ValueError(f"overlong_penalty: buffer must be from 1 to the limit of {limit} tokens, got {buffer}")
    return ((lengths.float() - (limit - buffer)) / buffer).clamp(0, 1)


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss of each token, arXiv:1707.06347, equation 7, to be minimised. Returns (losses, clipped).

    All tensors have one shape. The probability ratio is clipped to [1 - eps_low, 1 + eps_high]. With `dual_clip`, a
    number c above 1 (arXiv:1912.09729, equation 5), the loss of a negative advantage is at most c times its size.
    `clipped` is True where a clip decided, which is where no gradient flows. Gradients reach `logprobs` only.
    """
    _same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"clipped_surrogate: dual_clip must be above 1, got {dual_clip}")
    advantages = _floating(advantages).detach()
    ratio = _ratio(logprobs, old_logprobs, advantages)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - eps_low, 1 + eps_high)
    clipped = bounded > plain
    losses = torch.where(clipped, bounded, plain)
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        above = (advantages < 0) & (losses > ceiling)
        losses, clipped = torch.where(above, ceiling, losses), clipped | above
    return losses, clipped


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor]:
    """CISPO's loss of each token, arXiv:2506.13585, equations 4 and 5. Returns (losses, clipped), all of one shape.

    The ratio, clipped to [1 - eps_low, 1 + eps_high], is a constant weight on the log-prob, so that clipped tokens
    keep their gradient. An `eps_low` of 1 or more leaves the weight unbounded below. `clipped` is True where the
    ratio was out of range.
    """
    _same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    advantages = _floating(advantages).detach()
    logprobs = _shielded(_floating(logprobs), old_logprobs, advantages)
    ratio = _ratio(logprobs, old_logprobs).detach()
    clipped = (ratio < 1 - eps_low) | (ratio > 1 + eps_high)
    return -ratio.clamp(1 - eps_low, 1 + eps_high) * advantages * logprobs, clipped


def sapo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, tau_pos: float, tau_neg: float
) -> tuple[Tensor, Tensor]:
    """SAPO's loss of each token, arXiv:2511.20347, section 3. Returns (losses, weights), all of one shape.

    The loss is minus the advantage times the gate 4 / tau * sigmoid(tau * (ratio - 1)), with `tau_pos` where the
    advantage is positive and `tau_neg` elsewhere. `weights`, detached, is what the gate leaves of the gradient of the
    plain ratio: 1 at a ratio of 1, and towards 0 far from it. Raises ValueError for a temperature that is not above 0.
    """
    _same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    if min(tau_pos, tau_neg) <= 0:
        raise ValueError(f"sapo_loss: temperatures must be above 0, got tau_pos={tau_pos} and tau_neg={tau_neg}")
    advantages = _floating(advantages).detach()
    # `where` of two plain numbers would round them to float32, whatever the type of the advantages.
    tau = torch.where(advantages > 0, advantages.new_tensor(tau_pos), advantages.new_tensor(tau_neg))
    gate = torch.sigmoid(tau * (_ratio(logprobs, old_logprobs, advantages) - 1))
    return -advantages * gate * (4 / tau), (4 * gate * (1 - gate)).detach()


def gspo_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """GSPO's ratio of each sequence [B], arXiv:2507.18071, equation 7: the geometric mean of its tokens' ratios.

    From log-probs [B, T]; differentiable in `logprobs`. A sequence without an unmasked token has the ratio 1. Its
    logarithm is what `clipped_surrogate` takes in place of log-probs, with zeros for the old ones.
    """
    _same_shape(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    log_ratio = _kept(logprobs, mask) - _kept(old_logprobs, mask).detach()
    return _bounded_exp(log_ratio.sum(-1) / mask.sum(-1).clamp_min(1))


def importance_weights(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    level: WeightLevel = "token",
    cap: float,
    floor: float | None = None,
) -> Tensor:
    """Weights [B, T], detached, that correct for a sampler whose probabilities differ from the trainer's.

    exp(logprobs - rollout_logprobs) of each token, or, for `level="sequence"`, the product over the sequence on each
    of its tokens; truncated to at most `cap` (arXiv:1802.01561, section 4.1; `math.inf` for none) and at least
    `floor`. 0 in masked slots.
    """
    _known("level", level, WeightLevel)
    _same_shape(logprobs=logprobs, rollout_logprobs=rollout_logprobs, mask=mask)
    log_ratio = (_kept(logprobs, mask) - _kept(rollout_logprobs, mask)).detach()
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True)
    weights = _bounded_exp(log_ratio).clamp(min=floor, max=cap)
    return torch.where(mask, weights, 0.0)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Half the squared error of each value, in PPO's clipped form. Returns (losses, clipped), all of one shape.

    The larger of the errors of the value and of the value held within `clip` of the old one (arXiv:2005.12729,
    section 3), so that a step never gains from moving far; None is the plain error. `clipped` is True where the clip
    decided, which is where no gradient flows.
    """
    _same_shape(values=values, old_values=old_values, returns=returns)
    old_values, returns = _floating(old_values).detach(), _floating(returns).detach()
    values = _shielded(_floating(values), old_values, returns)
    losses = 0.5 * (values - returns).square()
    if clip is None:
        return losses, torch.zeros_like(losses, dtype=torch.bool)
    bounded = 0.5 * (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    clipped = bounded > losses
    return torch.where(clipped, bounded, losses), clipped


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, kind: KLKind) -> Tensor:
    """KL(policy || reference), estimated from each token that the policy sampled; differentiable in `logprobs`.

    With d = logprobs - ref_logprobs: `k1` is d, `k2` is d^2 / 2, `k3` is exp(-d) - 1 + d (never negative, unbiased),
    `abs` is |d| (J. Schulman, Approximating KL divergence, 2020). As a loss only k2 has the gradient of the
    divergence (k1's is 0 on average, k3's is that of the reverse one: arXiv:2506.09477); `k1+` and `k3+` have the
    named value and the gradient of k2. As a term of the reward, k1 is right.
    """
    _known("kind", kind, KLKind)
    _same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    ref_logprobs = _floating(ref_logprobs).detach()
    gap = _shielded(_floating(logprobs), ref_logprobs) - ref_logprobs
    if kind == "abs":
        return gap.abs()
    if kind == "k2":
        return 0.5 * gap.square()
    if kind.startswith("k3"):
        minus = (-gap).clamp(max=_MAX_LOG_RATIO)
        value = torch.expm1(minus) - minus  # without expm1 small gaps drown in rounding
    else:
        value = gap
    if not kind.endswith("+"):
        return value
    square = 0.5 * gap.square()
    return value.detach() + (square - square.detach())


def next_kl_coefficient(
    coefficient: float, kl: float, *, control: KLControl, target: float, horizon: float, num_samples: int
) -> float:
    """The coefficient of a KL penalty after a mean divergence `kl` in nats was measured on `num_samples` responses.

    `fixed` leaves it. `horizon` (arXiv:1909.08593, section 2.2) lets it grow by the relative error kl / target - 1,
    clipped to 20%, times num_samples / horizon. `ratio` sets it to kl / target, held within 0 and 1, whatever it was: a
    policy that still is its reference has no penalty, and one that leaves it gets one again.
    """
    _known("control", control, KLControl)
    if control == "fixed":
        return coefficient
    if control == "ratio":
        return min(max(kl / target, 0.0), 1.0)
    return coefficient * (1 + min(max(kl / target - 1, -0.2), 0.2) * num_samples / horizon)


def logprobs_and_entropy(logits: Tensor, targets: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` and entropies of the distributions, under softmax(logits / temperature).

    `logits` are [N, V] or [B, T, V], `targets` integers [N] or [B, T] in [0, V); both results have the targets'
    shape, in float32 (float64 for float64 logits), and both are differentiable, once. Logits of -inf (forbidden
    tokens) are fine. Beside the logits and their gradient the memory needed is that of a few rows; a slice such as
    `logits[:, :-1]` is not copied. Where entropy is only a metric, detach it: the backward pass then skips it. Raises
    ValueError for shapes that do not fit and a temperature that is not above 0.
    """
    if logits.dim() < 2 or logits.shape[:-1] != targets.shape:
        raise ValueError(
            "logprobs_and_entropy: targets must have the shape of the logits without their last axis; "
            f"got logits {list(logits.shape)} and targets {list(targets.shape)}"
        )
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"logprobs_and_entropy: temperature must be a number above 0, got {temperature}")
    results = TokenLogprobs.apply(logits, targets, float(temperature))  # type: ignore[no-untyped-call]  # torch's own
    return cast("tuple[Tensor, Tensor]", results)


def _floating(x: Tensor) -> Tensor:
    """Integers, booleans and half precision as float32; float32 and float64 as they are."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _kept(x: Tensor, mask: Tensor) -> Tensor:
    """`x`, with 0 in masked slots and no gradient to them: multiplying by the mask would keep NaN and inf alive."""
    return torch.where(mask, _floating(x), 0.0)


def _shielded(x: Tensor, *others: Tensor) -> Tensor:
    """`x`, without a gradient to slots where it or one of `others` is not finite or too large: 0 * inf is NaN."""
    size = x.detach().abs()
    for other in others:
        size = size + other.detach().abs()
    return torch.where(size < _TOO_LARGE, x, x.detach())  # False for NaN


def _ratio(logprobs: Tensor, old_logprobs: Tensor, *others: Tensor) -> Tensor:
    """exp(logprobs - old_logprobs), bounded; differentiable in `logprobs`."""
    old_logprobs = _floating(old_logprobs).detach()
    return _bounded_exp(_shielded(_floating(logprobs), old_logprobs, *others) - old_logprobs)


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp, with the exponent held within what stays harmless when multiplied and summed in float32."""
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _decay(mask: Tensor, rate: float, like: Tensor) -> Tensor:
    """`rate` on unmasked slots, 1 on masked ones, which hand on what comes after them."""
    return torch.where(mask, rate, 1.0).to(like.dtype)


def _backward_scan(x: Tensor, decay: Tensor) -> Tensor:
    """`y[:, t] = x[:, t] + decay[:, t] * y[:, t + 1]` along [B, T], for constants: one operation a step, in place."""
    # Time first: each step then reads and writes neighbouring memory.
    result = x.t().clone(memory_format=torch.contiguous_format)
    steps, factors = result.unbind(0), decay.t().contiguous().unbind(0)
    for t in range(len(steps) - 2, -1, -1):
        steps[t].addcmul_(factors[t], steps[t + 1])
    return result.t().contiguous()


def _centred(scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [B] less their group's mean, each one's group as an index into [G], and the sizes of the groups [G]."""
    _same_shape(scores=scores, groups=groups)
    scores = _floating(scores).detach()
    _, index, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    # Measured from the group's lowest score, equal scores are exactly 0 and a large common offset costs no digits.
    lowest = scores.new_full(counts.shape, math.inf).scatter_reduce_(0, index, scores, "amin")
    offsets = scores - lowest[index]
    means = torch.zeros_like(lowest).index_add_(0, index, offsets) / counts
    return offsets - means[index], index, counts


def _same_shape(**tensors: Tensor) -> None:
    """Refuse to broadcast: a [B] beside a [T] of the same size is a mistake that would train quietly."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"expected tensors of one shape, got {shapes}")


def _known(option: str, value: str, kinds: object) -> None:
    """Refuse a name that the Literal type `kinds` does not list."""
    if value not in get_args(kinds):
        raise ValueError(f"{option} must be one of {', '.join(get_args(kinds))}; got {value!r}")
