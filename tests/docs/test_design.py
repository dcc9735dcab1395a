"""What the page on design says of hooks, roles and tests is so."""

import ast
import re
from pathlib import Path

import pytest

from rollstock import hookspecs
from rollstock.columns import SOURCES
from rollstock.kinds import KINDS

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "explanation" / "design.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\d+) \|(.*)\|(.*)\|$", PAGE, flags=re.M)
TESTS = [name for _, _, cell in ROWS for name in re.findall(r"`(tests/\S+)`", cell)]


def test_every_invariant_has_a_promise_and_a_test() -> None:
    assert [int(number) for number, _, _ in ROWS] == list(range(1, 13))
    assert all(promise.strip() and "`tests/" in cell for _, promise, cell in ROWS)


@pytest.mark.parametrize("test", TESTS)
def test_a_test_that_is_named_exists(test: str) -> None:
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_hook_of_a_run_is_in_the_diagram_or_explained() -> None:
    providers = {kind.provider for kind in KINDS.values()}
    hooks = {name for name in vars(hookspecs) if name.startswith("rollstock_")} - providers
    assert hooks == set(re.findall(r"\brollstock_\w+", PAGE)) - providers


def test_the_diagram_shows_the_hooks_of_a_step_in_firing_order() -> None:
    step = PAGE.partition("subgraph step")[2].partition("    end\n")[0]
    shown = list(dict.fromkeys(re.findall(r"rollstock_\w+", step)))
    assert shown == [name for name in vars(hookspecs) if name in shown]
    assert len(shown) == 11


def test_every_role_and_the_columns_that_it_provides_are_listed() -> None:
    table = PAGE.partition("## Roles")[2].partition("##")[0]
    for column, source in SOURCES.items():
        row = next(line for line in table.splitlines() if line.startswith(f"| {source.role} |"))
        assert f"`{column}`" in row
