import sys

import pytest

from rollstock.sources import constant, find_module, parse, read_source, summary


@pytest.mark.parametrize("package", ["plain_pkg", "name_space"])
def test_modules_are_found_without_importing_what_is_around_them(site, package: str) -> None:
    if package == "plain_pkg":
        site.write("plain_pkg.__init__", "raise SystemExit")
        site.write("plain_pkg.inner.__init__", "raise SystemExit")
    path = site.write(f"{package}.inner.module", "")
    assert find_module(f"{package}.inner.module") == path
    assert package not in sys.modules


def test_a_package_is_found_by_its_init(site) -> None:
    path = site.write("some_pkg.__init__", "")
    assert find_module("some_pkg") == path


@pytest.mark.parametrize("module", ["no_such_module", "json.no_such_module", "json.decoder.deeper", "sys"])
def test_what_has_no_source_is_not_found(module: str) -> None:
    assert find_module(module) is None
    assert (read_source(module), parse(module), summary(module)) == (None, None, "")


def test_modules_of_an_editable_install_are_found() -> None:
    path = find_module("rollstock.algorithms.grpo")
    assert path is not None
    assert path.name == "grpo.py"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""One line."""', "One line"),
        ("'''One line.\n\nMore.'''", "One line"),
        ('#!/usr/bin/env python\n# A comment.\n\n"""\nStarts below.\n"""', "Starts below"),
        ('r"""Raw \\d."""', "Raw \\d"),
        ('"Single quotes."', "Single quotes"),
        ("x = 1", ""),
        ("", ""),
        ('"""Ünïcode → fine."""', "Ünïcode → fine"),
    ],
)
def test_the_summary_is_the_docstrings_first_line(site, source: str, expected: str) -> None:
    site.write("described", source)
    assert summary("described") == expected


def test_a_module_with_a_syntax_error_has_no_tree(site) -> None:
    site.write("broken_syntax", "def")
    assert parse("broken_syntax") is None


@pytest.mark.parametrize(
    ("line", "value"),
    [("API = 2", 2), ("API: int = 3", 3), ("API = make()", None), ("OTHER = 1", None), ("a = API = 4", 4)],
)
def test_constants_are_read_without_running_the_module(site, line: str, value: object) -> None:
    site.write("constants", f"{line}\nraise SystemExit")
    assert constant("constants", "API") == value
