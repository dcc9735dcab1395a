from dataclasses import dataclass
from typing import Any, Literal

import pytest

from rollstock.errors import PluginError
from rollstock.options import REQUIRED, Option, describe_options, option, type_name


@dataclass(kw_only=True)
class Inner:
    rank: int = option(0, "its rank", minimum=0)


@dataclass(kw_only=True)
class Outer:
    path: str = option(REQUIRED, "the file")
    mode: Literal["a", "b"] = option("a", "how")
    names: list[str] = option([], "who", choices=["x", "y"])
    inner: Inner = option(Inner(rank=3), "more")
    rate: float | None = option(None, "how fast", maximum=1)


def test_options_are_described_in_order_with_nested_ones_under_dotted_names() -> None:
    assert describe_options(Outer) == [
        Option(name="path", type="str", default=REQUIRED, help="the file"),
        Option(name="mode", type="'a' | 'b'", default="a", help="how"),
        Option(name="names", type="list[str]", default=[], help="who", choices=("x", "y")),
        Option(name="inner.rank", type="int", default=3, help="its rank", minimum=0),
        Option(name="rate", type="float | none", default=None, help="how fast", maximum=1),
    ]


def test_an_option_without_a_default_is_required() -> None:
    assert [found.required for found in describe_options(Outer)] == [True, False, False, False, False]
    with pytest.raises(TypeError, match="path"):
        Outer()


def test_mutable_defaults_are_copied_for_each_config() -> None:
    first, second = Outer(path=""), Outer(path="")
    first.names.append("x")
    first.inner.rank = 9
    assert (second.names, second.inner.rank) == ([], 3)


@pytest.mark.parametrize("help", ["", "  ", None])
def test_an_option_needs_a_help_text(help: Any) -> None:
    with pytest.raises(TypeError, match="help text"):
        option(1, help)


def test_a_class_that_is_no_dataclass_is_refused() -> None:
    with pytest.raises(PluginError, match="@dataclass"):
        describe_options(dict)


def test_an_annotation_that_does_not_exist_is_refused_with_the_advice() -> None:
    @dataclass(kw_only=True)
    class Broken:
        where: "Nowhere" = option(None, "x")  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(PluginError, match=r"Nowhere.*TYPE_CHECKING"):
        describe_options(Broken)


@pytest.mark.parametrize(
    ("hint", "name"),
    [
        (int, "int"),
        (None, "none"),
        (Any, "any"),
        (list[int | None], "list[int | none]"),
        (tuple[float, ...], "tuple[float, ...]"),
        (dict[str, Any], "dict[str, any]"),
    ],
)
def test_types_are_named_as_people_write_them(hint: Any, name: str) -> None:
    assert type_name(hint) == name


@pytest.mark.parametrize(
    ("default", "shown"),
    [(REQUIRED, "required"), (None, "none"), (True, "true"), (0.5, "0.5"), ("a", "'a'"), ([], "[]")],
)
def test_a_default_is_shown_as_a_config_spells_it(default: Any, shown: str) -> None:
    assert Option(name="x", type="any", default=default, help="x").shown_default == shown
