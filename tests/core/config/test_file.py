import re
from pathlib import Path

import pytest

from rollstock.config.file import read_config_file
from rollstock.errors import ConfigError


def read(tmp_path: Path, text: str):
    path = tmp_path / "demo.yaml"
    path.write_text(text)
    return read_config_file(path)


def test_every_value_knows_its_line(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo.yaml").write_text("train:\n  steps: 3\n\nrewards:\n- rule\n- name: x\n  weight: 2\nmodel: {path: p}\n")
    file = read_config_file(Path("demo.yaml"))
    assert file.values == {
        "train": {"steps": 3},
        "rewards": ["rule", {"name": "x", "weight": 2}],
        "model": {"path": "p"},
    }
    assert file.origins == {
        "": "demo.yaml",
        "train": "demo.yaml:1",
        "train.steps": "demo.yaml:2",
        "rewards": "demo.yaml:4",
        "rewards.0": "demo.yaml:5",
        "rewards.1": "demo.yaml:6",
        "rewards.1.name": "demo.yaml:6",
        "rewards.1.weight": "demo.yaml:7",
        "model": "demo.yaml:8",
        "model.path": "demo.yaml:8",
    }


def test_anchors_and_merges_are_understood(tmp_path: Path) -> None:
    file = read(tmp_path, "a: &x {p: 1, q: 2}\nb:\n  <<: *x\n  q: 3\nc: *x\n")
    assert file.values == {"a": {"p": 1, "q": 2}, "b": {"p": 1, "q": 3}, "c": {"p": 1, "q": 2}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train:\n\tsteps: 3\n", r"demo\.yaml:2:1: not valid YAML: .*\(indent with spaces, not tabs\)"),
        ("train: {steps: 3\nmodel: x\n", r"demo\.yaml:2:\d+: not valid YAML"),
        ("train:\n  steps: 3\ntrain: {}\n", r"demo\.yaml:3: train is there already, in line 1: remove one of them"),
        ("train:\n  steps: 3\n  steps: 4\n", r"demo\.yaml:3: train\.steps is there already, in line 2"),
        ("", r"demo\.yaml: the config file is empty"),
        ("# nothing\n", r"demo\.yaml: the config file is empty"),
        ("- a\n", r"demo\.yaml:1: a config is a mapping of sections"),
        ("a: &x\n  b: *x\n", r"demo\.yaml:1: a\.b contains itself"),
        ("[1, 2]: x\n", r"demo\.yaml:1: a key must be a word|demo\.yaml:1:1: not valid YAML"),
        ("a: !!python/name:os.system\n", r"demo\.yaml:1:4: not valid YAML: could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", r"demo\.yaml:2:1: not valid YAML: expected a single document"),
        ("a: 1\n~: 2\n", r"demo\.yaml:2: a key must be a word, not empty"),
        ("a: !!int many\n", r"demo\.yaml:1:4: not valid YAML: the value cannot be read as int"),
        ("a: !!bool maybe\n", r"demo\.yaml:1:4: not valid YAML: the value cannot be read as bool"),
        ("a: !!timestamp never\n", r"demo\.yaml:1:4: not valid YAML: the value cannot be read as timestamp"),
        ("a: " + "[" * 2000 + "]" * 2000, r"demo\.yaml: mappings and lists lie within each other too deeply"),
        ("a: \x01\n", r"demo\.yaml: not valid YAML: .*special characters are not allowed"),
    ],
)
def test_what_is_wrong_with_the_file_is_one_line_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("item", ["[{}]", "{{<<: [{}]}}"])
def test_aliases_of_aliases_that_would_fill_the_memory_are_refused(tmp_path: Path, item: str) -> None:
    lines = ["v0: &v0 {a: 1}"]
    lines += [f"v{n}: &v{n} {item.format(', '.join([f'*v{n - 1}'] * 9))}" for n in range(1, 10)]
    with pytest.raises(ConfigError, match=r"demo\.yaml: not valid YAML: .* more than 100000 values"):
        read(tmp_path, "\n".join(lines))


def test_a_missing_file_gives_one_of_a_similar_name(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text("a: 1")
    with pytest.raises(ConfigError, match=r"there is no config file .*tinny\.yaml\. Did you mean .*tiny\.yaml\?"):
        read_config_file(tmp_path / "tinny.yaml")
    with pytest.raises(ConfigError, match=r"Did you mean .*tiny\.yaml\?"):
        read_config_file(tmp_path / "tiny")


def test_a_missing_file_with_nothing_similar_lists_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text("a: 1")
    with pytest.raises(ConfigError, match=r"there are: tiny\.yaml\."):
        read_config_file(tmp_path / "zebra.yaml")


def test_a_directory_is_no_config_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1")
    with pytest.raises(ConfigError, match=r"is a directory, not a config file. Did you mean .*config\.yaml"):
        read_config_file(tmp_path)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"demo\.yaml is no text in UTF-8 \(byte \d+\)"):
        read_config_file(tmp_path / "demo.yaml")
