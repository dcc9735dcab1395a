import functools
import sys
from types import ModuleType

import pytest

from rollstock import Extension, Tracker, hookimpl
from rollstock.conversion import OptionError
from rollstock.errors import ConfigError, PluginError
from rollstock.manager import PluginManager, make_manager
from rollstock.section import RewardSection, Section


@pytest.fixture
def notes(site, tracker_source) -> PluginManager:
    site.install("acme-rl", {"tracker:notes": "acme_notes"}, {"acme_notes": tracker_source}, version="2.5")
    return make_manager()


def as_module(name: str, **hooks: object) -> ModuleType:
    module = ModuleType(name)
    for hook, function in hooks.items():
        setattr(module, hook, hookimpl(function))
    return module


def test_a_plugin_is_made_from_its_section(notes: PluginManager) -> None:
    tracker = notes.create("tracker", {"name": "notes", "every": 3})
    assert isinstance(tracker, Tracker)
    assert tracker.plugin_name == "notes"
    assert (tracker.config.every, tracker.config.title) == (3, "notes")


def test_create_as_goes_by_the_interface(notes: PluginManager) -> None:
    assert notes.create_as(Tracker, {"name": "notes"}).plugin_name == "notes"


def test_create_as_refuses_what_is_no_interface(notes: PluginManager) -> None:
    with pytest.raises(TypeError, match="interface"):
        notes.create_as(int, {"name": "notes"})  # type: ignore[type-var]


def test_only_the_plugin_that_is_named_is_imported(site, tracker_source) -> None:
    site.install("acme", {"tracker:notes": "acme_notes", "tracker:loud": "acme_loud", "reward:notes": "acme_reward"})
    site.write("acme_notes", tracker_source)
    site.write("acme_loud", "raise SystemExit")
    site.write("acme_reward", "raise SystemExit")
    make_manager().create("tracker", {"name": "notes"})
    assert "acme_notes" in sys.modules
    assert not {"acme_loud", "acme_reward"} & set(sys.modules)


def test_a_module_is_imported_and_registered_once(notes: PluginManager) -> None:
    first, second = (notes.create("tracker", {"name": "notes"}) for _ in range(2))
    assert type(first) is type(second)
    assert first is not second


def test_loaded_lists_the_installed_plugins_in_use(notes: PluginManager) -> None:
    notes.create("tracker", {"name": "notes"})
    assert [entry.provenance for entry in notes.loaded()] == ["acme-rl 2.5"]


def test_a_broken_plugin_is_one_entry_in_the_table_and_the_others_work(site, tracker_source) -> None:
    site.install("acme", {"tracker:bad": "acme_bad", "tracker:notes": "acme_notes"})
    site.write("acme_bad", "1 / 0")
    site.write("acme_notes", tracker_source)
    manager = make_manager()
    reasons = [manager.check(manager.catalogue[id]) for id in ("tracker:bad", "tracker:notes")]
    assert reasons[1] is None
    assert "ZeroDivisionError" in str(reasons[0])
    assert manager.broken == {"tracker:bad": reasons[0]}
    with pytest.raises(PluginError, match="ZeroDivisionError"):
        manager.create("tracker", {"name": "bad"})


def test_the_conflicts_are_in_the_table_of_broken_plugins(site) -> None:
    site.install("first-rl", {"tracker:notes": "one"})
    site.install("second-rl", {"tracker:notes": "two"})
    manager = make_manager()
    assert "first-rl" in manager.broken["tracker:notes"]
    with pytest.raises(PluginError, match=r"first-rl.*second-rl"):
        manager.create("tracker", {"name": "notes"})


def test_an_option_that_does_not_fit_names_file_line_plugin_and_option(notes: PluginManager) -> None:
    section = Section({"name": "notes", "every": 0}, place="trackers.1", origins={"every": "a.yaml:9"})
    with pytest.raises(OptionError, match=r"^a\.yaml:9: trackers\.1\.every must be at least 1.*plugin tracker:notes"):
        notes.create("tracker", section)


def test_a_plugin_that_is_missing_is_blamed_on_the_line_that_names_it(notes: PluginManager) -> None:
    section = Section({"name": "nodes"}, place="trackers.1", origins={"name": "a.yaml:8"})
    with pytest.raises(PluginError, match=r"^a\.yaml:8: there is no tracker 'nodes'. Did you mean 'notes'"):
        notes.create("tracker", section)


def test_a_section_without_a_name_is_refused(notes: PluginManager) -> None:
    with pytest.raises(PluginError, match="tracker must say which tracker"):
        notes.create("tracker", {"every": 1})


def test_complete_fills_in_every_option(notes: PluginManager) -> None:
    section = Section({"name": "notes", "every": 2}, place="trackers.0", origins={"every": "a.yaml:1"})
    whole = notes.complete("tracker", section)
    assert whole == {"name": "notes", "every": 2, "title": "notes"}
    assert (whole.place, whole.origins["every"]) == ("trackers.0", "a.yaml:1")


def test_complete_keeps_what_is_the_cores_in_a_reward() -> None:
    section = RewardSection.from_option({"name": "environment", "weight": 2}, "rewards.0")
    assert make_manager().complete("reward", section) == {"name": "environment", "weight": 2.0}


def test_a_module_can_be_added_without_installing_it() -> None:
    class Quiet(Extension):
        pass

    manager = make_manager()
    manager.add("extension", "quiet", as_module("quiet_module", rollstock_extension=lambda: Quiet))
    assert isinstance(manager.create("extension", {"name": "quiet"}), Quiet)
    assert manager.loaded() == []


def test_properties_are_not_computed_when_hooks_are_looked_for() -> None:
    class Lazy(Extension):
        @functools.cached_property
        def late(self) -> int:
            raise AssertionError("computed before setup")

        @property
        def later(self) -> int:
            raise AssertionError("computed before setup")

    manager = make_manager()
    manager.add("extension", "lazy", as_module("lazy_module", rollstock_extension=lambda: Lazy))
    assert isinstance(manager.create("extension", Section({"name": "lazy"})), Lazy)


@pytest.mark.parametrize("name", ["twice", "overlong_penalty"])
def test_a_name_that_is_taken_cannot_be_added(name: str) -> None:
    manager = make_manager()
    manager.add("extension", "twice", ModuleType("once"))
    with pytest.raises(PluginError, match=f"extension:{name} is taken"):
        manager.add("extension", name, ModuleType("again"))


def test_the_first_of_several_extensions_is_the_outermost_wrapper() -> None:
    heard: list[str] = []

    class Outer(Extension):
        @hookimpl(wrapper=True)
        def rollstock_score(self, run, batch):
            heard.append(f"{self.plugin_name} before")
            done = yield
            heard.append(f"{self.plugin_name} after")
            return done

    class Inner(Outer):
        pass

    class Core:
        @hookimpl(trylast=True)
        def rollstock_score(self, run, batch):
            heard.append("core")
            return True

    manager = make_manager()
    manager.add("extension", "outer", as_module("outer_module", rollstock_extension=lambda: Outer))
    manager.add("extension", "inner", as_module("inner_module", rollstock_extension=lambda: Inner))
    manager.register("core", Core())
    instances = manager.create_all(Extension, [{"name": "outer"}, {"name": "inner"}])
    assert [instance.plugin_name for instance in instances] == ["outer", "inner"]
    assert manager.hook.rollstock_score(run=None, batch=None) is True
    assert heard == ["outer before", "inner before", "core", "inner after", "outer after"]


def test_one_plugin_named_twice_listens_twice() -> None:
    heard: list[object] = []

    class Listener(Extension):
        @hookimpl
        def rollstock_run_end(self, run, status):
            heard.append(self)

    manager = make_manager()
    manager.add("extension", "ears", as_module("ears_module", rollstock_extension=lambda: Listener))
    instances = manager.create_all(Extension, [{"name": "ears"}, {"name": "ears"}])
    manager.hook.rollstock_run_end(run=None, status="finished")
    assert heard == instances


def test_listeners_of_a_module_that_is_two_plugins_are_called_once() -> None:
    heard: list[str] = []

    class Quiet(Extension):
        pass

    class Scheduler(make_manager().load("scheduler", "dynamic_batch")):  # type: ignore[misc]
        pass

    module = as_module(
        "both_module",
        rollstock_extension=lambda: Quiet,
        rollstock_scheduler=lambda: Scheduler,
        rollstock_run_end=lambda status: heard.append(status),
    )
    manager = make_manager()
    manager.add("extension", "both", module)
    manager.add("scheduler", "both", module)
    assert isinstance(manager.create("extension", {"name": "both"}), Quiet)
    assert isinstance(manager.create("scheduler", {"name": "both"}), Scheduler)
    manager.hook.rollstock_run_end(run=None, status="finished")
    assert heard == ["finished"]


def test_plugins_that_are_not_named_do_not_listen(site) -> None:
    site.install("acme", {"extension:ears": "acme_ears"})
    site.write("acme_ears", "raise SystemExit")
    assert make_manager().hook.rollstock_run_end(run=None, status="finished") == []


def test_an_error_of_the_config_in_a_plugins_constructor_carries_its_name() -> None:
    class Picky(Extension):
        def __init__(self, config=None):
            raise ConfigError("not on a Sunday")

    manager = make_manager()
    manager.add("extension", "picky", as_module("picky_module", rollstock_extension=lambda: Picky))
    with pytest.raises(ConfigError, match="not on a Sunday") as caught:
        manager.create("extension", {"name": "picky"})
    assert caught.value.__notes__ == ["raised by plugin extension:picky when it was made"]


def test_a_constructor_that_fails_is_the_plugins_error() -> None:
    class Clumsy(Extension):
        def __init__(self, config=None):
            raise KeyError("left hand")

    manager = make_manager()
    manager.add("extension", "clumsy", as_module("clumsy_module", rollstock_extension=lambda: Clumsy))
    with pytest.raises(PluginError, match="extension:clumsy cannot be used: making it raised KeyError: 'left hand'"):
        manager.create("extension", {"name": "clumsy"})


@pytest.mark.parametrize("rule", ["notes", "tracker:notes"])
def test_a_plugin_that_the_config_blocks_is_refused_and_not_imported(site, rule: str) -> None:
    site.install("acme", {"tracker:notes": "acme_notes"}, {"acme_notes": "raise SystemExit"})
    with pytest.raises(PluginError, match=r"tracker:notes is blocked by plugins\.block in the config"):
        make_manager([rule]).create("tracker", {"name": "notes"})


def test_a_plugin_that_the_environment_blocks_is_refused(notes: PluginManager, monkeypatch) -> None:
    monkeypatch.setenv("ROLLSTOCK_BLOCK_PLUGINS", "other, tracker:notes")
    with pytest.raises(PluginError, match="blocked by the environment variable ROLLSTOCK_BLOCK_PLUGINS"):
        make_manager().create("tracker", {"name": "notes"})


def test_a_block_names_one_kind_where_it_says_so(notes: PluginManager) -> None:
    assert make_manager(["reward:notes"]).create("tracker", {"name": "notes"})


def test_a_block_of_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(PluginError, match="no plugin kind 'trackr'"):
        make_manager(["trackr:notes"])
