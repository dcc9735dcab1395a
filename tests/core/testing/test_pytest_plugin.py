"""The fixtures that plugin authors get, and that they cost nothing where they are not used."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollstock import ModelSpec, NoOptions, PluginError, Reward, Sample
from rollstock.manager import PluginManager, make_manager
from rollstock.testing import read_metrics
from rollstock.testing.install import provider_module

SOURCE = '''
"""One point for every answer that is a digit."""
from rollstock import NoOptions, Reward, hookimpl


class IsDigit(Reward[NoOptions]):
    def score(self, sample):
        return float(sample.response.strip().isdigit())


@hookimpl
def rollstock_reward():
    return IsDigit
'''


class Constant(Reward[NoOptions]):
    def score(self, sample: Sample) -> float:
        return 1.0


def test_importing_the_plugin_imports_neither_torch_nor_the_kits() -> None:
    code = (
        "import sys, rollstock.testing.pytest_plugin, rollstock.testing\n"
        "print([m for m in sys.modules if m in ('torch', 'transformers') or m.startswith('rollstock.testing.a')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_pytest_knows_the_fixtures_without_being_told(request: pytest.FixtureRequest) -> None:
    assert request.config.pluginmanager.has_plugin("rollstock")


def test_a_manager_takes_a_module_and_makes_its_plugin(rollstock_manager: PluginManager) -> None:
    rollstock_manager.add("reward", "constant", provider_module("reward", Constant, "constant_module"))
    reward = rollstock_manager.create_as(Reward, {"name": "constant"})
    assert isinstance(reward, Constant)
    assert reward.plugin_name == "constant"


@pytest.mark.parametrize("form", ["class", "module", "source"])
def test_an_installed_plugin_is_known_to_every_manager_until_the_end(form: str, request: pytest.FixtureRequest) -> None:
    install: Callable[..., None] = request.getfixturevalue("rollstock_install")
    plugin: Any = {"class": Constant, "module": sys.modules[__name__], "source": SOURCE}[form]
    assert isinstance(plugin, type | ModuleType | str)
    if form == "module":
        plugin = provider_module("reward", Constant, "module_for_a_test")
        sys.modules["module_for_a_test"] = plugin
        request.addfinalizer(lambda: sys.modules.pop("module_for_a_test"))
    install("reward", "installed_one", plugin)
    cls = make_manager().load("reward", "installed_one")
    assert cls.__name__ == ("IsDigit" if form == "source" else "Constant")


def test_nothing_is_left_of_an_installed_plugin() -> None:
    with pytest.raises(PluginError, match="no reward 'installed_one'"):
        make_manager().load("reward", "installed_one")


def test_a_tiny_run_uses_what_was_installed(
    rollstock_install: Callable[..., None], rollstock_run: Callable[..., Any]
) -> None:
    rollstock_install("reward", "is_digit", SOURCE)
    outcome = rollstock_run({"rewards": ["is_digit"]}, ["train.steps=1"])
    assert outcome.status == "finished"
    assert outcome.step == 1
    rewards = [row["metrics"]["reward/mean"] for row in read_metrics(outcome.directory) if "metrics" in row]
    assert len(rewards) == 1
    assert 0 < rewards[0] <= 1
    assert rollstock_run(overrides=["train.steps=1"]).directory != outcome.directory


def test_the_tiny_model_and_its_tokenizer_fit(rollstock_model: ModelSpec, rollstock_tokenizer: Any) -> None:
    assert rollstock_model.vocab_size == len(rollstock_tokenizer)
    assert rollstock_tokenizer.decode(rollstock_tokenizer("12+3=")["input_ids"]) == "12+3="


def test_tests_of_a_plugin_author_need_no_import_of_the_plugin(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "def test_it(rollstock_install, rollstock_manager):\n    assert rollstock_manager.catalogue\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
