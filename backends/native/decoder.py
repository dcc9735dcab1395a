"""Running a causal language model token by token, in two ways behind one interface.

For the engine. `SharedDecoder` runs any model whose attention transformers can replace: prompts of any length side by
side without padding, each computed once for all its samples. `PlainDecoder` runs every other model (recurrent ones
among them) with its own attention and cache, on prompts of one length at a time. Choosing between them is left to
`trial`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollstock import UserError
from rollstock.backends.native.attention import IMPLEMENTATION, SharedBatch, UnsupportedAttentionError, attending
from rollstock.backends.native.prefixes import Piece, PrefixCache
from rollstock.backends.prefix_tree import tree_nodes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FULL, _SLIDING = "full_attention", "sliding_attention"
_MOVING_ROPES = {"dynamic", "longrope"}

_PREFILL_TOKENS = 8192  # prompt tokens in one forward pass: enough for full speed, little enough for the activations


class Decoder(ABC):
    """One batch at a time: `start` reads the prompts, each `step` adds a token to every row, `keep` drops rows."""

    mixes_lengths: bool
    """Whether prompts of different lengths may be in one batch."""

    shares_prompts: bool
    """Whether the samples of a prompt share the memory of its keys and values."""

    merges = True
    """Whether tokens with one past may be computed once for all. Whoever looks at each token says no."""

    prefixes: PrefixCache | None = None
    """What earlier batches left, where the engine keeps that."""

    reused = 0
    """How many tokens of the prompts `start` did not have to read the last time, because they were known."""

    merged = 0
    """How many tokens of the batch, those of its prompts included, were not computed because another one has the same
    past."""

    rows: Tensor | None = None
    """[B] on the device: for each row of the batch, which of the logits returned last are its own; None: those at its
    place."""

    captured: Tensor | None = None
    """[n, layers, k]: the experts of the tokens that `start` (prompts end to end) or `step` read last, on the CPU,
    where a router asks for them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.device = model.device

    @abstractmethod
    def start(self, prompts: Sequence[Sequence[int]], counts: Sequence[int], limit: int) -> Tensor:
        """Read the distinct `prompts`, [G]; returns the logits of each one's next token, `[G, V]`, and sets `rows`.

        `counts[g]` rows continue prompt g; rows come in the order of their prompts. No row gets more than `limit`
        tokens.
        """

    @abstractmethod
    def step(self, tokens: Tensor) -> Tensor:
        """Append `tokens` `[B]` to the rows; returns the logits of the tokens after them, `[U, V]`, and sets `rows`:
        rows that are equal may have theirs in common."""

    @abstractmethod
    def keep(self, rows: Tensor) -> None:
        """Drop all rows but `rows` (int64, on the CPU); the new row i is the old row `rows[i]`."""

    def remember(self, rows: Sequence[int], responses: Sequence[Sequence[int]]) -> None:
        """Keep what `rows` hold of their `responses`, all that was generated but the last token, for later prompts.

        Asked only of decoders that share prompts, where the engine has given them `prefixes`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no states that can be kept")

    @abstractmethod
    def stop(self) -> None:
        """Forget the batch and free its memory."""

    @abstractmethod
    def release(self) -> None:
        """Forget what was made of the weights. Called when the engine has no batch left, and when weights change."""

    @abstractmethod
    def bytes_per_token(self) -> int:
        """Bytes of keys and values that a token of the running batch takes, over all layers."""


class SharedDecoder(Decoder):
    """Shared prompts and preallocated tails, through transformers' attention interface."""

    mixes_lengths = True
    shares_prompts = True
    _multiple = 1

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        if not getattr(model, "_supports_attention_backend", False):
            raise UnsupportedAttentionError(f"{type(model).__name__} does not use transformers' attention interface")
        others = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - {_FULL, _SLIDING}
        if others:
            raise UnsupportedAttentionError(f"{type(model).__name__} has layers of type {', '.join(sorted(others))}")
        moving = _rope_types(model) & _MOVING_ROPES
        if moving:  # a long neighbour would change the positions of a short sequence
            raise UnsupportedAttentionError(f"{type(model).__name__} scales positions by length ({', '.join(moving)})")
        accepted = inspect.signature(model.forward).parameters
        if "position_ids" not in accepted:
            raise UnsupportedAttentionError(f"{type(model).__name__} takes no position_ids")
        self._picks_logits = "logits_to_keep" in accepted
        self._slides = _has_sliding_layers(model)
        model.set_attn_implementation(IMPLEMENTATION)
        if model.config._attn_implementation != IMPLEMENTATION:
            raise UnsupportedAttentionError(f"{type(model).__name__} keeps its own attention")
        self._batch: SharedBatch | None = None
        self._prompts: list[tuple[int, ...]] = []
        self._known: dict[int, tuple[Piece, ...]] = {}  # of each prompt that begins with something known, that
        self._whole: dict[int, tuple[Piece, ...]] = {}  # of each prompt that was remembered, all of it

    def start(self, prompts: Sequence[Sequence[int]], counts: Sequence[int], limit: int) -> Tensor:
        """See `Decoder.start`."""
        batch = SharedBatch([len(prompt) for prompt in prompts], counts, limit, self.device)
        self._batch = batch
        self._take_known(prompts)
        skipped = batch.reused.tolist()
        nodes = tree_nodes([torch.tensor(prompt) for prompt in prompts]) if self.merges else []
        logits = []
        for first, last in _chunks((batch.lengths - batch.reused).tolist(), _PREFILL_TOKENS):
            batch.chunk = (first, last)
            tokens = torch.tensor([token for g in range(first, last) for token in prompts[g][skipped[g] :]])
            lengths = (batch.lengths - batch.reused)[first:last]
            ends = torch.cumsum(lengths, 0)
            starts = torch.repeat_interleave(ends - lengths - batch.reused[first:last], lengths)
            positions = torch.arange(len(tokens)) - starts
            wanted = ends - 1
            if self.merges:
                batch.merge_prompts(torch.cat([nodes[g][skipped[g] :] for g in range(first, last)]))
            if batch.merged is not None:
                kept, index = (part.cpu() for part in batch.merged)
                tokens, positions, wanted = tokens[kept], positions[kept], index[wanted]
            logits.append(self._forward(tokens[None], positions[None], wanted.to(self.device)))
        if self._slides and not batch.windows:  # it would show only in a sequence longer than the window
            self.stop()
            raise UnsupportedAttentionError(f"{type(self.model).__name__} does not tell its attention of its window")
        self.rows, self.merged = batch.groups.to(self.device), batch.num_merged
        return torch.cat(logits)

    def _take_known(self, prompts: Sequence[Sequence[int]]) -> None:
        assert self._batch is not None
        self.reused, self._known, self._whole = 0, {}, {}
        if self.prefixes is not None:
            self._prompts = [tuple(prompt) for prompt in prompts]
            found = [self.prefixes.find(prompt) for prompt in self._prompts]
            self._batch.reuse(found)
            self.reused = sum(prefix.length for prefix in found if prefix is not None)
            self._known = {g: prefix.pieces for g, prefix in enumerate(found) if prefix is not None}

    def remember(self, rows: Sequence[int], responses: Sequence[Sequence[int]]) -> None:
        """See `Decoder.remember`."""
        batch = self._batch
        assert batch is not None
        assert self.prefixes is not None
        groups = batch.groups.tolist()
        for row, response in zip(rows, responses, strict=True):
            group = groups[row]
            if group not in self._whole:  # its new part is copied once, for all its rows
                self._whole[group] = (*self._known.get(group, ()), batch.prompt_states(group))
            self.prefixes.add((*self._prompts[group], *response), (*self._whole[group], batch.row_states(row)))

    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder.step`."""
        assert self._batch is not None
        tokens, positions = self._next(tokens)
        return self._forward(tokens[None], positions[None], None)

    def _next(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Begin a step: its stream, tokens and positions [U] on the device. U is B, less the rows that are merged,
        filled up to a multiple of `_multiple`."""
        batch = self._batch
        assert batch is not None
        positions = batch.step()[0]
        kept = batch.merge_rows(tokens, multiple=self._multiple) if self.merges else None
        self.rows, self.merged = None if batch.merged is None else batch.merged[1], batch.num_merged
        return (tokens, positions) if kept is None else (tokens[kept], positions[kept])

    def _forward(self, tokens: Tensor, positions: Tensor, wanted: Tensor | None) -> Tensor:
        """The logits `[n, V]` at the places `wanted` of a stream `[1, L]`; None: at all."""
        assert self._batch is not None
        picked = {"logits_to_keep": wanted} if wanted is not None and self._picks_logits else {}
        with attending(self._batch):
            output = self.model(
                input_ids=tokens.to(self.device), position_ids=positions.to(self.device), use_cache=False, **picked
            )
        logits: Tensor = output.logits[0]
        return logits if wanted is None or picked else logits[wanted]

    def keep(self, rows: Tensor) -> None:
        """See `Decoder.keep`."""
        assert self._batch is not None
        self._batch.keep(rows)

    def stop(self) -> None:
        """See `Decoder.stop`."""
        self._batch = None
        self._known, self._whole = {}, {}

    def release(self) -> None:
        """See `Decoder.release`; the model's own tensors are all that there is."""

    def bytes_per_token(self) -> int:
        """See `Decoder.bytes_per_token`."""
        assert self._batch is not None
        return sum(layer.bytes_per_token() for layer in self._batch.layers.values())


class PlainDecoder(Decoder):
    """The model's own attention and cache. All rows have the same length at all times, so there is nothing to mask."""

    mixes_lengths = False
    shares_prompts = False

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        accepted = inspect.signature(model.forward).parameters
        self._cache_argument = next((name for name in ("cache", "past_key_values") if name in accepted), "")
        if not self._cache_argument:
            raise UserError(f"the native rollout cannot run {type(model).__name__}: its forward takes no cache")
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._cache: Any = None

    def start(self, prompts: Sequence[Sequence[int]], counts: Sequence[int], limit: int) -> Tensor:
        """See `Decoder.start`. All prompts must have one length."""
        from transformers import DynamicCache

        self._cache = DynamicCache(config=self.model.config)
        logits = self._forward(torch.tensor(prompts))
        self.rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(self.device)
        self._cache.reorder_cache(self.rows)
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder.step`."""
        self.rows = None
        return self._forward(tokens[:, None])

    def _forward(self, tokens: Tensor) -> Tensor:
        output = self.model(
            input_ids=tokens.to(self.device), use_cache=True, **self._last_only, **{self._cache_argument: self._cache}
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def keep(self, rows: Tensor) -> None:
        """See `Decoder.keep`."""
        self._cache.reorder_cache(rows.to(self.device))

    def stop(self) -> None:
        """See `Decoder.stop`."""
        self._cache = None

    def release(self) -> None:
        """See `Decoder.release`; the model's own tensors are all that there is."""

    def bytes_per_token(self) -> int:
        """See `Decoder.bytes_per_token`."""
        total = 0
        for layer in self._cache.layers:
            for store in (getattr(layer, "keys", None), getattr(layer, "values", None)):
                if store is not None and store.numel():
                    total += store.shape[1] * store.shape[-1] * store.element_size()
        return total


def _has_sliding_layers(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None)
    if types is not None:
        return _SLIDING in types
    return getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)


def _rope_types(model: PreTrainedModel) -> set[str]:
    """The kinds of rotary position embedding of a model; some have one for each kind of layer."""
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    return {kind["rope_type"] for kind in kinds if isinstance(kind.get("rope_type"), str)}


def _chunks(lengths: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Cut consecutive prompts into runs of at most `most` tokens; a longer prompt is a run of its own."""
    cuts, total = [0], 0
    for index, length in enumerate(lengths):
        if total and total + length > most:
            cuts.append(index)
            total = 0
        total += length
    return list(zip(cuts, [*cuts[1:], len(lengths)], strict=True))
