import json
import sys

import pytest

from rollstock.cli import main


@pytest.fixture
def acme(site, tracker_source):
    site.install(
        "acme-rl",
        {"tracker:notes": "acme_notes", "tracker:charts": "acme_charts", "extension:bad": "acme_bad"},
        {
            "acme_notes": tracker_source,
            "acme_charts": '"""Charts."""\nimport deep_charts',
            "acme_bad": '"""Bad."""\n1 / 0',
        },
        version="2.5",
        extras=["charts"],
        requires=['deep-charts; extra == "charts"'],
    )
    return site


def test_the_list_says_what_each_plugin_is_and_where_it_came_from(acme, capsys) -> None:
    assert main(["plugins"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["tracker:notes"].split(None, 3)[1:] == ["acme-rl", "2.5", "A tracker for tests"]
    assert lines["tracker:charts"].endswith("(needs: pip install 'acme-rl[charts]') Charts")
    assert "algorithm:grpo" in lines


def test_the_list_of_a_kind_has_only_that_kind(acme, capsys) -> None:
    assert main(["plugins", "tracker", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["plugins"]
    assert {plugin["kind"] for plugin in listed} == {"tracker"}
    assert [plugin["name"] for plugin in listed] == sorted(plugin["name"] for plugin in listed)
    charts = next(plugin for plugin in listed if plugin["name"] == "charts")
    assert charts == {
        "kind": "tracker",
        "name": "charts",
        "module": "acme_charts",
        "distribution": "acme-rl",
        "version": "2.5",
        "summary": "Charts",
        "missing": ["acme-rl[charts]"],
        "blocked_by": None,
        "api": None,
    }


def test_a_plugin_for_another_api_is_listed_and_shown_as_such(site, capsys) -> None:
    site.install("old-rl", {"tracker:old": "old"}, {"old": '"""Old."""\nROLLSTOCK_PLUGIN_API = 0\n1 / 0\n'})
    assert main(["plugins", "tracker"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["tracker:old"].endswith("(written for plugin API 0, and this is 1) Old")
    assert main(["plugins", "show", "tracker:old"]) == 0
    assert "(written for plugin API 0, and this is 1) Old\n" in capsys.readouterr().out
    assert main(["plugins", "show", "tracker:old", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["api"] == 0


def test_a_kind_without_plugins_says_so(capsys, monkeypatch) -> None:
    monkeypatch.setattr("importlib.metadata.distributions", list)
    assert main(["plugins", "transport"]) == 0
    assert "No plugin of the kind transport is installed." in capsys.readouterr().out


def test_blocked_plugins_conflicts_and_strays_are_listed(acme, capsys, monkeypatch) -> None:
    monkeypatch.setenv("ROLLSTOCK_BLOCK_PLUGINS", "notes")
    acme.install("other-rl", {"tracker:charts": "other", "trackr:x": "other"})
    assert main(["plugins", "tracker"]) == 0
    shown = capsys.readouterr().out
    assert "(blocked by the environment variable ROLLSTOCK_BLOCK_PLUGINS) A tracker for tests" in shown
    assert "CONFLICT: the plugin name tracker:charts is claimed twice" in shown
    assert "NOT A PLUGIN: other-rl 1.0 has 'x' in the entry-point group 'rollstock.trackr'" in shown


def test_show_describes_a_plugin_without_importing_it(acme, capsys) -> None:
    assert main(["plugins", "show", "notes"]) == 0
    assert capsys.readouterr().out == (
        "tracker:notes  (acme-rl 2.5, module acme_notes)\n"
        "\n"
        "A tracker for tests.\n\nIt keeps what it was told.\n"
        "\n"
        "Options:\n"
        "  every: int = 1\n"
        "      steps between notes (at least 1)\n"
        "  title: str = 'notes'\n"
        "      what stands above them\n"
        "\n"
        "In a config:\n"
        "  trackers: [{name: notes}]\n"
    )
    assert "acme_notes" not in sys.modules


def test_show_as_json_has_every_option(acme, capsys) -> None:
    assert main(["plugins", "show", "tracker:notes", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["description"].startswith("A tracker for tests.")
    assert shown["options"] == [
        {"name": "every", "type": "int", "default": 1, "help": "steps between notes", "minimum": 1, "required": False},
        {"name": "title", "type": "str", "default": "notes", "help": "what stands above them", "required": False},
    ]


def test_show_of_a_plugin_whose_source_does_not_tell_says_so(acme, capsys) -> None:
    assert main(["plugins", "show", "bad"]) == 0
    assert "Its options cannot be told from its source." in capsys.readouterr().out


def test_show_of_a_name_of_two_kinds_asks_which(acme, capsys) -> None:
    acme.install("other-rl", {"reward:notes": "other"})
    assert main(["plugins", "show", "notes"]) == 2
    assert "'notes' is not one plugin: say which of reward:notes, tracker:notes" in capsys.readouterr().err


def test_check_imports_what_it_is_told_and_fails_if_one_is_broken(acme, capsys) -> None:
    assert main(["plugins", "check", "notes"]) == 0
    assert "1 of 1 can be used" in capsys.readouterr().out
    assert main(["plugins", "check", "extension:bad"]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_check_of_everything_names_each_broken_plugin(acme, capsys) -> None:
    acme.install("other-rl", {"tracker:notes": "other"})
    assert main(["plugins", "check", "--json"]) == 2
    shown = json.loads(capsys.readouterr().out)
    assert set(shown["broken"]) == {"tracker:charts", "tracker:notes", "extension:bad"}
    assert "algorithm:grpo" in shown["checked"]
