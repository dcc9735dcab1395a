"""Keys and passwords are kept out of whatever a run writes: manifest, logs, report.

For everything that stores or shows a config, a command line or a message. What counts as a secret is told from the
name that it goes by (`api_key`, `password`, `hf_token`) and from well-known shapes (a token that begins with `hf_`, a
URL with a password in it); tokens in the sense of text (`pad_token`, `stop_token_ids`) are none.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

MASK = "********"
_SHORTEST = 8  # what is shorter is a word that may be in any text
_NAME = re.compile(
    r"(^|[_.-])(api_?key|access_?key|secret_?key|private_?key|auth_?key|passw(or)?d|passphrase|secret|credentials?|"
    r"authorization|bearer|cookie|(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)(?<!stop_)(?<!mask_)(?<!sep_)(?<!cls_)token)s?$",
    re.IGNORECASE,
)
_VALUE = re.compile(
    r"\b(hf_|sk-|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abp]-|AKIA|AIza|wandb_v1_)[A-Za-z0-9_\-]{12,}"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
    r"|(?<=Bearer )[A-Za-z0-9._~+/\-]{12,}=*"
)


def is_secret_name(name: str) -> bool:
    """Whether a value that goes by `name` is to be masked."""
    return _NAME.search(name) is not None


def mask_text(text: str, known: Collection[str] = ()) -> str:
    """`text` with everything masked that is one of the `known` secrets, or has the shape of a key or a password."""
    for secret in known:
        text = text.replace(secret, MASK)
    return _VALUE.sub(MASK, text)


def known_secrets(config: object = None) -> list[str]:
    """The secrets that the environment and a config (plain data) hold by name, the longest first, to be masked wherever
    they turn up; none that are shorter than eight characters."""
    found = {value for name, value in os.environ.items() if is_secret_name(name)} | set(_secrets_in(config, ""))
    return sorted((secret for secret in found if len(secret) >= _SHORTEST), key=len, reverse=True)


def _secrets_in(value: object, name: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _secrets_in(inner, str(key))
    elif isinstance(value, str):
        if value and is_secret_name(name):
            yield value
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _secrets_in(inner, name)


def mask_secrets(value: Any, name: str = "") -> Any:
    """A copy of plain data (mappings, sequences, scalars) in which secret strings are masked.

    Numbers, booleans, None and empty strings stay: they are no secrets, whatever their name.
    """
    if isinstance(value, Mapping):
        return {key: mask_secrets(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, str):
        return MASK if value and is_secret_name(name) else mask_text(value)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [mask_secrets(inner, name) for inner in value]
    return value


def mask_arguments(arguments: Sequence[str], known: Collection[str] = ()) -> list[str]:
    """A command line with the values of `some.api_key=...`, `--password=...` and `--password ...` masked, and the
    `known` secrets."""
    masked: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if hide_next:
            masked.append(MASK)
        elif equals and value and is_secret_name(_plain(name)):
            masked.append(f"{name}={MASK}")
        else:
            masked.append(mask_text(argument, known))
        hide_next = not hide_next and not equals and name.startswith("--") and is_secret_name(_plain(name))
    return masked


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


class MaskingFormatter(logging.Formatter):
    """A log formatter that masks keys in all that it writes, tracebacks included."""

    def __init__(self, layout: str, known: Collection[str] = ()) -> None:
        super().__init__(layout)
        self.known = known

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        return mask_text(super().format(record), self.known)
