"""Comparing responses with answers."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstock.plugins.answers import MatchOptions, has_words, normalised, numbers_in, whole_number

DEMO = {"exact": 1.0, "inside": 0.3, "wrong": 0.1}


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", []),
        ("7", [7]),
        ("The answer is 42.", [42]),
        ("3+4=7", [3, 4, 7]),
        ("3-4=-1", [3, 4, -1]),
        ("5 - 3", [5, 3]),
        ("(2)-1", [2, 1]),
        ("x = -2.5, y = .5", [Fraction(-5, 2), Fraction(1, 2)]),
        ("\u22123", [-3]),
        ("1,234,567 and 1,2", [1234567, 1, 2]),
        ("12,3456", [12, 3456]),
        ("$5 or 10%", [5, 10]),
        ("H2O at v2", []),
        ("1e3 2E-2", [1000, Fraction(1, 50)]),
        ("\\boxed{8}", [8]),
        ("1.5.", [Fraction(3, 2)]),
        ("2nd", [2]),
        ("3/4", [3, 4]),
    ],
)
def test_numbers_in_texts(text, numbers):
    assert numbers_in(text) == numbers


def test_fractions_are_numbers_where_the_answer_is_one():
    assert numbers_in("3/4 or 1/0", fractions=True) == [Fraction(3, 4)]
    assert whole_number(" 3/4 ", fractions=True) == Fraction(3, 4)
    assert whole_number("3/4") is None


@given(st.integers(-(10**12), 10**12))
def test_a_number_is_found_however_it_is_written(number):
    for text in (f"{number}", f"{number:,}", f"{number}.0", f"so: {number}!"):
        assert numbers_in(text) == [number]


@pytest.mark.parametrize("text", ["1e999999999", "9" * 10_000, "-" * 1000 + "1", "1," * 5000])
def test_no_text_is_too_much(text):
    assert all(abs(number) < 10**1000 for number in numbers_in(text))


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("7", 1.0),
        (" 7\n", 1.0),
        ("7.0", 1.0),
        ("07", 1.0),
        ("$7", 1.0),
        ("The answer is 7.", 0.3),
        ("3 + 4 = 7", 0.3),
        ("8", 0.1),
        ("-7", 0.1),
        ("8 or so", 0.0),
        ("7, or rather 8", 0.0),
        ("seven", 0.0),
        ("", 0.0),
    ],
)
def test_shaping_of_numbers(response, value):
    assert MatchOptions(**DEMO).value("number", response, 7) == value
    assert MatchOptions(**DEMO).value("number", response, "7") == value


@pytest.mark.parametrize(("which", "value"), [("last", 0.0), ("first", 0.3), ("any", 0.3)])
def test_which_of_several_numbers_counts(which, value):
    assert MatchOptions(**DEMO, which=which).value("number", "7 is less than 9", 7) == value


def test_numbers_within_a_tolerance():
    options = MatchOptions(tolerance=0.01)
    assert options.value("number", "3.14", 3.14159) == 1.0
    assert options.value("number", "3.1", 3.14159) == 0.0


def test_fractions_equal_decimals():
    assert MatchOptions().value("number", "0.75", "3/4") == 1.0
    assert MatchOptions().value("number", "6/8", "3/4") == 1.0


@pytest.mark.parametrize("answer", ["seven", "", True, None, [1, 2, {}], {}])
def test_an_answer_that_is_no_number_is_an_error(answer):
    with pytest.raises(ValueError, match="is not a number"):
        MatchOptions().value("number", "7", answer)


@pytest.mark.parametrize(
    ("steps", "response", "value"),
    [
        ([], "Paris ", 0.0),
        (["space"], " Paris\n", 1.0),
        (["space"], "paris", 0.0),
        (["space", "case"], "PARIS", 1.0),
        (["space", "case", "punctuation"], "Paris!", 1.0),
        (["space", "case", "punctuation", "articles"], "The Paris.", 1.0),
        (["space"], "\uff30aris", 1.0),
    ],
)
def test_normalisation_of_texts(steps, response, value):
    assert MatchOptions(normalise=steps).value("exact", response, "Paris") == value


def test_contains_looks_for_whole_words():
    options = MatchOptions(inside=0.5, normalise=["space", "case"])
    assert options.value("contains", "It is Paris, of course.", "paris") == 0.5
    assert options.value("contains", "paris", "Paris") == 1.0
    assert options.value("contains", "Parisian", "paris") == 0.0
    assert has_words("C++ is it", "C++")
    assert normalised("  a  b ", ["space"]) == "a b"


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("B", 1.0),
        ("(b)", 1.0),
        ("**B.**", 1.0),
        ("The answer is B", 0.3),
        ("A seems right, but it is B", 0.3),
        ("B seems right, but it is C", 0.0),
        ("C", 0.1),
        ("a bee", 0.0),
        ("Because", 0.0),
    ],
)
def test_multiple_choice(response, value):
    assert MatchOptions(**DEMO).value("choice", response, "B") == value


def test_choices_of_several_letters_and_words():
    options = MatchOptions(choices=["yes", "no", "not sure"])
    assert options.value("choice", "I am not sure", "not sure") == 1.0
    with pytest.raises(ValueError, match="'maybe' is not among the choices yes, no, not sure"):
        options.value("choice", "yes", "maybe")


def test_the_best_of_several_right_answers_counts():
    options = MatchOptions(**DEMO)
    assert options.value("number", "8", [7, 8]) == 1.0
    assert options.value("exact", "blue", ["red", "blue"]) == 1.0
    with pytest.raises(ValueError, match="empty list"):
        options.value("exact", "blue", [])


@pytest.mark.parametrize(
    ("pattern", "response", "value"),
    [
        (r"####\s*(.*)", "thinking\n#### 7", 1.0),
        (r"####\s*(.*)", "#### 8\n#### 7", 1.0),
        (r"####\s*(.*)", "7", 0.0),
        (r"(?s)<answer>(.*?)</answer>", "<answer>\n7\n</answer> 9", 1.0),
        (r"\d+$", "5 + 2 = 7", 1.0),
    ],
)
def test_extraction_of_the_part_to_compare(pattern, response, value):
    assert MatchOptions(extract=pattern, inside=0.3).value("number", response, 7) == value


def test_a_bad_expression_is_refused():
    with pytest.raises(ValueError, match=r"extract: '\(' is not a regular expression"):
        MatchOptions(extract="(")


@pytest.mark.parametrize("answer", [None, True, {"a": 1}])
def test_an_answer_that_is_no_text_is_an_error(answer):
    with pytest.raises(TypeError, match="neither a text nor a number"):
        MatchOptions().value("exact", "x", answer)
