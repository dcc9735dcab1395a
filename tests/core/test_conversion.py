from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from rollstock.conversion import OptionError, build_config, to_plain
from rollstock.errors import PluginError
from rollstock.options import REQUIRED, option
from rollstock.section import Section


@dataclass(kw_only=True)
class Adapter:
    rank: int = option(0, "rank of the adapters", minimum=0)

    def __post_init__(self) -> None:
        if self.rank == 13:
            raise ValueError("13 brings bad luck")


@dataclass(kw_only=True)
class Everything:
    flag: bool = option(False, "a flag")
    count: int = option(1, "a count", minimum=1, maximum=10)
    rate: float = option(0.5, "a rate", minimum=0, maximum=1)
    text: str = option("", "a text")
    file: Path = option(Path("x"), "a file")
    mode: Literal["slow", "fast", 3] = option("slow", "a mode")
    maybe: int | None = option(None, "perhaps a number")
    either: int | str | list[float] = option(0, "one of several")
    items: list[int] = option([], "numbers", maximum=9)
    pair: tuple[int, str] = option((1, "a"), "two things")
    many: tuple[float, ...] = option((), "floats")
    unique: frozenset[str] = option(frozenset(), "a set")
    table: dict[str, float] = option({}, "by name")
    chosen: str = option("a", "a choice", choices=["a", "b"])
    adapter: Adapter = option(Adapter(), "adapters")
    adapters: list[Adapter] = option([], "several adapters")
    anything: Any = option(None, "whatever")
    marked: Annotated[int, "note"] = option(0, "annotated")
    series: Sequence[int] = option([], "a sequence")


def build(**values: Any) -> Everything:
    return build_config(Everything, values, place="reward", owner="plugin reward:all")


@pytest.mark.parametrize(
    ("values", "name", "expected"),
    [
        ({"rate": 1}, "rate", 1.0),
        ({"rate": "1e-5"}, "rate", 1e-5),
        ({"count": 1e1}, "count", 10),
        ({"flag": True}, "flag", True),
        ({"file": "a/b"}, "file", Path("a/b")),
        ({"mode": 3}, "mode", 3),
        ({"maybe": None}, "maybe", None),
        ({"maybe": 2}, "maybe", 2),
        ({"either": "a"}, "either", "a"),
        ({"either": 2}, "either", 2),
        ({"either": [1]}, "either", [1.0]),
        ({"items": (1, 2)}, "items", [1, 2]),
        ({"pair": [2, "b"]}, "pair", (2, "b")),
        ({"many": [1, "2.5"]}, "many", (1.0, 2.5)),
        ({"unique": ["a", "a"]}, "unique", frozenset("a")),
        ({"table": {"x": 1}}, "table", {"x": 1.0}),
        ({"adapter": {"rank": 4}}, "adapter", Adapter(rank=4)),
        ({"adapters": [{"rank": 4}, {}]}, "adapters", [Adapter(rank=4), Adapter(rank=0)]),
        ({"anything": {"a": [1]}}, "anything", {"a": [1]}),
        ({"marked": 2}, "marked", 2),
        ({"series": [1]}, "series", [1]),
    ],
)
def test_values_that_fit_are_converted(values: dict[str, Any], name: str, expected: Any) -> None:
    found = getattr(build(**values), name)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"flag": 1}, "reward.flag must be true or false, not 1"),
        ({"count": True}, "reward.count must be a whole number (int), not True (bool)"),
        ({"count": 1.5}, "reward.count must be a whole number (int), not 1.5"),
        ({"count": "3"}, "reward.count must be a whole number (int), not '3' (str)"),
        ({"count": 0}, "reward.count must be at least 1, not 0"),
        ({"count": 11}, "reward.count must be at most 10, not 11"),
        ({"rate": float("nan")}, "reward.rate must be a finite number (float), not nan"),
        ({"rate": float("inf")}, "reward.rate must be a finite number (float), not inf"),
        ({"rate": "1e400"}, "reward.rate must be a finite number (float), not '1e400' (str)"),
        ({"rate": 10**400}, "reward.rate must be a finite number (float), not 1000000"),
        ({"maybe": 1e30}, "reward.maybe must be a whole number that 64 bits can hold, not 1e+30"),
        ({"maybe": -(2**63) - 1}, "reward.maybe must be a whole number that 64 bits can hold, not -92233720368"),
        ({"maybe": float("inf")}, "reward.maybe must be a whole number (int), not inf"),
        ({"rate": True}, "reward.rate must be a number (float), not True (bool)"),
        ({"rate": "fast"}, "reward.rate must be a number (float), not 'fast' (str)"),
        ({"text": 3}, "reward.text must be a text (str), not 3: put it in quotes, '3'"),
        ({"text": None}, "reward.text must be a text (str), not none"),
        ({"mode": "fats"}, "reward.mode must be one of 'slow', 'fast', 3, not 'fats' (str). Did you mean 'fast'?"),
        ({"maybe": "x"}, "reward.maybe must be a whole number (int), not 'x' (str)"),
        ({"either": True}, "reward.either must be int | str | list[float], not True (bool)"),
        ({"either": [1, "x"]}, "reward.either.1 must be a number (float), not 'x' (str)"),
        ({"items": 3}, "reward.items must be a list, not 3: write [3]"),
        ({"items": [1, 10]}, "reward.items.1 must be at most 9, not 10"),
        ({"pair": [1]}, "reward.pair must have 2 items, not 1"),
        ({"table": [1]}, "reward.table must be a mapping, not [1] (list)"),
        ({"table": {"x": "y"}}, "reward.table.x must be a number (float), not 'y' (str)"),
        ({"chosen": "c"}, "reward.chosen must be one of 'a', 'b', not 'c' (str)"),
        ({"adapter": {"rnak": 1}}, "reward.adapter.rnak is not an option of plugin reward:all. Did you mean 'rank'?"),
        ({"adapter": {"rank": 13}}, "reward.adapter is not valid: 13 brings bad luck"),
        ({"adapters": [{}, {"rank": -1}]}, "reward.adapters.1.rank must be at least 0, not -1"),
        ({"cuont": 3}, "reward.cuont is not an option of plugin reward:all. Did you mean 'count'? Known: count, "),
    ],
)
def test_what_does_not_fit_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        build(**values)
    assert str(caught.value).startswith(message)


def test_the_error_says_whose_option_it_is_and_what_it_does() -> None:
    with pytest.raises(OptionError, match=r"\(plugin reward:all; a count\)$") as caught:
        build(count=0)
    assert caught.value.path == "reward.count"


def test_the_error_names_the_file_and_line_that_a_section_remembers() -> None:
    section = Section({"count": 0}, place="rewards.2", origins={"": "a.yaml:3", "count": "a.yaml:5"})
    with pytest.raises(OptionError, match=r"^a\.yaml:5: rewards\.2\.count must be at least 1"):
        build_config(Everything, section, place=section.place)


def test_a_value_without_a_line_of_its_own_has_the_line_of_what_is_around_it() -> None:
    section = Section({"adapter": {"rank": -1}}, place="reward", origins={"adapter": "a.yaml:7"})
    with pytest.raises(OptionError, match=r"^a\.yaml:7: reward\.adapter\.rank"):
        build_config(Everything, section, place="reward")


def test_a_required_option_that_is_missing_is_named_with_its_help() -> None:
    @dataclass(kw_only=True)
    class Needs:
        path: str = option(REQUIRED, "the file to read")

    with pytest.raises(OptionError, match=r"environment\.path is required: it is str.*the file to read"):
        build_config(Needs, {}, place="environment")


def test_a_type_that_no_option_may_have_is_the_plugins_mistake() -> None:
    @dataclass(kw_only=True)
    class Odd:
        thing: complex = option(1j, "odd")

    with pytest.raises(PluginError, match="complex"):
        build_config(Odd, {"thing": 1})


def test_plain_data_of_a_config_builds_the_same_config() -> None:
    config = build(pair=[2, "b"], unique=["b", "a"], adapters=[{"rank": 1}], file="a/b", table={"x": 1})
    plain = to_plain(config)
    assert plain["file"] == "a/b"
    assert plain["unique"] == ["a", "b"]
    assert build(**plain) == config
