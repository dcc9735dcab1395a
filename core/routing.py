"""How tokens reach the experts of a mixture-of-experts layer: what a router is told, and what it answers.

For authors of routers and of the backends and engines that call them. The interface is `rollstock.Router`; finding the
routers of a model is left to backends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rollstock.uniforms import as_int64, hashes, uniforms

ScoreFunction: TypeAlias = Literal["softmax", "softmax_of_chosen", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How a model's own router turns logits into a choice and into weights.

    function: `softmax` over all experts, `softmax_of_chosen` over those that were chosen, or a `sigmoid` of each.
    normalise: the weights of a token are divided by their sum; scale: they are multiplied by this at the end.
    num_groups, kept_groups: experts come in groups, of which only the best few may be chosen from (DeepSeek-V3,
    arXiv:2412.19437, section 2.1.2); a group is as good as the sum of its `group_top` best experts.
    """

    function: ScoreFunction = "softmax"
    normalise: bool = False
    scale: float = 1.0
    num_groups: int = 1
    kept_groups: int = 1
    group_top: int = 1

    def scores(self, logits: Tensor) -> Tensor:
        """[n, E] float32: how good the model finds each expert for each token, by `logits` [n, E]."""
        if self.function == "sigmoid":
            return logits.float().sigmoid()
        return torch.softmax(logits, dim=-1, dtype=torch.float32)

    def probabilities(self, logits: Tensor) -> Tensor:
        """[n, E] float32: the same as a distribution over experts."""
        scores = self.scores(logits)
        return scores / scores.sum(dim=-1, keepdim=True).clamp_min(1e-20) if self.function == "sigmoid" else scores

    def choice_scores(self, logits: Tensor, bias: Tensor | None = None) -> Tensor:
        """[n, E] float32: what the largest k of are chosen; minus infinity where a whole group is out.

        bias [E]: added to the scores for the choice alone, not for the weights.
        """
        scores = self.scores(logits)
        if bias is not None:
            scores = scores + bias
        if self.num_groups == 1 or self.kept_groups >= self.num_groups:
            return scores
        grouped: Tensor = scores.unflatten(-1, (self.num_groups, -1))
        best = grouped.topk(self.group_top, dim=-1).values.sum(dim=-1)  # [n, groups]
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(self.kept_groups, dim=-1).indices, True)
        allowed: Tensor = grouped.masked_fill(~kept[..., None], -torch.inf)
        return allowed.flatten(-2)

    def weights(self, logits: Tensor, experts: Tensor) -> Tensor:
        """[n, k] float32: what the model multiplies the outputs of `experts` [n, k] with. Differentiable."""
        if self.function == "softmax_of_chosen":
            weights = torch.softmax(logits.gather(-1, experts), dim=-1, dtype=torch.float32)
        else:
            weights = self.scores(logits).gather(-1, experts)
        if self.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-20)
        return weights if self.scale == 1.0 else weights * self.scale


@dataclass(frozen=True, kw_only=True)
class RouterLayer:
    """One mixture-of-experts layer of a model; `index` counts such layers alone, from 0, and `name` is the router's
    module."""

    index: int
    name: str
    num_experts: int
    top_k: int
    scoring: Scoring


@dataclass(frozen=True, kw_only=True)
class RoutedTokens:
    """What is known of n tokens, in the order in which the model reads them.

    keys [n] int64: a hash of the token and of all before it in its sequence (`prefix_keys`). It is the same in
    generation and in training, alone and beside others, so that whatever is drawn from it is, too. versions [n] int64:
    the policy version that the token was read at in generation. captured [n, layers, k]: the experts that were chosen
    then, `missing` of its type where nobody knows; None if nothing was captured. exploring: these are tokens to train
    on, so that a router may add noise; in evaluation it should not.
    """

    keys: Tensor
    versions: Tensor
    captured: Tensor | None = None
    exploring: bool = True

    def part(self, start: int, end: int) -> RoutedTokens:
        """The tokens from `start` on, up to but without `end`."""
        captured = None if self.captured is None else self.captured[start:end]
        keys, versions = self.keys[start:end], self.versions[start:end]
        return RoutedTokens(keys=keys, versions=versions, captured=captured, exploring=self.exploring)

    def to(self, device: torch.device | str) -> RoutedTokens:
        """The same with the tensors on `device`."""
        captured = None if self.captured is None else self.captured.to(device)
        return RoutedTokens(
            keys=self.keys.to(device), versions=self.versions.to(device), captured=captured, exploring=self.exploring
        )


@dataclass(frozen=True, kw_only=True)
class Routing:
    """For n tokens: k different experts of E each, `experts` [n, k] int64, and what their outputs are multiplied with,
    `weights` [n, k].

    A weight of exactly 0 drops the token at that expert, which is counted. probabilities [n, E]: the router's
    distribution over experts, for its entropy and for balancing; None: what the model's own would say.
    """

    experts: Tensor
    weights: Tensor
    probabilities: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class RouterCall:
    """One layer's question to a router: logits [n, E], the model's own answer, and what is known of the n tokens.

    bias [E]: what the model itself adds to the scores for its choice (a correction bias of DeepSeek-V3); None if
    nothing.
    """

    logits: Tensor
    own: Routing
    layer: RouterLayer
    tokens: RoutedTokens
    bias: Tensor | None = None

    def choose(self, logits: Tensor | None = None, *, bias: Tensor | None = None) -> Tensor:
        """[n, k] int64: the experts that the model's own rule chooses for other `logits` and with a further `bias`
        [E]."""
        scores = self.choice_scores(logits, bias=bias)
        return scores.topk(self.layer.top_k, dim=-1).indices

    def choice_scores(self, logits: Tensor | None = None, *, bias: Tensor | None = None) -> Tensor:
        """[n, E] float32, without gradient: the scores that `choose` takes the largest of."""
        with torch.no_grad():
            own = None if self.bias is None else self.bias.float()
            whole = bias if own is None else own if bias is None else own + bias
            return self.layer.scoring.choice_scores(self.logits if logits is None else logits, whole)

    def weights(self, experts: Tensor, logits: Tensor | None = None) -> Tensor:
        """[n, k]: how the model weighs `experts` [n, k], in the type of its own weights. Differentiable."""
        weights = self.layer.scoring.weights(self.logits if logits is None else logits, experts)
        return weights.to(self.own.weights.dtype)

    def probabilities(self, logits: Tensor | None = None) -> Tensor:
        """[n, E] float32: the model's distribution over experts. Differentiable."""
        return self.layer.scoring.probabilities(self.logits if logits is None else logits)

    def replayed(self) -> Tensor | None:
        """[n, k] int64: the captured experts of this layer, -1 where nobody knows; None if nothing was captured."""
        captured = self.tokens.captured
        if captured is None:
            return None
        experts = captured[:, self.layer.index].long()
        return torch.where(experts == missing(captured.dtype), -1, experts)

    def uniforms(self, seed: int, *, draw: int = 0) -> Tensor:
        """[n, E] float64 in (0, 1): random numbers that are a function of the seed, the draw, the token with all before
        it, the policy version, the layer and the expert, and of nothing else."""
        keys = hashes(self.tokens.keys, torch.tensor(as_int64(seed), device=self.tokens.keys.device))
        keys = hashes(keys, self.tokens.versions)
        keys = hashes(keys, torch.tensor(self.layer.index * 1024 + draw, device=keys.device))
        experts = torch.arange(self.layer.num_experts, device=keys.device)
        return uniforms(keys[:, None], experts) + 2.0**-54


def prefix_keys(tokens: Tensor, positions: Tensor) -> Tensor:
    """[n] int64: a hash for each token of a sequence and all before it; `tokens` and `positions` are [n] int64.

    Hashes of (token, position) add up, so that a sequence can be continued: its key is the last one's plus `token_keys`
    of the next token.
    """
    return token_keys(tokens, positions).cumsum(0)


def token_keys(tokens: Tensor, positions: Tensor) -> Tensor:
    """int64, in the shape of both: what each token adds to the key of its sequence."""
    return hashes(tokens, positions)


def captured_dtype(num_experts: int) -> torch.dtype:
    """The smallest type in which the experts of a token, and the mark of a missing one, can be kept."""
    return torch.uint8 if num_experts < torch.iinfo(torch.uint8).max + 1 else torch.int16


def filled(captured: Tensor, length: int) -> Tensor:
    """[length, layers, k]: captured experts of the first tokens of a sequence, the rest marked as missing."""
    rest = length - len(captured)
    return torch.cat([captured, captured.new_full((rest, *captured.shape[1:]), missing(captured.dtype))])


def missing(dtype: torch.dtype) -> int:
    """The number that stands for an expert that nobody knows, in captured experts of this type."""
    return int(torch.iinfo(dtype).max)
