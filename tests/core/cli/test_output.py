import sys

import pytest

from rollstock.cli.output import Output


def test_columns_are_aligned_where_nobody_watches(capsys) -> None:
    Output().table(("A", "LONG"), [("one", "x"), ("fourteen", "y")], title="Things")
    assert capsys.readouterr().out == "Things\nA         LONG\none       x\nfourteen  y\n"


def test_on_a_terminal_rich_draws_the_table_and_marks_up_nothing(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    output = Output()
    output.table(("A", "B"), [("one", "[red]not markup[/red]")])
    assert "[red]not markup[/red]" in capsys.readouterr().out


@pytest.mark.parametrize("terminal", [True, False])
def test_json_is_json_on_a_terminal_too(capsys, monkeypatch, terminal: bool) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    output = Output(as_json=True)
    output.table(("A",), [("one",)])
    output.line("a line")
    output.json({"path": sys})
    assert capsys.readouterr().out.startswith('{\n  "path": "<module')


def test_errors_have_colour_only_on_a_terminal(capsys, monkeypatch) -> None:
    Output().error("no", "X", notes=["because"])
    assert capsys.readouterr().err == "error: no\n  because\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    Output().error("no", "X")
    assert capsys.readouterr().err == "\033[1;31merror:\033[0m no\n"
