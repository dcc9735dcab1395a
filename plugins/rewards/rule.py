"""Rewards by rule: comparison with the right answer, patterns, multiple choice, or a function of the user's.

For verifiable tasks. How texts and numbers are compared, and what near misses are worth, is shared with the
environments that score (`rollstock.plugins.answers`).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

from rollstock import ConfigError, Environment, Reward, Sample, hookimpl, option, suggest
from rollstock.plugins.answers import MatchOptions, compiled, last_match, normalised

Function: TypeAlias = Callable[..., Any]
Abstention: TypeAlias = Literal["no_answer", "no_match", "empty", "length"]


@dataclass(kw_only=True)
class RuleConfig(MatchOptions):
    """Options of the `rule` reward."""

    kind: Literal["exact", "number", "contains", "choice", "regex", "function"] = option("exact", "the rule")
    answer: str = option("answer", "where the right answer is: `answer`, or a dotted path into the task's metadata")
    pattern: str | None = option(
        None, "for regex: what must be found in the response; its first group, if it has one, must be the answer"
    )
    function: str | None = option(None, "for function: `module:name` or `path/to/file.py:name`, called with the Sample")
    arguments: dict[str, Any] = option({}, "for function: keyword arguments for each call")
    abstain_on: list[Abstention] = option(
        ["no_answer"],
        "say nothing, rather than give a value: no_answer (the task has none), no_match (`extract` finds nothing), "
        "empty (an empty response), length (one that was cut off)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for needed in ("pattern", "function"):
            kind = "regex" if needed == "pattern" else "function"
            if (getattr(self, needed) is not None) != (self.kind == kind):
                raise ValueError(f"`{needed}` and kind: {kind} belong together, and kind is {self.kind}")
        if self.pattern is not None:
            compiled("pattern", self.pattern)


class Rule(Reward[RuleConfig]):
    """One rule for all samples."""

    def setup(self, environment: Environment[Any]) -> None:
        """Find the function. Raises ConfigError if there is none."""
        self._function = None if self.config.function is None else find_function(self.config.function)

    def score(self, sample: Sample) -> float | None:
        """The rule's value, or None on what `abstain_on` lists."""
        config = self.config
        text = config.extracted(sample.response)
        answer = sample.task.answer if config.answer == "answer" else from_metadata(sample, config.answer)
        reasons: dict[Abstention, bool] = {
            "no_answer": answer is None and self._needs_answer(),
            "no_match": text is None,
            "empty": not sample.response.strip(),
            "length": sample.finish_reason == "length",
        }
        if any(reasons[name] for name in config.abstain_on):
            return None
        if self._function is not None:
            value = self._function(sample, **config.arguments)
            return None if value is None else float(value)
        if reasons["no_answer"]:
            raise ValueError(f"task {sample.task.id!r} has no answer to compare with")
        if config.kind == "regex":
            return config.otherwise if text is None else self._pattern_value(text, answer)
        assert config.kind != "function"
        return config.value(config.kind, sample.response, answer)

    def _needs_answer(self) -> bool:
        config = self.config
        return config.kind != "function" and not (
            config.pattern is not None and compiled("pattern", config.pattern).groups == 0
        )

    def _pattern_value(self, text: str, answer: object) -> float:
        pattern = compiled("pattern", self.config.pattern or "")
        found = last_match(pattern, text)
        if found is None:
            return self.config.otherwise
        if pattern.groups == 0:
            return self.config.exact
        same = normalised(found, self.config.normalise) == normalised(str(answer), self.config.normalise)
        return self.config.exact if same else self.config.wrong


def from_metadata(sample: Sample, path: str) -> Any:
    """The value at a dotted path of the task's metadata, None if it is not there."""
    value: Any = sample.task.metadata
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def find_function(reference: str) -> Function:
    """The function at `module:name` or `file.py:name`. Raises ConfigError that says which half was not found."""
    where, colon, name = reference.rpartition(":")
    if not colon or not where or not name:
        raise ConfigError(f"function: {reference!r} is not of the form module:name or path/to/file.py:name")
    module = _load_file(Path(where).expanduser()) if where.endswith(".py") else _import(where)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"function: {where} has no function {name!r}. {suggest(name, functions)}")
    return found  # type: ignore[no-any-return]  # callable, as checked


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        hint = ""
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name is not None
            and f"{name}.".startswith(f"{error.name}.")
        ):
            hint = (
                f"; it is neither installed nor on PYTHONPATH. For a file, write path/to/{name.split('.')[-1]}.py:name"
            )
        raise ConfigError(f"function: cannot import {name!r}: {type(error).__name__}: {error}{hint}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"function: there is no file {str(path)!r}, looked for in {Path.cwd()}")
    specification = importlib.util.spec_from_file_location(f"rollstock_rule_{path.stem}", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    # Dataclasses and pickle look their module up by name.
    sys.modules[module.__name__] = module
    try:
        specification.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        raise ConfigError(f"function: {path} does not run: {type(error).__name__}: {error}") from error
    return module


@hookimpl
def rollstock_reward() -> type[Reward[Any]]:
    """The class of this plugin."""
    return Rule
