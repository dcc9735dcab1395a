"""A decoder whose model asks a router plugin for its experts.

For the engine, in runs with a router. It goes around another decoder, which runs the model as it always does; here is
what the router is told of the tokens, and what it chose for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rollstock import RoutedTokens
from rollstock.backends.moe import Record, RoutedModel
from rollstock.backends.native.decoder import Decoder
from rollstock.routing import captured_dtype, filled, prefix_keys, token_keys


class RoutedDecoder(Decoder):
    """`version` and `exploring` are what the engine says of the tokens to come; see `RoutedTokens`."""

    def __init__(self, inner: Decoder, routed: RoutedModel) -> None:
        super().__init__(inner.model)
        self.inner = inner
        self.mixes_lengths = inner.mixes_lengths
        self.shares_prompts = inner.shares_prompts
        inner.merges = False
        self.version = 0
        self.exploring = True
        self._routed = routed
        self._keys = torch.zeros(0, dtype=torch.int64)  # of every row's sequence so far
        self._positions = torch.zeros(0, dtype=torch.int64)  # of every row's next token

    @property
    def captures(self) -> bool:
        """Whether the router asks for the experts that it chose."""
        return self._routed.router.captures

    def missing(self, length: int) -> Tensor:
        """[length, layers, k]: captured experts that nobody knows."""
        layers = self._routed.layers
        nothing = torch.zeros((0, len(layers), layers[0].top_k), dtype=captured_dtype(self._routed.num_experts))
        return filled(nothing, length)

    def start(self, prompts: Sequence[Sequence[int]], counts: Sequence[int], limit: int) -> Tensor:
        """See `Decoder.start`."""
        tokens = [torch.tensor(prompt, dtype=torch.int64) for prompt in prompts]
        keys = [prefix_keys(prompt, torch.arange(len(prompt))) for prompt in tokens]
        rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        self._keys = torch.stack([each[-1] for each in keys])[rows]
        self._positions = torch.tensor([len(prompt) for prompt in prompts])[rows]
        with self._routed.routing(self._told(torch.cat(keys))) as record:
            logits = self.inner.start(prompts, counts, limit)
        self.rows = self.inner.rows
        self._capture(record)
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder.step`."""
        self._keys = self._keys + token_keys(tokens.cpu(), self._positions)
        self._positions = self._positions + 1
        with self._routed.routing(self._told(self._keys)) as record:
            logits = self.inner.step(tokens)
        self.rows = self.inner.rows
        self._capture(record)
        return logits

    def keep(self, rows: Tensor) -> None:
        """See `Decoder.keep`."""
        self._keys, self._positions = self._keys[rows], self._positions[rows]
        self.inner.keep(rows)

    def stop(self) -> None:
        """See `Decoder.stop`."""
        self.captured = None
        self.inner.stop()

    def release(self) -> None:
        """See `Decoder.release`."""
        self.inner.release()

    def bytes_per_token(self) -> int:
        """See `Decoder.bytes_per_token`."""
        return self.inner.bytes_per_token()

    def _told(self, keys: Tensor) -> RoutedTokens:
        tokens = RoutedTokens(keys=keys, versions=torch.full_like(keys, self.version), exploring=self.exploring)
        return tokens.to(self.device)

    def _capture(self, record: Record) -> None:
        self.captured = record.experts().cpu() if self.captures else None
