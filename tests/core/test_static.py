"""Options read from source equal those of the imported class, for every built-in and for the ways in which plugins are
written.
"""

import sys
from textwrap import dedent

import pytest

from rollstock.discovery import discover
from rollstock.manager import make_manager
from rollstock.options import describe_options
from rollstock.static import Source, describe_statically, docstring, missing_extras


@pytest.mark.parametrize("id", discover())
def test_the_options_of_a_built_in_plugin_read_from_source_are_those_of_its_class(id: str) -> None:
    manager = make_manager()
    entry = manager.catalogue[id]
    assert describe_statically(entry) == describe_options(manager.load(entry.kind, entry.name).config_class())


HEAD = """
from dataclasses import dataclass, field
from typing import Any, Literal, Optional, TypeAlias
from rollstock import REQUIRED, Extension, hookimpl, option

"""

WAYS = {
    "literals": """
        @dataclass(kw_only=True)
        class C:
            path: str = option(REQUIRED, "a path")
            size: int = option(-1, "a size, "
                "in two parts", minimum=-1, maximum=8)
            kind: Literal["a", "b"] = option(default="a", help="which")
            rates: dict[str, float] = option({"x": 1.5}, "rates")
            maybe: Optional[int] = option(None, "perhaps")
            other: "int | None" = option(None, "perhaps too", choices=[1, 2])
            what: Any = option((), "whatever")
            plain: float = 0.5
            bare: int
        class P(Extension[C]): pass
    """,
    "aliases": """
        Mode = Literal["a", "b"]
        Level: TypeAlias = int | None
        SIZE = 12
        @dataclass(kw_only=True)
        class C:
            mode: Mode = option("a", "a mode")
            modes: list[Mode] = option([], "modes")
            level: Level = option(None, "a level")
            size: int = option(SIZE, "a size")
        class P(Extension[C]): pass
    """,
    "inherited and overridden": """
        @dataclass(kw_only=True)
        class A:
            first: int = option(1, "one")
            second: int = option(2, "two")
        @dataclass(kw_only=True)
        class C(A):
            third: int = option(3, "three")
            first: int = option(10, "ten")
        class Base(Extension[C]): pass
        class P(Base): pass
    """,
    "nested": """
        @dataclass(kw_only=True)
        class Inner:
            rank: int = option(0, "rank")
            scale: float = option(1.0, "scale")
        @dataclass(kw_only=True)
        class C:
            inner: Inner = option(Inner(rank=4), "inside")
        class P(Extension[C]): pass
    """,
    "imported": """
        from acme_parts.options import Settings as C, Base
        class P(Base): pass
    """,
    "through modules": """
        import typing
        import acme_parts.options as parts
        from acme_parts import more
        @dataclass(kw_only=True)
        class C(more.More):
            mode: parts.Mode = option("a", "a mode")
            file: typing.Any = option(more.START, "a file")
        class P(Extension[C]): pass
    """,
    "no options": """
        class P(Extension): pass
    """,
    "under a condition": """
        try:
            @dataclass(kw_only=True)
            class C:
                a: int = option(1, "one")
        except ImportError:
            raise
        if True:
            class P(Extension[C]): pass
    """,
}
PARTS = HEAD + dedent("""
    from .more import More
    Mode = Literal["a", "b"]

    @dataclass(kw_only=True)
    class Settings(More):
        a: int = option(1, "one")

    class Base(Extension[Settings]): pass
""")
PROVIDER = "\n@hookimpl\ndef rollstock_extension():\n    return P\n"


@pytest.mark.parametrize("source", WAYS.values(), ids=WAYS)
def test_each_way_to_write_options_is_read_as_python_understands_it(site, source: str) -> None:
    site.install("acme-rl", {"extension:mine": "acme_mine"}, {"acme_mine": HEAD + dedent(source) + PROVIDER})
    site.write("acme_parts.options", PARTS)
    site.write(
        "acme_parts.more", HEAD + "@dataclass(kw_only=True)\nclass More:\n    b: int = option(2, 'two')\nSTART = 'x'\n"
    )
    manager = make_manager()
    entry = manager.catalogue["extension:mine"]
    described = describe_statically(entry)
    assert "acme_mine" not in sys.modules
    assert described == describe_options(manager.load("extension", "mine").config_class())


def test_a_provider_may_import_its_class_itself(site) -> None:
    site.install("acme-rl", {"extension:mine": "acme_pkg"})
    site.write(
        "acme_pkg.__init__",
        HEAD
        + dedent(
            """
        @hookimpl
        def rollstock_extension():
            from .inner import P
            return P
        """
        ),
    )
    site.write("acme_pkg.inner", HEAD + dedent(WAYS["nested"]))
    described = describe_statically(discover()["extension:mine"])
    assert described is not None
    assert [option.name for option in described] == ["inner.rank", "inner.scale"]


def test_a_default_that_is_computed_is_shown_as_it_is_written(site) -> None:
    source = """
        @dataclass(kw_only=True)
        class C:
            seconds: int = option(60 * MINUTES, "how long")
        class P(Extension[C]): pass
    """
    site.install("acme-rl", {"extension:mine": "acme_mine"}, {"acme_mine": HEAD + dedent(source) + PROVIDER})
    described = describe_statically(discover()["extension:mine"])
    assert described is not None
    assert described[0].default == Source("60 * MINUTES")
    assert repr(described[0].default) == "60 * MINUTES"


@pytest.mark.parametrize(
    "source",
    ["", "def (", "def rollstock_extension():\n    return make()", "rollstock_extension = other", "from gone import *"],
)
def test_what_the_source_does_not_tell_is_none(site, source: str) -> None:
    site.install("acme-rl", {"extension:mine": "acme_mine"}, {"acme_mine": source})
    assert describe_statically(discover()["extension:mine"]) is None


def test_names_that_go_in_a_circle_are_given_up(site) -> None:
    site.install("acme-rl", {"extension:mine": "acme_a"})
    site.write("acme_a", "from acme_b import rollstock_extension")
    site.write("acme_b", "from acme_a import rollstock_extension")
    assert describe_statically(discover()["extension:mine"]) is None


def test_the_docstring_is_the_modules(site, tracker_source: str) -> None:
    site.install("acme-rl", {"tracker:notes": "acme_notes"}, {"acme_notes": tracker_source})
    assert docstring(discover()["tracker:notes"]) == "A tracker for tests.\n\nIt keeps what it was told."


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("import deep_charts.lines", ["acme-rl[charts]"]),
        ("def f():\n    from deep_charts import lines", ["acme-rl[charts]"]),
        ("def f():\n    return import_optional('deep_charts', needed_by='x')", ["acme-rl[charts]"]),
        ("import json", []),
        ("# deep_charts", []),
    ],
)
def test_missing_extras_are_told_from_the_imports(site, line: str, missing: list[str]) -> None:
    site.install(
        "acme-rl",
        {"tracker:notes": "acme_notes"},
        {"acme_notes": line},
        extras=["charts"],
        requires=['deep-charts; extra == "charts"'],
    )
    assert missing_extras(discover()["tracker:notes"]) == missing


def test_an_extra_that_is_installed_is_not_missing(site) -> None:
    requires = ['deep-charts; extra == "charts"']
    site.install(
        "acme-rl",
        {"tracker:notes": "acme_notes"},
        {"acme_notes": "import deep_charts"},
        extras=["charts"],
        requires=requires,
    )
    site.write("deep_charts", "raise SystemExit")
    assert missing_extras(discover()["tracker:notes"]) == []
