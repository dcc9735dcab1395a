import sys
from importlib.metadata import EntryPoint

import pytest

from rollstock.discovery import Catalogue, PluginEntry, discover
from rollstock.errors import PluginError
from rollstock.manager import make_manager


def entry(id: str, distribution: str = "acme", module: str = "acme.mod", version: str = "1.0") -> PluginEntry:
    kind, _, name = id.partition(":")
    return PluginEntry(kind, name, module, distribution, version, EntryPoint(name, module, f"rollstock.{kind}"))


def test_plugins_come_in_the_order_of_kinds_then_names() -> None:
    ids = ["tracker:b", "algorithm:z", "tracker:a", "algorithm:a"]
    assert list(Catalogue(map(entry, ids))) == ["algorithm:a", "algorithm:z", "tracker:a", "tracker:b"]


def test_installed_plugins_are_found_with_distribution_and_version(site) -> None:
    site.install("acme-rl", {"tracker:notes": "acme_notes"}, {"acme_notes": '"""Notes."""'}, version="2.5")
    found = discover()["tracker:notes"]
    assert (found.module, found.provenance, found.summary) == ("acme_notes", "acme-rl 2.5", "Notes")


def test_the_built_in_plugins_come_through_the_same_entry_points() -> None:
    assert discover()["algorithm:grpo"].distribution == "rollstock"


def test_discovery_imports_no_plugin(site) -> None:
    site.install(
        "acme", {"tracker:notes": "acme_loud.inner"}, {"acme_loud.__init__": "raise SystemExit", "acme_loud.inner": "x"}
    )
    assert "tracker:notes" in discover()
    assert discover()["tracker:notes"].summary == ""
    assert not any(name.startswith("acme_loud") for name in sys.modules)


def test_a_name_claimed_by_two_distributions_belongs_to_neither(site) -> None:
    site.install("first-rl", {"tracker:notes": "one"})
    site.install("second-rl", {"tracker:notes": "two"}, version="3.1")
    catalogue = discover()
    assert "tracker:notes" not in catalogue
    assert "first-rl 1.0 (one) and second-rl 3.1 (two)" in catalogue.conflicts["tracker:notes"]
    with pytest.raises(PluginError, match="claimed twice"):
        catalogue.select("tracker:notes")


def test_two_distributions_with_one_module_are_a_conflict_too(site) -> None:
    site.install("first-rl", {"tracker:notes": "same"})
    site.install("second-rl", {"tracker:notes": "same"})
    assert "tracker:notes" in discover().conflicts


def test_names_that_are_not_neighbours_on_disk_conflict(site) -> None:
    site.install("aaa", {"tracker:notes": "one", "tracker:other": "three"})
    site.install("mmm", {"tracker:between": "two"})
    site.install("zzz", {"tracker:notes": "four"})
    assert list(discover().conflicts) == ["tracker:notes"]


def test_a_distribution_that_is_there_twice_counts_once_as_imports_do(site, monkeypatch) -> None:
    site.install("acme-rl", {"tracker:notes": "new"}, version="2.0", folder="a")
    site.install("acme_rl", {"tracker:notes": "old"}, version="1.0", folder="b")
    monkeypatch.syspath_prepend(str(site.path / "b"))
    monkeypatch.syspath_prepend(str(site.path / "a"))
    assert discover()["tracker:notes"].version == "2.0"


def test_a_misspelt_group_is_a_stray_with_the_nearest_group(site) -> None:
    site.install("acme-rl", {"algoritm:best": "acme_best"})
    (stray,) = discover().strays
    assert stray.startswith(
        "acme-rl 1.0 has 'best' in the entry-point group 'rollstock.algoritm', which is none. Did you"
    )
    assert "'rollstock.algorithm'" in stray
    with pytest.raises(PluginError, match="'best' in the entry-point group"):
        make_manager().create("algorithm", {"name": "best"})


def test_select_takes_an_id_a_kind_or_a_name() -> None:
    catalogue = Catalogue([entry("tracker:notes"), entry("tracker:other"), entry("reward:notes")])
    assert [found.id for found in catalogue.select("tracker:notes")] == ["tracker:notes"]
    assert [found.id for found in catalogue.select("tracker")] == ["tracker:notes", "tracker:other"]
    assert [found.id for found in catalogue.select("notes")] == ["reward:notes", "tracker:notes"]


def test_select_of_an_unknown_plugin_asks_for_the_nearest() -> None:
    with pytest.raises(PluginError, match="Did you mean 'notes'"):
        Catalogue([entry("tracker:notes")]).select("nodes")
    with pytest.raises(PluginError, match="Did you mean 'tracker:notes'"):
        Catalogue([entry("tracker:notes")]).select("tracker:nodes")


def test_a_kind_that_does_not_exist_is_refused_with_the_nearest() -> None:
    with pytest.raises(PluginError, match=r"no plugin kind 'algoritm'.*'algorithm'"):
        Catalogue([]).of_kind("algoritm")
