"""Installed plugins, made up: distributions with metadata, entry points and modules in a `sys.path` folder."""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent

import pytest

from rollstock.extras import extras_of
from rollstock.sources import find_module, parse


class Site:
    """A folder of installed distributions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def install(
        self,
        distribution: str,
        entry_points: Mapping[str, str],
        modules: Mapping[str, str] | None = None,
        *,
        version: str = "1.0",
        requires: Sequence[str] = (),
        extras: Sequence[str] = (),
        folder: str = "",
    ) -> None:
        """Write a distribution: `entry_points` from `kind:name` to module, `modules` from dotted name to source."""
        root = self.path / folder
        info = root / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        headers = [f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}"]
        headers += [f"Provides-Extra: {extra}" for extra in extras]
        headers += [f"Requires-Dist: {requirement}" for requirement in requires]
        (info / "METADATA").write_text("\n".join(headers) + "\n\nAbout it.\nName: not this one\n")
        lines = []
        for id, module in entry_points.items():
            kind, _, name = id.partition(":")
            lines.append(f"[rollstock.{kind}]\n{name} = {module}\n")
        (info / "entry_points.txt").write_text("\n".join(lines))
        for module, source in (modules or {}).items():
            self.write(module, source, folder=folder)

    def write(self, module: str, source: str, *, folder: str = "") -> Path:
        """Write a module; `package/__init__` as the last part makes a package of it."""
        path = (self.path / folder).joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(source))
        return path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    before = set(sys.modules)
    path = tmp_path / "site"
    path.mkdir()
    monkeypatch.syspath_prepend(str(path))
    _forget()
    yield Site(path)
    for name in set(sys.modules) - before:
        module = sys.modules[name]
        path_of_package = getattr(module, "__path__", ())  # of torch's own namespaces, something else
        inside = path_of_package if isinstance(path_of_package, Iterable) else ()
        places = [getattr(module, "__file__", None), *inside]  # a namespace has no file
        if any(str(place).startswith(str(tmp_path)) for place in places):
            del sys.modules[name]
    _forget()


def _forget() -> None:
    for cached in (find_module, parse, extras_of):
        cached.cache_clear()


TRACKER = '''
"""A tracker for tests.

It keeps what it was told.
"""
from dataclasses import dataclass
from rollstock import Tracker, hookimpl, option


@dataclass(kw_only=True)
class NotesConfig:
    every: int = option(1, "steps between notes", minimum=1)
    title: str = option("notes", "what stands above them")


class Notes(Tracker[NotesConfig]):
    def start(self, run, state):
        self.kept = []

    def log(self, step, metrics):
        self.kept.append((step, dict(metrics)))


@hookimpl
def rollstock_tracker():
    return Notes
'''


@pytest.fixture
def tracker_source() -> str:
    """The source of a tracker plugin with two options, `every` and `title`."""
    return TRACKER


@pytest.fixture
def installed() -> Iterator[Callable[[str, str, type], None]]:
    """Have plugins installed for the length of a test: `installed("extension", "mine", Mine)`."""
    from rollstock.testing import installed as install

    with ExitStack() as stack:
        yield lambda kind, name, plugin: stack.enter_context(install(kind, name, plugin))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Compute with one thread, as the processes that a run here is compared with."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def keep_logging() -> Iterator[None]:
    """Put the handlers of rollstock's log back, which the command line replaces."""
    log = logging.getLogger("rollstock")
    handlers, level = list(log.handlers), log.level
    yield
    log.handlers[:] = handlers
    log.setLevel(level)
