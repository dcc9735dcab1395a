"""The packages' findings: versions, extras, and chips that break torch's import."""

from pathlib import Path

import pytest

from rollstock.doctor import packages
from rollstock.doctor.finding import Finding
from rollstock.doctor.packages import examine_packages


def test_this_installation_has_what_rollstock_asks_for() -> None:
    found = list(examine_packages())
    assert not [finding for finding in found if finding.severity in ("error", "warning")]
    assert any(finding.subject == "packages" and "torch 2." in finding.message for finding in found)


@pytest.fixture
def needy(site) -> str:
    site.install(
        "needy",
        {},
        requires=[
            "no-such-thing>=2",
            "pytest<0.1",
            "pluggy>=1",
            'gone; python_version < "3"',
            "absent; extra == 'big'",
        ],
        extras=["big"],
    )
    return "needy"


def test_missing_and_old_packages_are_named_with_the_command(needy: str) -> None:
    found = {finding.subject: finding for finding in examine_packages(needy)}
    assert found["no-such-thing"] == Finding(
        "error", "no-such-thing", "is not installed", "pip install 'no-such-thing>=2'"
    )
    assert found["pytest"].severity == "error"
    assert "needed: <0.1" in found["pytest"].message
    assert found["packages"].message.startswith("pluggy ")
    assert "gone" not in found
    assert found["extras"].message == "not installed: big (absent)"
    assert "pip install 'needy[NAME]'" in found["extras"].advice


def test_a_distribution_that_is_not_installed_is_an_error() -> None:
    (finding,) = [f for f in examine_packages("never-heard-of-it") if f.severity == "error"]
    assert "not installed as a package" in finding.message


BROKEN = "def load():\n    raise ImportError('libdriver.so: cannot open shared object file')\n"


def chip(site, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Install a package that registers a chip with torch, for this process and for those that it starts."""
    site.install("torch-chip", {}, {"torch_chip": source})
    (info,) = site.path.glob("torch_chip-*.dist-info")
    (info / "entry_points.txt").write_text("[torch.backends]\nchip = torch_chip:load\n")
    monkeypatch.setenv("PYTHONPATH", str(site.path))
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)


def torch_findings() -> list[Finding]:
    return [finding for finding in examine_packages() if finding.subject == "torch"]


def test_a_chip_package_that_breaks_the_import_of_torch_is_explained(site, monkeypatch: pytest.MonkeyPatch) -> None:
    chip(site, monkeypatch, BROKEN)
    (finding,) = torch_findings()
    assert finding.severity == "warning"
    assert "it loads torch-chip on its own" in finding.message
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in finding.advice


def test_a_chip_package_that_works_is_fine(site, monkeypatch: pytest.MonkeyPatch) -> None:
    chip(site, monkeypatch, "def load():\n    pass\n")
    assert torch_findings() == [Finding("ok", "torch", "imports together with torch-chip")]


def test_a_torch_that_does_not_import_at_all_is_an_error(site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chip(site, monkeypatch, BROKEN)
    site.write("torch", "raise ImportError('a damaged installation')\n")
    (finding,) = torch_findings()
    assert finding.is_bad
    assert "a damaged installation" in finding.message


def test_an_import_that_hangs_is_given_up(site, monkeypatch: pytest.MonkeyPatch) -> None:
    chip(site, monkeypatch, BROKEN)
    site.write("torch", "import time\ntime.sleep(60)\n")
    monkeypatch.setattr(packages, "_IMPORT_SECONDS", 1)
    (finding,) = torch_findings()
    assert "had not finished after 1 s" in finding.message
