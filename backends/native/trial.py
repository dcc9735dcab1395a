"""Choosing how to run a model, by trying.

For the engine's setup. Replacing a model's attention is right for most models and silently wrong for a few, whose masks
or positions are made elsewhere; nothing in their configs says so. So a few tokens are run both ways and the logits
compared.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from rollstock import UserError
from rollstock.backends.native.attention import UnsupportedAttentionError
from rollstock.backends.native.decoder import Decoder, PlainDecoder, SharedDecoder
from rollstock.backends.native.lean import LeanDecoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

_PROMPTS = ((0, 1, 1), (1, 1, 0, 1, 0))  # ids that even the smallest vocabulary has
_TOKENS = (1, 0)


def choose_decoder(model: PreTrainedModel, choice: Literal["auto", "lean", "shared", "plain"]) -> tuple[Decoder, int]:
    """The decoder for a model, and the bytes that a token of one row takes in its cache.

    auto: the fastest way that gives the logits of the model's own forward: steps without modules, then shared prompts,
    then plain. Raises UserError if the model can be run in none of these ways, or not in the one chosen.
    """
    own = model.config._attn_implementation
    plain = PlainDecoder(model) if choice in ("auto", "plain") else None
    kinds = {"auto": (LeanDecoder, SharedDecoder), "lean": (LeanDecoder,), "shared": (SharedDecoder,), "plain": ()}
    reason: str | None = None
    reference = _own_logits(model) if choice != "plain" else {}
    for kind in kinds[choice]:
        try:
            shared = kind(model)
            return shared, _try_shared(shared, reference)
        except UnsupportedAttentionError as unsupported:
            reason = str(unsupported)
        model.set_attn_implementation(own)
    if plain is None:
        raise UserError(f"rollout.decoder: {choice} does not work with this model: {reason}; choose auto or plain")
    if reason is not None:
        _log.warning("native rollout: no shared prompts, since %s; prompts are run one length at a time", reason)
    return plain, _run(plain, _PROMPTS[:1])[1]


def _try_shared(decoder: SharedDecoder, reference: dict[tuple[int, ...], Tensor]) -> int:
    """The cache's bytes per token; raises UnsupportedAttentionError if the logits are not the model's own."""
    logits, size = _run(decoder, _PROMPTS)
    worst = max(
        float((row.float() - reference[sequence]).abs().max() / reference[sequence].std().clamp(min=1e-6))
        for sequence, row in logits.items()
    )
    # Rounding moves logits by far less, a wrong mask or position by far more, than these shares of their spread.
    if worst > (1e-3 if decoder.model.dtype == torch.float32 else 0.2):
        raise UnsupportedAttentionError(f"the logits would be off by {worst:.2g} of their spread")
    return size


def _own_logits(model: PreTrainedModel) -> dict[tuple[int, ...], Tensor]:
    """The logits after each of the trial's sequences, from a forward without any cache."""
    found = {}
    for prompt in _PROMPTS:
        for count in range(len(_TOKENS) + 1):
            sequence = prompt + _TOKENS[:count]
            output = model(input_ids=torch.tensor([sequence], device=model.device), use_cache=False)
            found[sequence] = output.logits[0, -1].float()
    return found


def _run(decoder: Decoder, prompts: Sequence[tuple[int, ...]]) -> tuple[dict[tuple[int, ...], Tensor], int]:
    """The logits after each sequence of the trial (two rows for the first prompt), and the cache's bytes per token."""
    logits = decoder.start(prompts, [2, *[1] * (len(prompts) - 1)], len(_TOKENS))
    size = decoder.bytes_per_token()
    found = {prompt: logits[i] for i, prompt in enumerate(prompts)}
    rows = [prompts[0], *prompts]
    for count, token in enumerate(_TOKENS, start=1):
        if count == 2:  # drop the first row: the last takes its place, as it would in a real batch
            rows = [rows[-1], *rows[1:-1]]
            decoder.keep(torch.tensor([len(rows), *range(1, len(rows))]))
        logits = decoder.step(torch.full((len(rows),), token, device=decoder.device))
        logits = logits if decoder.rows is None else logits[decoder.rows]
        found |= {prompt + _TOKENS[:count]: logits[i] for i, prompt in enumerate(rows)}
    decoder.stop()
    decoder.release()
    return found, size
