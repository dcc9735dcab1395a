"""Everything that a plugin can get wrong, each with an error of its own that names the plugin and says what to do."""

import re
from textwrap import dedent

import pytest

from rollstock.errors import ConfigError, PluginError
from rollstock.manager import make_manager

HEAD = dedent("""
    from dataclasses import dataclass
    from rollstock import Extension, Tracker, hookimpl, option


    class Fine(Extension):
        pass
""")

PROVIDER = dedent("""

    @hookimpl
    def rollstock_extension():
        return Fine
""")

MISTAKES = {
    "no provider hook": (
        "x = 1",
        "plugin extension:mine has no provider hook: its module needs `@hookimpl def rollstock_extension(): return <a "
        "subclass of rollstock.Extension>`",
    ),
    "provider of another kind": (
        "@hookimpl\ndef rollstock_tracker():\n    return Tracker",
        "plugin extension:mine has no provider hook (it provides a plugin of another kind, tracker)",
    ),
    "provider not marked": (
        "def rollstock_extension():\n    return Fine",
        "plugin extension:mine has a function rollstock_extension that is not marked: put @hookimpl above it",
    ),
    "returns None": (
        "@hookimpl\ndef rollstock_extension():\n    pass",
        "rollstock_extension of plugin extension:mine must return a subclass of rollstock.Extension, not None",
    ),
    "returns something else": (
        "@hookimpl\ndef rollstock_extension():\n    return 'Fine'",
        "must return a subclass of rollstock.Extension, not 'Fine'",
    ),
    "instance instead of class": (
        "@hookimpl\ndef rollstock_extension():\n    return Fine()",
        "must return a subclass of rollstock.Extension, not an instance of one: write `return Fine`",
    ),
    "class of another kind": (
        "@hookimpl\ndef rollstock_extension():\n    return Tracker",
        "and Tracker is none: write `class Tracker(Extension[...])`",
    ),
    "provider raises": (
        "@hookimpl\ndef rollstock_extension():\n    return 1 / 0",
        "plugin extension:mine: rollstock_extension raised ZeroDivisionError: division by zero",
    ),
    "misspelt hook": (
        PROVIDER + "\n@hookimpl\ndef rollstock_scor(run):\n    pass",
        "plugin extension:mine implements rollstock_scor, and there is no such hook. Did you mean 'rollstock_score'?",
    ),
    "misspelt provider": (
        "@hookimpl\ndef rollstock_extention():\n    return Fine",
        "there is no such hook. Did you mean 'rollstock_extension'?",
    ),
    "wrong argument name": (
        PROVIDER + "\n@hookimpl\ndef rollstock_score(run, bacth):\n    pass",
        "the hook rollstock_score takes 'bacth', which the hookspec has not; did you mean 'batch'? It is "
        "rollstock_score(run, batch)",
    ),
    "argument with default": (
        PROVIDER + "\n@hookimpl\ndef rollstock_score(run, batch=None):\n    pass",
        "the hook rollstock_score gives 'batch' a default, so that it would never be passed: remove it",
    ),
    "star arguments": (
        PROVIDER + "\n@hookimpl\ndef rollstock_score(*args):\n    pass",
        "the hook rollstock_score has the argument *args; hooks take plain ones: rollstock_score(run, batch)",
    ),
    "wrapper without yield": (
        PROVIDER + "\n@hookimpl(wrapper=True)\ndef rollstock_score(run):\n    return True",
        "a wrapper exactly if it yields once, and it has no yield",
    ),
    "yield without wrapper": (
        PROVIDER + "\n@hookimpl\ndef rollstock_score(run):\n    yield",
        "a wrapper exactly if it yields once, and it yields: mark it @hookimpl(wrapper=True)",
    ),
    "old wrapper": (
        PROVIDER + "\n@hookimpl(hookwrapper=True)\ndef rollstock_score(run):\n    yield",
        "marked hookwrapper=True, the old way: write @hookimpl(wrapper=True)",
    ),
    "coroutine": (
        PROVIDER + "\n@hookimpl\nasync def rollstock_score(run):\n    pass",
        "is `async def`, and hooks are called without an event loop: write `def`",
    ),
    "abstract class": (
        "class Half(Tracker):\n    pass\n\n@hookimpl\ndef rollstock_tracker():\n    return Half",
        "plugin tracker:mine is not finished: Half lacks log, start",
    ),
    "config that is no dataclass": (
        "class Odd(Extension[dict]):\n    pass\n\n@hookimpl\ndef rollstock_extension():\n    return Odd",
        "plugin extension:mine: <class 'dict'> is no config: a plugin's options are a @dataclass(kw_only=True) class",
    ),
    "option of a name that the core has": (
        "@dataclass(kw_only=True)\nclass C:\n    name: str = option('', 'a name')\n\n"
        "class Odd(Extension[C]):\n    pass\n\n@hookimpl\ndef rollstock_extension():\n    return Odd",
        "plugin extension:mine has an option 'name', a name that the core keeps for itself: rename it",
    ),
    "option without help": (
        "@dataclass(kw_only=True)\nclass C:\n    size: int = option(1, '')",
        "importing acme_mine raised TypeError: an option needs a help text",
    ),
    "import error": (
        "from json import no_such_name",
        "importing acme_mine raised ImportError: cannot import name 'no_such_name' from 'json'",
    ),
    "exception on import": ("raise KeyError('oops')", "importing acme_mine raised KeyError: 'oops' ("),
    "exit on import": ("raise SystemExit(3)", "importing acme_mine raised SystemExit: 3"),
    "assertion on import": ("assert 1 == 2, 'no'", "importing acme_mine raised AssertionError: no"),
    "syntax error": ("def (", "its code is not valid Python: "),
    "missing package of an extra": (
        "import deep_charts.lines",
        "it needs the package 'deep_charts', which is not installed: pip install 'acme-rl[charts]'",
    ),
    "missing package that no extra has": (
        "import nowhere_at_all",
        "it needs the module 'nowhere_at_all', which is not installed, and no extra of acme-rl brings it",
    ),
    "newer API": (
        "ROLLSTOCK_PLUGIN_API = 2" + PROVIDER,
        "plugin extension:mine of acme-rl 1.0 cannot be used: it was written for plugin API 2, and this rollstock has "
        "API 1: upgrade rollstock",
    ),
    "older API": ("ROLLSTOCK_PLUGIN_API = 0" + PROVIDER, "API 1: upgrade acme-rl, or ask its authors"),
    "API that is no number": ("ROLLSTOCK_PLUGIN_API = '1'" + PROVIDER, "must be a whole number, not '1'"),
    "newer API that fails on import": (
        "ROLLSTOCK_PLUGIN_API = 7\nfrom rollstock import SomethingNew",
        "written for plugin API 7",
    ),
}


@pytest.mark.parametrize(("body", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_in_a_plugins_module(site, body: str, message: str) -> None:
    kind = "tracker" if "tracker:mine" in message else "extension"
    site.install(
        "acme-rl",
        {f"{kind}:mine": "acme_mine"},
        {"acme_mine": HEAD + dedent(body)},
        extras=["charts"],
        requires=["numpy", 'Deep-Charts>=2; extra == "charts"'],
    )
    with pytest.raises(PluginError, match=re.escape(message)) as caught:
        make_manager().create(kind, {"name": "mine"})
    assert f"{kind}:mine" in str(caught.value)
    assert caught.value.plugin == f"{kind}:mine"


def test_an_instance_whose_hooks_are_wrong_is_refused(site) -> None:
    body = """
        class Mine(Extension):
            @hookimpl
            def rollstock_score(self, run, btch):
                pass

        @hookimpl
        def rollstock_extension():
            return Mine
    """
    site.install("acme-rl", {"extension:mine": "acme_mine"}, {"acme_mine": HEAD + dedent(body)})
    with pytest.raises(PluginError, match="plugin extension:mine: the hook rollstock_score takes 'btch'"):
        make_manager().create("extension", {"name": "mine"})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("acme_nowhere", "its entry point names the module 'acme_nowhere', which does not exist"),
        ("acme_mine:Fine", "its entry point names an object, 'acme_mine:Fine'; it must name the module"),
    ],
)
def test_an_entry_point_that_names_no_module(site, value: str, message: str) -> None:
    site.install("acme-rl", {"extension:mine": value}, {"acme_mine": HEAD})
    with pytest.raises(PluginError, match=re.escape(message)):
        make_manager().create("extension", {"name": "mine"})


def test_a_module_missing_inside_the_plugins_own_package_is_not_a_missing_extra(site) -> None:
    site.install("acme-rl", {"extension:mine": "acme_pkg.mine"}, {"acme_pkg.mine": "import acme_pkg.gone"})
    with pytest.raises(PluginError, match=r"it needs the module 'acme_pkg\.gone', which is not installed"):
        make_manager().create("extension", {"name": "mine"})


def test_a_name_that_is_not_installed_gives_the_nearest_and_how_to_see_all() -> None:
    with pytest.raises(PluginError) as caught:
        make_manager().create("algorithm", {"name": "grop"})
    assert str(caught.value).startswith("there is no algorithm 'grop'. Did you mean 'grpo'? Known: grpo, ")
    assert "`rollstock plugins algorithm`" in str(caught.value)


@pytest.mark.parametrize(("kind", "name"), [("rollout", "vllm"), ("backend", "megatron"), ("backend", "megatron_core")])
def test_a_name_that_an_extra_brings_gives_the_command_to_install_it_and_says_that_no_plugin_comes_with_it(
    kind: str, name: str
) -> None:
    said = rf"rollstock itself has no {kind} of this name; its extra \(pip install 'rollstock\[(vllm|megatron)\]'\)"
    with pytest.raises(PluginError, match=said):
        make_manager().create(kind, {"name": name})


def test_a_name_of_another_kind_is_recognised() -> None:
    with pytest.raises(PluginError, match="'grpo' is the name of a plugin of another kind: algorithm"):
        make_manager().create("backend", {"name": "grpo"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"evry": 1},
            "tracker.evry is not an option of plugin tracker:notes. Did you mean 'every'? Known: every, title.",
        ),
        ({"every": "often"}, "tracker.every must be a whole number (int), not 'often' (str)"),
        ({"every": 0}, "tracker.every must be at least 1, not 0"),
    ],
)
def test_an_option_that_is_unknown_or_does_not_fit(site, tracker_source, options, message: str) -> None:
    site.install("acme-rl", {"tracker:notes": "acme_notes"}, {"acme_notes": tracker_source})
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_manager().create("tracker", {"name": "notes", **options})


def test_a_package_that_a_plugin_imports_only_when_it_is_made(site) -> None:
    body = """
        class Mine(Extension):
            def __init__(self, config=None):
                super().__init__(config)
                import deep_charts

        @hookimpl
        def rollstock_extension():
            return Mine
    """
    site.install(
        "acme-rl",
        {"extension:mine": "acme_mine"},
        {"acme_mine": HEAD + dedent(body)},
        extras=["charts"],
        requires=['deep-charts; extra == "charts"'],
    )
    with pytest.raises(PluginError, match=r"extension:mine cannot be used: .*pip install 'acme-rl\[charts\]'"):
        make_manager().create("extension", {"name": "mine"})
