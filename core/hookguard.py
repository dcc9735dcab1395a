"""Hook implementations that put their plugin's name into whatever they raise.

For the plugin manager, which registers these in place of the plugin's own functions: pluggy calls many plugins in one
go, and its traceback alone does not say whose function failed. A wrapper is not blamed for an exception that only
passes through it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable
from typing import Any

from rollstock.contract import HookFunction


class GuardedHooks:
    """What is registered with pluggy for one module or instance: its hook functions, each guarded, as attributes."""

    def __init__(self, label: str, hooks: Iterable[HookFunction]) -> None:
        self.label = label
        for hook in hooks:
            guard = _guard_wrapper if hook.options.get("wrapper") else _guard_function
            setattr(self, hook.attribute, guard(hook.function, f"{hook.name} of plugin {label}"))

    def __repr__(self) -> str:
        return f"<hooks of plugin {self.label}>"


def _guard_function(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except BaseException as error:
            _blame(error, name)
            raise

    return guarded


def _guard_wrapper(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*arguments: Any) -> Generator[Any, Any, Any]:
        generator: Generator[Any, Any, Any] = function(*arguments)
        resume: Callable[[], Any] = functools.partial(next, generator)
        passing: BaseException | None = None
        while True:
            try:
                yielded = resume()
            except StopIteration as stop:
                return stop.value
            except BaseException as error:
                if error is not passing:
                    _blame(error, name)
                raise
            try:
                result = yield yielded
                resume, passing = functools.partial(generator.send, result), None
            except GeneratorExit:
                generator.close()
                raise
            except BaseException as error:
                resume, passing = functools.partial(generator.throw, error), error

    return guarded


def _blame(error: BaseException, name: str) -> None:
    note = f"raised by the hook {name}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
