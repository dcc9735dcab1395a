"""The command line as scripts and people meet it: exit codes, one message a mistake, JSON, and no torch where none is
needed.
"""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollstock.cli import main
from rollstock.errors import RunError

COMMANDS = ["train", "resume", "eval", "export", "plugins", "config", "doctor", "report", "new"]


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rollstock", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
        timeout=120,
    )


def test_help_lists_every_command(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {command} " in shown for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(capsys, command: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "there is no command 'trian'. Did you mean 'train'?"),
        (["train"], "the following arguments are required: CONFIG; see rollstock train --help"),
        (["train", "x.yaml", "--dryrun"], "unrecognized arguments: --dryrun"),
        (["train", "x.yaml", "--train.steps=3"], "a value is overridden without dashes: train.steps=3; see rollstock"),
        (["train", "nowhere.yaml"], "there is no config file nowhere.yaml."),
        (["resume", "nowhere"], "nowhere"),
        (["eval", "nowhere"], "nowhere"),
        (["export", "nowhere"], "the following arguments are required: --to"),
        (
            ["export", "nowhere", "--to", "x", "--step", "first"],
            "'first' is neither a step's number nor `best` nor `last`",
        ),
        (["report", "nowhere"], "nowhere"),
        (["plugins", "algoritm"], "there is no plugin kind 'algoritm'. Did you mean 'algorithm'?"),
        (["plugins", "show"], "write rollstock plugins [KIND]"),
        (["plugins", "show", "algorithm:grop"], "there is no plugin 'algorithm:grop'. Did you mean 'algorithm:grpo'?"),
        (["plugins", "show", "algorithm"], "'algorithm' is not one plugin: say which of algorithm:"),
        (["new", "plugin", "algoritm", "x"], "there is no plugin kind 'algoritm'"),
        (["new", "package", "algorithm", "x"], "invalid choice: 'package'"),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(
    capsys, tmp_path, monkeypatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.startswith("error: ")
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_with_json_an_error_is_an_object(capsys) -> None:
    assert main(["train", "nowhere.yaml", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "ConfigError"
    assert "nowhere.yaml" in error["message"]


def test_with_debug_an_error_has_its_traceback(capsys) -> None:
    assert main(["train", "nowhere.yaml", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code", "shown", "traceback"),
    [
        (RunError("the reward broke"), 1, "error: the reward broke\n  raised by x", False),
        (KeyError("a bug"), 1, "error: KeyError: 'a bug'\n  raised by x", True),
        (KeyboardInterrupt(), 1, "error: interrupted", False),
        (SystemExit(0), 1, "called exit(0), which ended the command\n  raised by x", False),
    ],
)
def test_what_a_command_raises_becomes_an_exit_code(
    capsys, monkeypatch, raised, code: int, shown: str, traceback: bool
) -> None:
    from rollstock.cli import config

    def fail(options, output):
        raised.add_note("raised by x")
        raise raised

    monkeypatch.setattr(config, "config", fail)
    assert main(["config", "x.yaml"]) == code
    error = capsys.readouterr().err
    assert shown in error
    assert ("Traceback" in error) is traceback


@pytest.mark.parametrize("flags", [[], ["--debug"]])
def test_a_traceback_that_is_logged_is_shown_with_debug_alone(capsys, monkeypatch, flags: list[str]) -> None:
    from rollstock.cli import config

    def fail(options, output):
        log = logging.getLogger("rollstock.somewhere")
        try:
            raise RunError("the reward broke")
        except RunError:
            log.exception("the run failed in step 3")
            raise

    monkeypatch.setattr(config, "config", fail)
    assert main(["config", "x.yaml", *flags]) == 1
    error = capsys.readouterr().err
    assert "ERROR: the run failed in step 3\n" in error
    assert ("Traceback" in error) is bool(flags)


@pytest.mark.parametrize(
    "arguments",
    [
        ["resume", "x" * 300],
        ["report", "x" * 300],
        ["eval", "x" * 300],
        ["export", "x" * 300, "--to", "out"],
        ["new", "plugin", "algorithm", "mine", "--dir", "x" * 300],
    ],
)
def test_a_path_that_the_system_refuses_is_one_message(capsys, tmp_path, monkeypatch, arguments: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert re.fullmatch(r"error: the path '.*x{300}.*' cannot be used: File name too long; choose another\n", shown)


def test_a_file_in_the_way_of_a_directory_is_one_message(capsys, tmp_path, monkeypatch) -> None:
    from rollstock.cli import config

    def fail(options, output):
        (tmp_path / "file").write_text("")
        (tmp_path / "file").mkdir()

    monkeypatch.setattr(config, "config", fail)
    assert main(["config", "x.yaml"]) == 2
    assert capsys.readouterr().err.startswith(f"error: the path '{tmp_path / 'file'}' cannot be used: File exists")


def test_overrides_may_stand_behind_options() -> None:
    from rollstock.cli.parser import parse

    options = parse(["train", "x.yaml", "train.steps=3", "--dry-run", "train.seed=1", "algorithm=ppo"])
    assert options.overrides == ["train.steps=3", "train.seed=1", "algorithm=ppo"]
    assert options.dry_run


def test_the_module_runs_as_the_script_does() -> None:
    result = run("--version")
    assert (result.returncode, result.stdout.startswith("rollstock ")) == (0, True)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["plugins"], ["plugins", "--json"], ["plugins", "show", "backend:torch"]]
)
def test_listing_and_describing_import_neither_torch_nor_any_plugin(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from rollstock.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit: pass\n"
        "folders = ('algorithms', 'backends', 'hardware', 'plugins')\n"
        "slow = ('torch', 'numpy', 'transformers', 'omegaconf', 'pluggy', 'rich')\n"
        "is_plugin = lambda name: any(name.startswith(f'rollstock.{folder}') for folder in folders)\n"
        "bad = [name for name in sys.modules if name.split('.')[0] in slow or is_plugin(name)]\n"
        "print(bad, file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert result.stderr.strip() == "[]"
