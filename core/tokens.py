"""Tokenizers: loaded as data, or built from a list of characters; and conversations turned into token ids.

For the roles that touch text. Ids that were sampled are never decoded and encoded again: a conversation grows by the
ids of its new parts alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstock.errors import ConfigError, UserError
from rollstock.interfaces.environment import Message

if TYPE_CHECKING:
    from rollstock.schema import ModelSection

END = "<end>"


def load_tokenizer(model: ModelSection) -> Any:
    """The Hugging Face tokenizer that a config's `model` section means. Raises ConfigError if it cannot be had."""
    source = model.tokenizer if model.tokenizer is not None else model.path
    if isinstance(source, str):
        return _from_directory(source)
    if source is None or "characters" not in source:
        raise ConfigError(
            "model.tokenizer: a model made from `model.config` needs a tokenizer: the path of a directory that has "
            'one, or {characters: "0123456789+="}, which makes one of single characters'
        )
    return character_tokenizer(str(source["characters"]))


def _from_directory(path: str) -> Any:
    if not Path(path).is_dir():
        raise ConfigError(f"model: {path!r} is not a directory; give the local path of a model in Hugging Face format")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises many types for what is always an unreadable tokenizer
        raise ConfigError(f"model: no tokenizer could be read from {path!r}: {error}") from error


def character_tokenizer(characters: str) -> Any:
    """A tokenizer in which each character is a token, and `<end>` ends a sequence and pads.

    Raises ConfigError if there is no character. A character that it does not know is an error when encoding.
    """
    if not characters:
        raise ConfigError("model.tokenizer.characters: it must list at least one character")
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {END: 0, **{c: i + 1 for i, c in enumerate(dict.fromkeys(characters))}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=None))  # type: ignore[arg-type]  # None means: an error
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )


def encode_prompt(tokenizer: Any, prompt: Sequence[Message] | str | Sequence[int]) -> list[int]:
    """Token ids of a task's prompt; messages go through the tokenizer's chat template, ready for the reply.

    Raises UserError if the tokenizer has no chat template for messages, or lacks a character of a text.
    """
    if isinstance(prompt, str):
        return _encode(tokenizer, prompt, special=True)
    if all(isinstance(item, int) for item in prompt):
        return [int(item) for item in prompt]  # type: ignore[call-overload]  # checked on the line above
    if not tokenizer.chat_template:
        raise UserError(
            "the environment gives chat messages, but the model's tokenizer has no chat template; "
            "choose a plain-text prompt in the environment's options, or a chat model"
        )
    text = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=False)
    return _encode(tokenizer, text, special=False)


def encode_reply(tokenizer: Any, reply: str, *, chat: bool, ended: bool) -> list[int]:
    """Token ids of the other side's reply, up to where the policy speaks again.

    chat: the prompt was messages, so the template's marks go around the reply; ended: the policy's last token was the
    end-of-turn mark, which is then not written a second time.
    """
    if not chat:
        return _encode(tokenizer, reply, special=False)
    turn: list[Message] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "@@a@@"}]
    whole: str = tokenizer.apply_chat_template(
        [*turn, {"role": "user", "content": reply}], add_generation_prompt=True, tokenize=False
    )
    tail = whole[whole.index("@@a@@") + len("@@a@@") :]
    end = tokenizer.eos_token or ""
    if ended and end and tail.startswith(end):
        tail = tail[len(end) :]
    return _encode(tokenizer, tail, special=False)


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Text of token ids, without special tokens."""
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
    return text


def end_ids(tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a response."""
    return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)


def _encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    try:
        ids: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    except Exception as error:  # the tokenizers library raises bare Exception for an unknown character
        raise UserError(f"the tokenizer cannot encode {text[:80]!r}: {error}") from error
    return ids
