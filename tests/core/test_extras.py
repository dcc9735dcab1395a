import sys

import pytest

from rollstock import Tracker
from rollstock.errors import PluginError
from rollstock.extras import extra_for, extra_named, extras_of, import_optional, missing_package, normalise


@pytest.fixture
def acme(site):
    site.install(
        "acme-rl",
        {"tracker:charts": "acme_charts"},
        {"acme_charts": "x = 1"},
        extras=["charts", "dev", "empty"],
        requires=[
            "numpy>=1",
            'Deep_Charts[all]>=2 ; extra == "charts"',
            "solo.pkg; extra == 'charts'",
            'black; extra == "dev"',
        ],
    )
    return site


def test_names_are_compared_as_the_package_index_does() -> None:
    assert normalise("Reasoning_Gym.x") == "reasoning-gym-x"


def test_extras_come_with_the_packages_that_they_bring(acme) -> None:
    assert extras_of("acme-rl") == {"charts": {"deep-charts", "solo-pkg"}, "dev": {"black"}, "empty": set()}


def test_a_distribution_that_is_not_installed_has_no_extras() -> None:
    assert extras_of("no-such-distribution") == {}


@pytest.mark.parametrize(
    ("module", "extra"),
    [("deep_charts", "acme-rl[charts]"), ("solo.pkg.inner", "acme-rl[charts]"), ("numpy", None), ("black", None)],
)
def test_a_module_belongs_to_the_extra_that_brings_its_package(acme, module: str, extra: str | None) -> None:
    assert extra_for(module, ["acme-rl"]) == extra


def test_a_plugins_name_may_be_an_extra_or_a_package_of_one(acme) -> None:
    assert extra_named("empty", ["acme-rl"]) == "acme-rl[empty]"
    assert extra_named("deep-charts", ["acme-rl"]) == "acme-rl[charts]"
    assert extra_named("other", ["acme-rl"]) is None


def test_an_import_error_without_a_missing_module_is_not_a_missing_package() -> None:
    assert missing_package(ImportError("cannot import name"), "rollstock") is None


def test_import_optional_gives_the_module() -> None:
    assert import_optional("json.decoder", needed_by="tracker:x") is sys.modules["json.decoder"]


def test_import_optional_names_plugin_and_extra(acme) -> None:
    class Charts(Tracker):
        def start(self, run, state): ...
        def log(self, step, metrics): ...

    Charts.__module__ = "acme_charts"
    tracker = Charts()
    tracker.plugin_name = "charts"
    with pytest.raises(
        PluginError, match=r"plugin charts cannot be used: .*'deep_charts'.*pip install 'acme-rl\[charts\]'"
    ):
        import_optional("deep_charts", needed_by=tracker)


def test_import_optional_tells_a_broken_package_from_a_missing_one(acme) -> None:
    acme.write("deep_charts", "from json import no_such_name")
    with pytest.raises(PluginError, match="'deep_charts' is installed but does not import: cannot import name"):
        import_optional("deep_charts", needed_by="charts")
