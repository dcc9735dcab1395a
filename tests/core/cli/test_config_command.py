import json
from pathlib import Path

import pytest

from rollstock.cli import main

CONFIG = "model: {path: some/model}\nalgorithm: {name: grpo, clip: 0.3}\nenvironment: arithmetic\n"


@pytest.fixture
def config(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("demo.yaml")
    path.write_text(CONFIG)
    return path


def test_the_config_is_printed_with_the_origin_of_each_value(config: Path, capsys) -> None:
    assert main(["config", "demo.yaml", "train.seed=5"]) == 0
    lines = {tuple(line.split("#")[0].split()): line.split("# ")[-1] for line in capsys.readouterr().out.splitlines()}
    assert lines["clip:", "0.3"] == "demo.yaml:2"
    assert lines["seed:", "5"] == "override"
    assert lines["scale:", "unbiased"] == "default"


def test_the_config_as_json_has_values_and_origins(config: Path, capsys) -> None:
    assert main(["config", "demo.yaml", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"]["algorithm"]["clip"] == 0.3
    assert shown["origins"]["algorithm.clip"] == "demo.yaml:2"
    assert shown["origins"]["algorithm.scale"] == "default"


def test_a_typo_in_a_plugins_option_is_found_at_once(config: Path, capsys) -> None:
    config.write_text(CONFIG.replace("clip", "clipp"))
    assert main(["config", "demo.yaml"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: demo.yaml:2: algorithm.clipp is not an option of plugin algorithm:grpo. Did you mean 'clip'?"
    )


def test_a_plugin_that_the_config_blocks_is_refused(config: Path, capsys) -> None:
    assert main(["config", "demo.yaml", "plugins.block=[grpo]"]) == 2
    assert "demo.yaml:2: plugin algorithm:grpo is blocked by plugins.block in the config" in capsys.readouterr().err
