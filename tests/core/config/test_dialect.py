import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rollstock.config.dialect import dump, parse_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E6", 1e6),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("1_000", 1000),
        ("0x1F", 31),
        ("true", True),
        ("False", False),
        ("off", "off"),
        ("yes", "yes"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("010", "010"),
        ("null", None),
        ("~", None),
        ("none", "none"),
        ("e5", "e5"),
        (".inf", math.inf),
        ("'1'", "1"),
        ("[console, {name: x}]", ["console", {"name": "x"}]),
    ],
)
def test_plain_values_are_what_they_look_like(text: str, value: object) -> None:
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text", ["!!python/object/apply:os.system ['true']", "!!python/name:os.system", "[1", "a: b: c"]
)
def test_tags_that_run_code_and_broken_values_are_refused(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        parse_value(text)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | TEXTS
    | st.sampled_from(["on", "1e5", "1:30", "=", "<<"])
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8
)


@given(VALUES)
def test_what_is_written_is_read_back_as_it_was(value: object) -> None:
    found = parse_value(dump(value))
    assert found == value
    assert repr(found) == repr(value)


@given(TEXTS | st.sampled_from(["on", "no", "1:30", "2024-01-01", "1e5", "0o7", "="]))
def test_texts_are_texts_for_other_readers_of_yaml_too(text: str) -> None:
    assert yaml.safe_load(dump({"key": text})) == {"key": text}


def test_nothing_is_written_as_an_alias() -> None:
    shared = [1, 2]
    assert "&" not in dump({"a": shared, "b": shared})
