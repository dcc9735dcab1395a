"""Comparing a response with the right answer: texts, numbers inside texts, multiple choice.

For the environments and rewards of this folder, which share the options in `MatchOptions`. It needs nothing but the
standard library, so that reward processes start fast.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, TypeAlias

from rollstock import option

Normalisation: TypeAlias = Literal["space", "case", "punctuation", "articles"]
Which: TypeAlias = Literal["last", "first", "any"]
MatchKind: TypeAlias = Literal["exact", "number", "contains", "choice"]

# A sign belongs to a number unless it stands after one ("3-4" is 3 and 4). Digits inside a word ("H2O") are none, and
# exponents have at most 3 digits, so that no response can ask for a number that does not fit into memory.
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.])(?:(?<![)\]])[-+\u2212])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)
_FRACTION = re.compile(rf"{_NUMBER.pattern}(?:/[0-9]+)?")


@dataclass(kw_only=True)
class MatchOptions:
    """How a response is compared with an answer, and what it is worth. Options of whatever plugin inherits them."""

    extract: str | None = option(
        None,
        "regular expression whose last match (its first group, if it has one) is the part of a response to compare",
    )
    normalise: list[Normalisation] = option(
        ["space"], "differences that do not matter between texts: space, case, punctuation, articles (a, an, the)"
    )
    tolerance: float = option(0.0, "how far a number may be from the right one", minimum=0, maximum=1e9)
    which: Which = option("last", "the number or choice that counts, where a text has several")
    choices: list[str] = option(["A", "B", "C", "D"], "what a multiple-choice answer can be")
    exact: float = option(
        1.0, "value of a response that is the right answer and nothing else", minimum=-1e9, maximum=1e9
    )
    inside: float = option(
        1.0, "value of the right answer inside other text (not for match by `exact`)", minimum=-1e9, maximum=1e9
    )
    wrong: float = option(0.0, "value of a bare number or choice that is wrong", minimum=-1e9, maximum=1e9)
    otherwise: float = option(
        0.0, "value of any other response, and of one in which `extract` finds nothing", minimum=-1e9, maximum=1e9
    )

    def __post_init__(self) -> None:
        if self.extract is not None:
            compiled("extract", self.extract)

    def value(self, kind: MatchKind, response: str, answer: Any) -> float:
        """What `response` is worth; of several right answers (a list) the best counts.

        Raises TypeError or ValueError if the answer is of a sort that cannot be compared in this way.
        """
        text = self.extracted(response)
        if text is None:
            return self.otherwise
        answers = answer if isinstance(answer, list | tuple) else [answer]
        if not answers:
            raise ValueError("the task has an empty list of right answers")
        return max(self._value(kind, text, right) for right in answers)

    def extracted(self, response: str) -> str | None:
        """The part of a response that is compared; None if there is none."""
        return response if self.extract is None else last_match(compiled("extract", self.extract), response)

    def _value(self, kind: MatchKind, text: str, answer: object) -> float:
        match kind:
            case "number":
                return self.number_value(text, answer)
            case "choice":
                return self._choice_value(text, as_text(answer))
            case _:
                said, right = normalised(text, self.normalise), normalised(as_text(answer), self.normalise)
                if said == right:
                    return self.exact
                return self.inside if kind == "contains" and right and has_words(said, right) else self.otherwise

    def number_value(self, text: str, answer: object) -> float:
        """What a text is worth where the answer is a number. Raises ValueError if it is none."""
        right = as_number(answer)
        fractions = isinstance(answer, str) and "/" in answer

        def good(number: Fraction) -> bool:
            return abs(number - right) <= Fraction(self.tolerance)

        bare = whole_number(text, fractions)
        if bare is not None:
            return self.exact if good(bare) else self.wrong
        found = picked(numbers_in(text, fractions), self.which)
        return self.inside if any(good(number) for number in found) else self.otherwise

    def _choice_value(self, text: str, answer: str) -> float:
        if normalised(answer, ["case", "space"]) not in {normalised(c, ["case", "space"]) for c in self.choices}:
            raise ValueError(f"the right answer {answer!r} is not among the choices {', '.join(self.choices)}")
        words = "|".join(re.escape(choice) for choice in sorted(self.choices, key=len, reverse=True))
        # Alone, with the usual ornaments, a choice may be in either case; inside text "a" is an article.
        bare = re.fullmatch(rf"[\s(\[*\"']*({words})[\s)\].:*\"']*", text, re.IGNORECASE)
        if bare is not None:
            return self.exact if bare[1].casefold() == answer.casefold() else self.wrong
        found = picked(re.findall(rf"(?<!\w)({words})(?!\w)", text), self.which)
        return self.inside if any(choice.casefold() == answer.casefold() for choice in found) else self.otherwise


def compiled(name: str, pattern: str) -> re.Pattern[str]:
    """The regular expression of option `name`; ValueError says what is wrong with it."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{name}: {pattern!r} is not a regular expression: {error}") from error


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """The last match in a text: its first group if the pattern has one, else all of it. None without a match."""
    matches = list(pattern.finditer(text))
    return str(matches[-1][1 if pattern.groups else 0] or "") if matches else None


def normalised(text: str, steps: Sequence[Normalisation]) -> str:
    """A text without the differences that do not matter; letters that look alike by Unicode's rules become the same."""
    text = unicodedata.normalize("NFKC", text)
    if "case" in steps:
        text = text.casefold()
    if "punctuation" in steps:
        text = "".join(" " if unicodedata.category(c).startswith("P") else c for c in text)
    if "articles" in steps:
        text = re.sub(r"\b(a|an|the)\b", " ", text, flags=re.IGNORECASE)
    return " ".join(text.split()) if "space" in steps else text


def has_words(text: str, words: str) -> bool:
    """Whether `words` stand in a text, not as a part of longer words."""
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None


def numbers_in(text: str, fractions: bool = False) -> list[Fraction]:
    """All numbers of a text, in order; `fractions` reads 3/4 as one of them, otherwise as two."""
    found = (parsed(match[0]) for match in (_FRACTION if fractions else _NUMBER).finditer(text))
    return [number for number in found if number is not None]


def whole_number(text: str, fractions: bool = False) -> Fraction | None:
    """The number that a text is, but for space and signs of money or per cent around it; None if it is more, or
    none."""
    match = (_FRACTION if fractions else _NUMBER).fullmatch(text.strip(" \t\r\n$\u20ac\u00a3%"))
    return None if match is None else parsed(match[0])


def parsed(text: str) -> Fraction | None:
    """The value of a number as it is written; None where it has none (1/0, thousands of digits)."""
    try:
        return Fraction(text.replace(",", "").replace("\u2212", "-"))
    except (ValueError, ZeroDivisionError):
        return None


def as_number(answer: object) -> Fraction:
    """The right answer as a number. Raises ValueError if it is none."""
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return Fraction(str(answer))
    number = whole_number(answer, fractions=True) if isinstance(answer, str) else None
    if number is None:
        raise ValueError(f"the right answer {answer!r} is not a number")
    return number


def as_text(answer: object) -> str:
    """The right answer as a text. Raises TypeError for what is neither text nor number."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise TypeError(f"the right answer {answer!r} is neither a text nor a number")
    return str(answer)


def picked(found: Sequence[Any], which: Which) -> Sequence[Any]:
    """Those of the things found that count."""
    return {"last": found[-1:], "first": found[:1], "any": found}[which]
