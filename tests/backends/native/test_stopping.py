"""Where a response ends."""

from typing import Any

import pytest
import torch

from rollstock import UserError
from rollstock.backends.native.stopping import MAY_END_STRING, STOP_ID, StopRules
from rollstock.tokens import character_tokenizer


def rules(words: Any, *, stop: tuple[str, ...] = (), ids: tuple[int, ...] = ()) -> StopRules:
    return StopRules(vocab_size=len(words), stop_token_ids=ids, stop=stop, tokenizer=words, device=torch.device("cpu"))


def first_end(found: StopRules, tokens: list[int]) -> tuple[int, str] | None:
    """How the engine uses the rules: a look at every token's flag, and at the text only behind a flag."""
    for end in range(1, len(tokens) + 1):
        if found.flags[tokens[end - 1]] == MAY_END_STRING:
            stop = found.found(tokens[max(0, end - found.window) : end])
            if stop is not None:
                return end, stop
    return None


def spell(words: Any, *pieces: str) -> list[int]:
    ids = words.convert_tokens_to_ids(list(pieces))
    assert None not in ids
    return [int(i) for i in ids]


@pytest.mark.parametrize(
    ("pieces", "stop", "end"),
    [
        (["a", "end", "b"], "end", 2),  # a token of its own
        (["e", "n", "d"], "end", 3),  # one character at a time
        (["xs", "topic", "e"], "stop", 2),  # from the middle of one token to the middle of the next
        (["xs", "t", "op"], "stop", 3),
        (["st", "e", "op"], "stop", None),
        (["topic"], "op", 1),  # in the middle of one token
        (["s", "s", "t", "op"], "stop", 4),
        (["Ġ", "end"], " end", 2),
    ],
)
def test_a_stop_string_is_found_at_the_token_that_completes_it(
    words: Any, pieces: list[str], stop: str, end: int | None
) -> None:
    found = first_end(rules(words, stop=("zzz", stop)), spell(words, *pieces))
    assert found == (None if end is None else (end, stop))


def test_a_stop_string_of_several_bytes_is_found_at_its_last_byte(words: Any) -> None:
    tokens = words.encode("é!", add_special_tokens=False)
    assert len(tokens) == 3
    assert first_end(rules(words, stop=("é",)), tokens) == (2, "é")


def test_special_tokens_can_be_stop_strings(words: Any) -> None:
    turn = words.convert_tokens_to_ids("<turn>")
    assert first_end(rules(words, stop=("<turn>",)), [*spell(words, "a"), turn]) == (2, "<turn>")


def test_few_tokens_can_end_a_stop_string(words: Any) -> None:
    flags = rules(words, stop=("stop",)).flags
    marked = {words.convert_ids_to_tokens(i) for i in (flags == MAY_END_STRING).nonzero()[:, 0].tolist()}
    assert {"p", "op", "topic"} <= marked
    assert not {"s", "st", "xs", "e", "end", "o"} & marked


def test_stop_ids_are_marked(words: Any) -> None:
    flags = rules(words, ids=(4, 9)).flags
    assert (flags == STOP_ID).nonzero()[:, 0].tolist() == [4, 9]


def test_rules_that_cannot_work_are_refused(words: Any) -> None:
    with pytest.raises(UserError, match="stop id 9999 is outside"):
        rules(words, ids=(9999,))
    with pytest.raises(UserError, match="empty string"):
        rules(words, stop=("",))
    with pytest.raises(UserError, match="no tokenizer"):
        StopRules(vocab_size=9, stop_token_ids=(), stop=("x",), tokenizer=None, device=torch.device("cpu"))


def test_a_tokenizer_that_knows_no_letters_can_have_stop_strings() -> None:
    digits = character_tokenizer("0123456789+=")
    found = rules(digits, stop=("=7",))
    assert first_end(found, digits("12=7")["input_ids"]) == (4, "=7")
    assert first_end(found, digits("12=8")["input_ids"]) is None
