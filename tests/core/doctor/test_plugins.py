"""The plugins' findings: broken ones, names claimed twice, blocks and chips."""

import pytest

from rollstock.doctor.finding import Finding
from rollstock.doctor.plugins import examine_plugins


def found() -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine_plugins()}


def test_the_built_in_plugins_work_or_say_what_they_need() -> None:
    findings = list(examine_plugins())
    assert not [finding for finding in findings if finding.severity in ("warning", "error")]
    assert found()["device cpu"] == Finding("ok", "device cpu", "1 of them")


def test_a_broken_plugin_is_a_warning_with_the_reason(site) -> None:
    site.install("broken-things", {"reward:crooked": "crooked"}, {"crooked": "raise ValueError('half a file')"})
    finding = found()["plugin reward:crooked"]
    assert finding.severity == "warning"
    assert "half a file" in finding.message
    assert "broken-things" in finding.advice
    assert "broken-things" not in found()["plugins"].message


def test_a_plugin_that_needs_an_extra_says_which(site) -> None:
    site.install(
        "fancy",
        {"tracker:fancy": "fancy"},
        {"fancy": "import glitterlib\n"},
        requires=["glitterlib; extra == 'glitter'"],
        extras=["glitter"],
    )
    finding = found()["plugin tracker:fancy"]
    assert (finding.severity, finding.advice) == ("info", "pip install 'fancy[glitter]'")


def test_a_name_claimed_twice_is_an_error_that_names_both(site) -> None:
    for distribution in ("first-one", "second-one"):
        module = distribution.replace("-", "_")
        site.install(distribution, {"reward:twice": module}, {module: ""})
    finding = found()["plugin reward:twice"]
    assert finding.is_bad
    assert "first-one" in finding.message
    assert "second-one" in finding.message


def test_a_blocked_plugin_is_not_imported(site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("noisy", {"reward:noisy": "noisy"}, {"noisy": "raise SystemExit('imported')"})
    monkeypatch.setenv("ROLLSTOCK_BLOCK_PLUGINS", "noisy")
    finding = found()["plugin reward:noisy"]
    assert finding.severity == "info"
    assert "blocked" in finding.message
