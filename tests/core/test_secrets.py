"""Secrets are masked by name and by shape, and ordinary values are left alone."""

import logging
import os
import sys

import pytest

from rollstock.secrets import (
    MASK,
    MaskingFormatter,
    is_secret_name,
    known_secrets,
    mask_arguments,
    mask_secrets,
    mask_text,
)

SECRET = (
    "api_key WANDB_API_KEY wandb.api_key apikey hf_token HF_TOKEN token password passwd client_secret secret "
    "aws_secret_access_key private_key credentials Authorization auth-token"
)
ORDINARY = (
    "pad_token eos_token stop_token_ids max_new_tokens_per_turn num_key_value_heads prompt_key answer_key tokenizer "
    "token_budget secretary monkey learning_rate keep"
)


@pytest.mark.parametrize("name", SECRET.split())
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ORDINARY.split())
def test_names_of_ordinary_values(name: str) -> None:
    assert not is_secret_name(name)


def test_only_strings_are_masked_and_the_original_is_untouched() -> None:
    config = {
        "trackers": [
            {"name": "wandb", "api_key": "abc"},
            {"name": "x", "headers": {"Authorization": "Bearer abc"}},
        ],
        "sampling": {"max_new_tokens": 32, "token": 5, "eos_token": "</s>"},
        "tokens": ["one", "two"],
        "empty": {"password": "", "secret": None},
    }
    masked = mask_secrets(config)
    assert masked["trackers"][0] == {"name": "wandb", "api_key": MASK}
    assert masked["trackers"][1]["headers"]["Authorization"] == MASK
    assert masked["sampling"] == config["sampling"]
    assert masked["tokens"] == [MASK, MASK]
    assert masked["empty"] == config["empty"]
    assert config["trackers"][0]["api_key"] == "abc"  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("login with hf_abcdefghijklmnopqrst now", f"login with {MASK} now"),
        ("https://user:pa55@host/path", f"https://{MASK}@host/path"),
        ("Authorization: Bearer abcdef.ghijkl-mnop", f"Authorization: Bearer {MASK}"),
        ("https://host:8080/path?x=a@b", "https://host:8080/path?x=a@b"),
        ("the reward is 0.5", "the reward is 0.5"),
    ],
)
def test_well_known_shapes_are_masked_in_text(text: str, expected: str) -> None:
    assert mask_text(text) == expected


def test_command_lines() -> None:
    command = ["rollstock", "train", "a.yaml", "trackers.0.api_key=abc", "--hf-token", "abc", "--password=x", "seed=3"]
    masked = [
        "rollstock",
        "train",
        "a.yaml",
        f"trackers.0.api_key={MASK}",
        "--hf-token",
        MASK,
        f"--password={MASK}",
        "seed=3",
    ]
    assert mask_arguments(command) == masked


def test_what_is_logged_is_masked_when_it_is_finished_tracebacks_included(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKER_API_KEY", "a-key-of-no-known-shape")
    try:
        raise ValueError("the key a-key-of-no-known-shape, or rather from-the-config, was refused")
    except ValueError:
        record = logging.LogRecord("x", 20, "", 0, "using %s", ("hf_abcdefghijklmnopqrst",), sys.exc_info())
    text = MaskingFormatter("%(message)s", known_secrets({"trackers": [{"api_key": "from-the-config"}]})).format(record)
    assert text.startswith(f"using {MASK}\nTraceback")
    assert text.endswith(f"ValueError: the key {MASK}, or rather {MASK}, was refused")


def test_known_secrets_are_those_with_a_secrets_name_and_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"A_PASSWORD": "short", "B_TOKEN": "long enough", "C": "no secret at all"})
    assert known_secrets({"api_key": ["longer than the other"], "name": "nothing to hide"}) == [
        "longer than the other",
        "long enough",
    ]
    assert (
        mask_arguments(["x=[{api_key: longer than the other}]"], known_secrets({"api_key": "longer than the other"}))[0]
        == f"x=[{{api_key: {MASK}}}]"
    )
