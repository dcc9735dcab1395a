"""When a response ends: stop ids and stop strings, looked up for a whole batch at once.

For the engine's inner loop. Ids are one look-up in a table. Strings are found in decoded text, across token boundaries;
decoding every response after every token would cost more than the model on small machines, so the table also marks the
few tokens with which a stop string can end, and only the responses that just got one of those are decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from rollstock import UserError

STOP_ID: Final = 1
MAY_END_STRING: Final = 2
_UNDECODABLE = "\N{REPLACEMENT CHARACTER}"


class StopRules:
    """The stop ids and strings of one kind of sampling, for one tokenizer.

    `flags` is `[V]` int8: STOP_ID for ids that end a response, MAY_END_STRING for tokens that can complete a stop
    string, 0 for all others. Raises UserError for stop strings without a tokenizer, an empty stop string, and a stop id
    outside the vocabulary.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        stop: Sequence[str],
        tokenizer: Any,
        device: torch.device,
    ) -> None:
        for token in stop_token_ids:
            if not 0 <= token < vocab_size:
                raise UserError(f"stop id {token} is outside the model's vocabulary of {vocab_size} tokens")
        if "" in stop:
            raise UserError("sampling.stop has an empty string, which every response would contain: remove it")
        if stop and tokenizer is None:
            raise UserError(
                f"sampling.stop has {stop[0]!r}, but there is no tokenizer to find strings with: use stop_token_ids"
            )
        self.stop = tuple(stop)
        self.tokenizer = tokenizer
        # How many tokens `found` needs: a character is at most four of them (bytes) long; a few more give the decoder
        # the context that it joins words by.
        self.window = 4 * max((len(text) for text in self.stop), default=0) + 8
        flags = torch.zeros(vocab_size, dtype=torch.int8)
        if self.stop:
            flags[self._enders(vocab_size)] = MAY_END_STRING
        flags[list(stop_token_ids)] = STOP_ID
        self.flags: Tensor = flags.to(device)

    def found(self, tokens: Sequence[int]) -> str | None:
        """The stop string that the last token of a response completes, if any; only the end is looked at, as every
        token asks. One that was complete before is passed over: it came when nothing was to end the response yet."""
        text, before = self._decode(tokens[-self.window :]), self._decode(tokens[-self.window : -1])
        new = len(before.rstrip(_UNDECODABLE))
        return next((stop for stop in self.stop if stop in text[max(0, new - len(stop) + 1) :]), None)

    def _enders(self, vocab_size: int) -> list[int]:
        """The tokens whose text holds a stop string, begins with the end of one, or is only part of a character."""
        ends = tuple(stop[start:] for stop in self.stop for start in range(1, len(stop)))
        known = min(vocab_size, len(self.tokenizer))
        # Some decoders drop the space before a first word, so look at each token alone and behind another one.
        # That one is found by decoding: a tokenizer need not be able to encode any given letter.
        plain = (token for token in range(known) if (text := self._decode([token])).isalnum() and text.isascii())
        anchor = [token for token in [next(plain, None)] if token is not None]
        behind = len(self._decode(anchor))
        found = []
        for token in range(known):
            alone, joined = self._decode([token]), self._decode([*anchor, token])[behind:]
            if any(
                text.startswith(ends) or _UNDECODABLE in text or any(stop in text for stop in self.stop)
                for text in (alone, joined)
            ):
                found.append(token)
        return found

    def _decode(self, tokens: Sequence[int]) -> str:
        """Text as the tokens spell it: special tokens too, so that they can be stop strings, and no tidied spaces."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
