"""Tasks from a file: prompts with answers or responses as JSON lines or parquet, plain or as chat.

For practitioners with data of their own. Which field is what is said by options; each row is checked before the first
step, and every error names the row. Answers are what sampled responses are scored with, in a way shared with the `rule`
reward (`rollstock.plugins.answers`); a row's own responses are what offline algorithms train on.
"""

from __future__ import annotations

import hashlib
import json
import random
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rollstock import REQUIRED, ConfigError, Environment, Message, Sample, Split, Task, derive_seed, hookimpl, option
from rollstock.plugins.answers import MatchOptions
from rollstock.plugins.environments._responses import (
    ResponseOptions,
    checked_beginning,
    checked_text,
    split_conversation,
)
from rollstock.plugins.environments._rows import Row, RowError, Rows, data_file, look_up, open_rows

ANSWER = "answer"
"""The field of the answer if nothing else is said; rows that have responses may go without it."""


@dataclass(kw_only=True)
class JsonlConfig(MatchOptions, ResponseOptions):
    """Options of the `jsonl` environment; fields are dotted paths into a row, such as `extra.answer`."""

    path: str = option(REQUIRED, "file of tasks, .jsonl or .parquet")
    heldout_path: str | None = option(None, "file of held-out tasks; none: a part of `path`")
    heldout_fraction: float = option(
        0.1, "share of `path` that is held out, chosen by its prompts", minimum=0, maximum=0.99
    )
    split_seed: int = option(0, "another number holds other rows out")
    on_overlap: Literal["error", "drop"] = option("error", "what to do with rows whose prompt is in `heldout_path` too")
    prompt: str = option("prompt", "field of the prompt: a text, or a list of messages with role and content")
    template: str | None = option(None, "text of the prompt with fields in braces, instead of `prompt`")
    system: str | None = option(None, "a system message before each prompt that is a text")
    chat: bool = option(True, "a text is asked as a chat message; otherwise it is encoded as it is")
    answer: str | None = option(ANSWER, "field of the right answer, or of a list of them; none: there is none")
    match: Literal["exact", "number", "contains", "choice", "none"] = option(
        "exact", "how a response is compared with the answer; none: this environment does not score"
    )
    id: str | None = option(None, "field of the task's id; none: the file's name and the row")
    metadata: list[str] = option([], "fields to hand on to rewards in the task's metadata")

    def __post_init__(self) -> None:
        MatchOptions.__post_init__(self)
        ResponseOptions.__post_init__(self)
        if self.system is not None and not self.chat:
            raise ValueError("a system message needs chat: true; put its text into the template")
        if self.answer is None and self.match != "none":
            raise ValueError(f"match: {self.match} needs the field of the right answer; set answer, or match: none")
        if self.template is not None:
            template_fields(self.template)

    @property
    def answer_is_optional(self) -> bool:
        """Whether a row may go without an answer: it has responses, and nobody named the answer's field."""
        return self.answer == ANSWER and bool(self.response_fields())

    def fields(self) -> list[str]:
        """All fields that a task is made of."""
        prompt = [self.prompt] if self.template is None else template_fields(self.template)
        named = [field for field in (self.answer, self.id) if field is not None]
        return [*prompt, *named, *self.response_fields(), *self.metadata]


@dataclass
class _Index:
    """Which rows are whose: for each split the file, and positions in it."""

    files: dict[Split, Rows]
    positions: dict[Split, list[int]] = field(default_factory=lambda: {"train": [], "heldout": []})


class Jsonl(Environment[JsonlConfig]):
    """Files are read when the first task is asked for, so that reward processes, which need none, start at once."""

    _index: _Index | None = None

    def setup(self, seed: int) -> None:
        """Look for the files. Raises ConfigError. The splits depend on `split_seed`, not on the run's seed."""
        self._path = data_file("environment.path", self.config.path)
        text = self.config.heldout_path
        self._heldout_path = None if text is None else data_file("environment.heldout_path", text)

    def num_tasks(self, split: Split) -> int:
        """How many rows a split has. The first call reads all of them, and raises RowError for one that is no task."""
        return len(self._read().positions[split])

    def task(self, split: Split, index: int) -> Task:
        """The task at `index`: training rows in the order of the file, held-out ones shuffled."""
        found = self._read()
        rows, position = found.files[split], found.positions[split][index]
        return self._task(rows.path, rows.number(position), rows.get(position))

    def score(self, sample: Sample) -> float | None:
        """The value of the response by `match`; None where the row has no answer, or with match: none."""
        if self.config.match == "none" or sample.task.answer is None:
            return None
        return self.config.value(self.config.match, sample.response, sample.task.answer)

    def fingerprint(self) -> str:
        """Checksums of the files, and the options that decide which row is held out."""
        files = [rows.fingerprint() for rows in dict.fromkeys(self._read().files.values())]
        return f"{'+'.join(files)}:{self.config.heldout_fraction}:{self.config.split_seed}"

    def _read(self) -> _Index:
        if self._index is None:
            self._index = self._separate_files() if self._heldout_path else self._one_file()
            random.Random(derive_seed(self.config.split_seed, "heldout")).shuffle(self._index.positions["heldout"])
        return self._index

    def _one_file(self) -> _Index:
        """Hold out by a hash of the prompt: equal prompts fall on one side, and new rows move no old ones."""
        rows = self._open("environment.path", self._path)
        keys = [derive_seed(self.config.split_seed, "side", digest) / 2**63 for digest in self._digests(rows)]
        # At least one prompt is held out, however small the file.
        border = max(self.config.heldout_fraction, min(keys, default=0.0)) if self.config.heldout_fraction else -1.0
        index = _Index({"train": rows, "heldout": rows})
        for position, key in enumerate(keys):
            index.positions["heldout" if key <= border else "train"].append(position)
        if not index.positions["train"]:
            rows_there = f"{len(keys)} rows" if len(keys) != 1 else "one row"
            raise ConfigError(
                f"{self._path} has {rows_there}, and none is left for training: it needs at least two prompts, "
                "one of which is held out (or set environment.heldout_fraction=0 and hold none out)"
            )
        return index

    def _separate_files(self) -> _Index:
        assert self._heldout_path is not None
        heldout = self._open("environment.heldout_path", self._heldout_path)
        rows = self._open("environment.path", self._path)
        index = _Index({"train": rows, "heldout": heldout})
        number_of: dict[str, int] = {}
        for position, digest in enumerate(self._digests(heldout)):
            number_of[digest] = heldout.number(position)
            index.positions["heldout"].append(position)
        for position, digest in enumerate(self._digests(rows)):
            if digest not in number_of:
                index.positions["train"].append(position)
            elif self.config.on_overlap == "error":
                same = f"the prompt is also in {self._heldout_path}, row {number_of[digest]}"
                raise RowError(self._path, rows.number(position), f"{same}; on_overlap: drop leaves such rows out")
        if not index.positions["train"]:
            raise ConfigError(f"{self._path} has no row that is not in {self._heldout_path} too")
        return index

    def _open(self, name: str, path: Path) -> Rows:
        columns = dict.fromkeys(field.split(".")[0] for field in self.config.fields())
        return open_rows(name, path, list(columns), self, optional=[ANSWER] if self.config.answer_is_optional else [])

    def _digests(self, rows: Rows) -> Iterator[str]:
        """Check every row; yields what identifies its prompt."""
        for position, row in enumerate(rows.scan()):
            task = self._task(rows.path, rows.number(position), row)
            yield hashlib.sha256(json.dumps(task.prompt, sort_keys=True).encode()).hexdigest()[:16]

    def _task(self, path: Path, number: int, row: Row) -> Task:
        config = self.config
        try:
            answer = self._answer(row)
            if answer is not None and config.match != "none":
                config.value(config.match, "", answer)  # an answer that cannot be compared is found here
            prompt = self._prompt(row)
            return Task(
                id=f"{path.stem}:{number}" if config.id is None else str(look_up(row, config.id)),
                prompt=prompt,
                answer=answer,
                responses=[self._response(row, field, prompt) for field in config.response_fields()],
                metadata={"row": number, **{name: look_up(row, name) for name in config.metadata}},
            )
        except (LookupError, TypeError, ValueError) as error:
            raise RowError(path, number, str(error.args[0] if error.args else error)) from error

    def _answer(self, row: Row) -> Any:
        if self.config.answer is None or (self.config.answer_is_optional and ANSWER not in row):
            return None
        return look_up(row, self.config.answer)

    def _response(self, row: Row, field: str, prompt: str | list[Message]) -> str:
        value, may_be_empty = look_up(row, field), field == self.config.rejected
        if not isinstance(value, list):
            return checked_text(value, field, may_be_empty=may_be_empty)
        before, text = split_conversation(checked_messages(value, field), field, may_be_empty=may_be_empty)
        checked_beginning(before, prompt, field)
        return text

    def _prompt(self, row: Row) -> str | list[Message]:
        config = self.config
        prompt = look_up(row, config.prompt) if config.template is None else filled(config.template, row)
        if isinstance(prompt, list):
            messages = checked_messages(prompt, config.prompt)
            if config.prompt not in config.response_fields():
                return messages
            before, _ = split_conversation(messages, config.prompt)  # a whole conversation: its end is the response
            if not before:
                raise ValueError(f"{config.prompt!r} has no message before the response, so there is no prompt")
            return before
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f"{config.prompt!r} must be a text or a list of messages, not {prompt!r}")
        if not config.chat:
            return prompt
        system = [] if config.system is None else [{"role": "system", "content": config.system}]
        return [*system, {"role": "user", "content": prompt}]


def checked_messages(messages: Sequence[Any], name: str) -> list[Message]:
    """Chat messages with nothing but role and content. Raises ValueError naming the message (1-based)."""
    if not messages:
        raise ValueError(f"{name!r} is an empty list of messages")
    for number, message in enumerate(messages, start=1):
        found = message if isinstance(message, dict) else {}
        if not isinstance(found.get("role"), str) or not isinstance(found.get("content"), str):
            raise ValueError(f"message {number} of {name!r} needs role and content as texts: {message!r}")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def template_fields(template: str) -> list[str]:
    """The fields that a template names. Raises ValueError if it is none."""
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"template: {error}; a brace that is meant is written twice") from error
    if not fields or not all(fields):
        raise ValueError(f"template: {template!r} needs a row's field in braces, such as {{question}}")
    return fields


def filled(template: str, row: Mapping[str, Any]) -> str:
    """A template with a row's fields filled in. Raises LookupError."""
    parts = []
    for text, name, specification, _conversion in string.Formatter().parse(template):
        parts.append(text)
        if name is not None:
            parts.append(format(look_up(dict(row), name), specification or ""))
    return "".join(parts)


@hookimpl
def rollstock_environment() -> type[Environment[Any]]:
    """The class of this plugin."""
    return Jsonl
