"""pytest fixtures for tests of plugins. pytest loads this module by itself wherever rollstock is installed.

Each cleans up after its test. Nothing here imports torch, or anything else that is slow, before a fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rollstock import ModelSpec, Plugin
    from rollstock.launch import Outcome
    from rollstock.manager import PluginManager


@pytest.fixture
def rollstock_manager() -> PluginManager:
    """A plugin manager of the test's own; `rollstock_manager.add(kind, name, module)` makes a plugin known to it."""
    from rollstock.manager import make_manager

    return make_manager()


@pytest.fixture
def rollstock_install() -> Iterator[Callable[[str, str, type[Plugin[Any]] | ModuleType | str], None]]:
    """`rollstock_install(kind, name, plugin)` has a plugin installed until the end of the test, for runs and all
    managers.

    The plugin is a class, a module, or the source text of a module; see `rollstock.testing.installed`.
    """
    from rollstock.testing import installed

    with ExitStack() as stack:
        yield lambda kind, name, plugin: stack.enter_context(installed(kind, name, plugin))


@pytest.fixture
def rollstock_run(tmp_path: Path) -> Callable[..., Outcome]:
    """`rollstock_run(sections, overrides)` trains a tiny model for two steps, in a new directory each time.

    sections and overrides are those of `rollstock.testing.tiny_config`; the outcome says where the run is.
    """
    from rollstock.testing import tiny_run

    count = 0

    def run(sections: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()) -> Outcome:
        nonlocal count
        count += 1
        return tiny_run(tmp_path / f"run-{count}", sections, overrides)

    return run


@pytest.fixture
def rollstock_model() -> ModelSpec:
    """A random language model of about 30 thousand weights, over the characters of `rollstock_tokenizer`."""
    from rollstock.testing import tiny_model

    return tiny_model()


@pytest.fixture
def rollstock_tokenizer() -> Any:
    """A Hugging Face tokenizer of single characters."""
    from rollstock.testing import tiny_tokenizer

    return tiny_tokenizer()
