"""Tokenizers by a config's `model` section, and what is said when there is none to be had."""

from pathlib import Path

import pytest

from rollstock.errors import ConfigError, UserError
from rollstock.interfaces.environment import Message, Sample, Task
from rollstock.schema import ModelSection
from rollstock.tokens import character_tokenizer, decode, encode_prompt, encode_sample, load_tokenizer


def test_a_list_of_characters_makes_a_tokenizer_of_single_characters() -> None:
    tokenizer = load_tokenizer(ModelSection(config={"model_type": "llama"}, tokenizer={"characters": "01="}))
    ids = encode_prompt(tokenizer, "10=")
    assert len(ids) == 3
    assert decode(tokenizer, ids) == "10="


def test_characters_that_are_missing_are_named_with_the_way_out() -> None:
    with pytest.raises(UserError) as caught:
        encode_prompt(character_tokenizer("01="), "1+é=1")
    assert "no token for '+', 'é', which '1+é=1' needs: add to model.tokenizer.characters" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"characters": ["a", "b"]}, "model.tokenizer.characters must be one text, such as '0123456789+=', not ['a'"),
        ({"characters": ""}, "model.tokenizer.characters: it must list at least one character"),
        ({"chars": "ab"}, "model.tokenizer.chars is not an option of model.tokenizer. Known: characters."),
        ({"characters": "ab", "size": 3}, "model.tokenizer.size is not an option of model.tokenizer"),
        ({}, "model.tokenizer: a model made from `model.config` needs a tokenizer"),
        (None, "model.tokenizer: a model made from `model.config` needs a tokenizer"),
        ("nowhere", "model.tokenizer: 'nowhere' does not exist; give a local directory"),
    ],
)
def test_what_makes_no_tokenizer_is_refused_by_name(given: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(ModelSection(config={"model_type": "llama"}, tokenizer=given))  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_a_directory_without_a_tokenizer_is_said_to_have_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(ModelSection(path=str(tmp_path)))
    assert str(caught.value) == (
        f"model.path: {str(tmp_path)!r} has no tokenizer (no tokenizer.json, for one); give a directory that has, with "
        "model.tokenizer=DIR"
    )


def test_a_file_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a file, not a directory"):
        load_tokenizer(ModelSection(path=str(tmp_path / "tokenizer.json")))


def test_a_broken_tokenizer_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{oops")
    with pytest.raises(ConfigError, match=r"^model\.path: no tokenizer could be read from"):
        load_tokenizer(ModelSection(path=str(tmp_path)))


def sample_of(
    response: str, *, prompt: object = "1+2=", turns: list[Message] | None = None, cut: bool = False
) -> Sample:
    task = Task(id="t", prompt=prompt)  # type: ignore[arg-type]
    return Sample(task=task, response=response, turns=turns or [], finish_reason="length" if cut else "stop")


def test_a_finished_sample_is_its_prompt_its_response_and_what_ends_it() -> None:
    tokenizer = character_tokenizer("0123456789+=")
    assert tokenizer.decode(encode_sample(tokenizer, sample_of("3"))) == "1+2=3<end>"
    assert tokenizer.decode(encode_sample(tokenizer, sample_of("3", cut=True))) == "1+2=3"
    assert encode_sample(tokenizer, sample_of("3", prompt=[5, 6])) == [5, 6, 4, 0]
    assert encode_sample(tokenizer, sample_of("")) == [*tokenizer("1+2=")["input_ids"], 0]


def test_a_conversation_is_encoded_turn_by_turn_as_the_policy_saw_it() -> None:
    tokenizer = character_tokenizer("0123456789+=ua:.")
    turns = [
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "4+4="},
        {"role": "assistant", "content": "8"},
    ]
    assert tokenizer.decode(encode_sample(tokenizer, sample_of("8", turns=turns))) == "1+2=3<end>4+4=8<end>"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% if m.role == 'assistant' %}<end>{% endif %}."
        "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    chat = sample_of("8", prompt=[{"role": "user", "content": "1+2="}], turns=turns, cut=True)
    assert tokenizer.decode(encode_sample(tokenizer, chat)) == "u:1+2=.a:3<end>.u:4+4=.a:8"
