"""What `import rollstock` gives, and what it does not bring along."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rollstock

ROOT = Path(__file__).parents[2]


def for_type_checkers() -> dict[str, str]:
    """The names in the `if TYPE_CHECKING` block, with the modules that they come from."""
    names = {}
    for node in ast.parse(Path(rollstock.__file__).read_text()).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for line in node.body:
                if isinstance(line, ast.ImportFrom):
                    names |= {alias.asname or alias.name: str(line.module) for alias in line.names}
    return names


def test_type_checkers_and_python_see_the_same_names() -> None:
    homes = {name: f"rollstock.{home}" for name, home in rollstock._HOMES.items()}
    assert for_type_checkers() == homes
    assert sorted(rollstock.__all__) == sorted(homes)


@pytest.mark.parametrize("name", rollstock.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(rollstock, name) is not None
    assert name in dir(rollstock)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'rollstock' has no attribute 'Nonsense'"):
        _ = rollstock.Nonsense  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "modules",
    [
        "rollstock",
        "rollstock.cli, rollstock.cli.plugins, rollstock.cli.config, rollstock.cli.runs, rollstock.cli.tools",
        "rollstock.manager, rollstock.static, rollstock.config, rollstock.schema",
        "rollstock.hookspecs, rollstock.kinds, "
        + ", ".join(f"rollstock.interfaces.{n}" for n in ("algorithm", "reward", "device")),
        "rollstock.scoring, rollstock.sandbox, rollstock.sandbox.worker",
    ],
)
def test_these_modules_do_not_import_torch(modules: str) -> None:
    script = f"import sys, {modules}; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "False"


def test_options_and_hooks_of_a_plugin_do_not_import_torch() -> None:
    script = (
        "import sys; from rollstock import Algorithm, Environment, PluginError, Reward, Tracker, hookimpl, option; "
        "print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "False"


def test_importing_the_folder_by_its_own_name_says_what_to_do() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, "-c", "import core"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "was imported as 'core': import `rollstock`" in result.stderr
