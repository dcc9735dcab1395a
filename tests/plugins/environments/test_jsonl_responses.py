"""Responses that rows of a file hold: demonstrations and pairs, plain and as chat, and errors that name the row."""

import json

import pytest

from rollstock import ConfigError
from rollstock.build import choose
from rollstock.config import load_config
from rollstock.plugins.environments.jsonl import Jsonl, JsonlConfig
from rollstock.testing import check_environment

pyarrow = pytest.importorskip("pyarrow")


def write(path, rows):
    if path.suffix == ".parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def tasks(path, **options):
    made = Jsonl(JsonlConfig(path=str(path), heldout_fraction=0.0, **options))
    made.setup(0)
    return [made.task("train", i) for i in range(made.num_tasks("train"))]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.fixture(params=["rows.jsonl", "rows.parquet"])
def file(request, tmp_path):
    return tmp_path / request.param


def test_a_demonstration_in_plain_and_in_chat_form(file):
    path = write(file, [{"prompt": "1+1=", "solution": "2"}])
    (plain,) = tasks(path, response="solution", chat=False)
    assert (plain.prompt, plain.responses, plain.answer) == ("1+1=", ["2"], None)
    (chat,) = tasks(path, response="solution", system="Be brief.")
    assert chat.prompt == [{"role": "system", "content": "Be brief."}, user("1+1=")]
    assert chat.responses == ["2"]


def test_a_pair_is_the_chosen_response_and_then_the_rejected_one(file):
    path = write(file, [{"prompt": "1+1=", "bad": "3", "good": {"text": "2"}}])
    (task,) = tasks(path, chosen="good.text", rejected="bad")
    assert task.responses == ["2", "3"]


def test_to_say_nothing_may_be_what_was_rejected(file):
    rows = [{"prompt": "1+1=", "good": "2", "bad": ""}, {"prompt": "Hi", "good": "Yes?", "bad": ""}]
    found = tasks(write(file, rows), chosen="good", rejected="bad")
    assert [task.responses for task in found] == [["2", ""], ["Yes?", ""]]


def test_a_response_may_be_messages_with_or_without_the_prompt_before_it(file):
    row = {"prompt": "Hi", "chosen": [user("Hi"), assistant("Hello!")], "rejected": [assistant("What?")]}
    for options in ({}, {"system": "Be kind."}):
        (task,) = tasks(write(file, [row]), chosen="chosen", rejected="rejected", **options)
        assert task.responses == ["Hello!", "What?"]
        assert task.prompt[-1] == user("Hi")


def test_a_whole_conversation_is_cut_before_the_assistants_last_message(file):
    messages = [user("1+1?"), assistant("2"), user("And 2+2?"), assistant("4")]
    (task,) = tasks(write(file, [{"messages": messages}]), prompt="messages", response="messages")
    assert task.prompt == messages[:-1]
    assert task.responses == ["4"]


def test_the_prompt_of_a_pair_may_be_what_its_responses_begin_with(file):
    row = {"chosen": [user("Hi"), assistant("Hello!")], "rejected": [user("Hi"), assistant("What?")]}
    (task,) = tasks(write(file, [row]), prompt="chosen", chosen="chosen", rejected="rejected")
    assert task.prompt == [user("Hi")]
    assert task.responses == ["Hello!", "What?"]


def test_rows_with_responses_need_no_answer_and_keep_the_one_they_have(file):
    with_answer = write(file, [{"prompt": "1+1=", "solution": "It is 2", "answer": "2"}])
    (task,) = tasks(with_answer, response="solution", match="contains")
    assert (task.answer, task.responses) == ("2", ["It is 2"])


def test_an_answer_whose_field_was_named_is_not_optional(file):
    with pytest.raises(ConfigError, match="'right'"):
        tasks(write(file, [{"prompt": "1+1=", "solution": "2"}]), response="solution", answer="right")


def test_without_options_for_them_there_are_no_responses(file):
    (task,) = tasks(write(file, [{"prompt": "1+1=", "answer": "2", "response": "2"}]))
    assert task.responses == []


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "b"}, "no field 'chosen'"),
        ({"prompt": "b", "chosen": "", "rejected": "x"}, "'chosen' must be a text that is not empty"),
        ({"prompt": "b", "chosen": "y", "rejected": None}, "'rejected' must be a text"),
        ({"prompt": "b", "chosen": "y", "rejected": []}, "'rejected' is an empty list"),
        ({"prompt": "b", "chosen": "y", "rejected": [{"role": "assistant"}]}, "message 1 of 'rejected' needs role"),
        ({"prompt": "b", "chosen": [user("b")], "rejected": "x"}, "must be the assistant's, not the user's"),
        ({"prompt": "b", "chosen": [user("c"), assistant("y")], "rejected": "x"}, "are not the prompt"),
    ],
)
def test_errors_name_the_file_the_row_and_the_field(tmp_path, row, said):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a", "chosen": "y", "rejected": "x"}, row])
    with pytest.raises(ConfigError, match=f"rows.jsonl, row 2: .*{said}"):
        tasks(path, chosen="chosen", rejected="rejected")


def test_a_conversation_without_a_prompt_is_refused_with_its_row(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"messages": [assistant("Hello!")]}])
    with pytest.raises(ConfigError, match="row 1: .*no prompt"):
        tasks(path, prompt="messages", response="messages")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"chosen": "a"}, "both `chosen` and `rejected`"),
        ({"rejected": "a"}, "both `chosen` and `rejected`"),
        ({"response": "a", "chosen": "b", "rejected": "c"}, "not both"),
    ],
)
def test_half_a_pair_and_two_kinds_at_once_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        JsonlConfig(path="x", **options)


def test_a_mistake_in_the_options_names_the_place_in_the_config(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: {config: {model_type: llama}}\nalgorithm: dpo\nenvironment: {name: jsonl, path: x, chosen: a}\n"
    )
    with pytest.raises(ConfigError, match="config.yaml:3: environment is not valid: a pair has two responses"):
        choose(load_config(path))


def test_the_environment_with_pairs_keeps_the_promises_of_its_kind(tmp_path):
    rows = [{"prompt": f"{n}+1=", "good": str(n + 1), "bad": str(n)} for n in range(40)]
    report = check_environment(
        "jsonl", options={"path": write(tmp_path / "p.jsonl", rows), "chosen": "good", "rejected": "bad"}
    )
    assert report.passed
