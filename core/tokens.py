"""Tokenizers: loaded as data, or built from a list of characters; and conversations turned into token ids.

For the roles that touch text. Ids that were sampled are never decoded and encoded again: a conversation grows by the
ids of its new parts alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstock.errors import ConfigError, UserError
from rollstock.interfaces.environment import Message, Sample

if TYPE_CHECKING:
    from rollstock.schema import ModelSection

END = "<end>"

_TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab*", "*.tiktoken", "tekken.json", "merges.txt")


def load_tokenizer(model: ModelSection) -> Any:
    """The Hugging Face tokenizer that a config's `model` section means. Raises ConfigError if it cannot be had."""
    source = model.tokenizer if model.tokenizer is not None else model.path
    if isinstance(source, str):
        return read_tokenizer(source, place="model.tokenizer" if source is model.tokenizer else "model.path")
    unknown = [key for key in source or () if key != "characters"]
    if unknown:
        raise ConfigError(f"model.tokenizer.{unknown[0]} is not an option of model.tokenizer. Known: characters.")
    if not source:
        raise ConfigError(
            "model.tokenizer: a model made from `model.config` needs a tokenizer: the path of a directory that has "
            'one, or {characters: "0123456789+="}, which makes one of single characters'
        )
    if not isinstance(source["characters"], str):
        raise ConfigError(
            f"model.tokenizer.characters must be one text, such as '0123456789+=', not {source['characters']!r}"
        )
    return character_tokenizer(source["characters"])


def read_tokenizer(path: str, *, place: str) -> Any:
    """The Hugging Face tokenizer in a local directory that the option `place` names. Raises ConfigError if there is
    none."""
    if not Path(path).is_dir():
        what = "is a file, not a directory" if Path(path).exists() else "does not exist"
        raise ConfigError(
            f"{place}: {path!r} {what}; give a local directory in Hugging Face format (nothing is downloaded)"
        )
    if not any(any(Path(path).glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise ConfigError(
            f"{place}: {path!r} has no tokenizer (no tokenizer.json, for one); give a directory that has"
            + (", with model.tokenizer=DIR" if place.startswith("model.") else "")
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises many types for what is always an unreadable tokenizer
        raise ConfigError(f"{place}: no tokenizer could be read from {path!r}: {error}") from error


def character_tokenizer(characters: str) -> Any:
    """A tokenizer in which each character is a token, and `<end>` ends a sequence and pads.

    Raises ConfigError if there is no character. A character that it does not know is an error when encoding.
    """
    if not characters:
        raise ConfigError("model.tokenizer.characters: it must list at least one character")
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {END: 0, **{c: i + 1 for i, c in enumerate(dict.fromkeys(characters))}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=None))  # None: an unknown one is an error
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
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return ids
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
    end-of-turn mark, which is then not written a second time. Raises UserError for a chat template without the policy's
    turns.
    """
    if not chat:
        return _encode(tokenizer, reply, special=False)
    turn: list[Message] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "@@a@@"}]
    whole: str = tokenizer.apply_chat_template(
        [*turn, {"role": "user", "content": reply}], add_generation_prompt=True, tokenize=False
    )
    if "@@a@@" not in whole:
        raise UserError(
            "the tokenizer's chat template does not repeat what the policy said, so a conversation of several turns "
            "cannot be continued with it; choose a plain-text prompt in the environment's options, or another model"
        )
    tail = whole[whole.index("@@a@@") + len("@@a@@") :]
    end = tokenizer.eos_token or ""
    if ended and end and tail.startswith(end):
        tail = tail[len(end) :]
    return _encode(tokenizer, tail, special=False)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that stands inside of a sequence, without special tokens. Raises UserError."""
    return _encode(tokenizer, text, special=False)


def encode_sample(tokenizer: Any, sample: Sample) -> list[int]:
    """Token ids of a finished trajectory, for a model that reads it: the prompt, then each turn and what ends it.

    With the policy's tokenizer these are the ids that it saw, but for the policy's own words, which are encoded from
    their text. A response that a limit cut has no end. Raises UserError as `encode_prompt` does.
    """
    prompt = sample.task.prompt
    chat = not isinstance(prompt, str) and not all(isinstance(item, int) for item in prompt)
    ids, end = encode_prompt(tokenizer, prompt), end_ids(tokenizer)[:1]
    turns: list[Message] = sample.turns or [{"role": "assistant", "content": sample.response}]
    for place, turn in enumerate(turns):
        if turn["role"] == "assistant":
            ids += encode_text(tokenizer, turn["content"])
            is_cut = place == len(turns) - 1 and sample.finish_reason == "length"
            ids += () if is_cut else end
        else:
            ids += encode_reply(tokenizer, turn["content"], chat=chat, ended=bool(end))
    return ids


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Text of token ids, without special tokens."""
    import numpy  # whoever only lists plugins need not wait for it

    # transformers looks at every id of a list, in Python, to see whether it is a number; at an array's once.
    ids = numpy.asarray(tokens, dtype=numpy.int64) if getattr(tokenizer, "is_fast", False) else list(tokens)
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


def end_ids(tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a response."""
    return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)


def _encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    try:
        ids: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    except Exception as error:  # the tokenizers library raises bare Exception for an unknown character
        missing = [character for character in dict.fromkeys(text) if not _can_encode(tokenizer, character)]
        if missing:
            shown = ", ".join(map(repr, missing[:10])) + (", ..." if len(missing) > 10 else "")
            raise UserError(
                f"the tokenizer has no token for {shown}, which {text[:80]!r} needs: add to "
                "model.tokenizer.characters, or choose another model.tokenizer"
            ) from error
        raise UserError(f"the tokenizer cannot encode {text[:80]!r}: {error}") from error
    return ids


def _can_encode(tokenizer: Any, character: str) -> bool:
    try:
        tokenizer(character, add_special_tokens=False)
    except Exception:  # as above
        return False
    return True
