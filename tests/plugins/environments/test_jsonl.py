"""Tasks from files: fields, splits, and errors that name the row."""

import json

import pytest

from rollstock import ConfigError, RunError, Sample
from rollstock.plugins.environments.jsonl import Jsonl, JsonlConfig

pyarrow = pytest.importorskip("pyarrow")


def write(path, rows):
    if path.suffix == ".parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def environment(path, **options):
    made = Jsonl(JsonlConfig(path=str(path), **options))
    made.setup(0)
    return made


def tasks(made, split):
    return [made.task(split, i) for i in range(made.num_tasks(split))]


def rows_of(count):
    return [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(count)]


@pytest.fixture(params=["tasks.jsonl", "tasks.parquet"])
def file(request, tmp_path):
    return tmp_path / request.param


def test_rows_become_tasks(file):
    made = environment(write(file, rows_of(50)), heldout_fraction=0.2)
    found = tasks(made, "train") + tasks(made, "heldout")
    assert len(found) == 50
    by_id = {task.id: task for task in found}
    assert by_id["tasks:8"].prompt == [{"role": "user", "content": "What is 7 + 1?"}]
    assert by_id["tasks:8"].answer == "8"
    assert by_id["tasks:8"].metadata == {"row": 8}


def test_splits_are_disjoint_near_the_fraction_and_do_not_depend_on_the_runs_seed(file):
    path = write(file, rows_of(1000))
    made = environment(path, heldout_fraction=0.1)
    heldout = [task.id for task in tasks(made, "heldout")]
    assert 70 <= len(heldout) <= 130
    assert set(heldout).isdisjoint(task.id for task in tasks(made, "train"))
    again = Jsonl(JsonlConfig(path=path, heldout_fraction=0.1))
    again.setup(99)
    assert [task.id for task in tasks(again, "heldout")] == heldout
    assert [task.id for task in tasks(environment(path, split_seed=1), "heldout")] != heldout


def test_equal_prompts_fall_on_one_side(file):
    rows = [{"prompt": f"q{i % 20}", "answer": str(i)} for i in range(200)]
    made = environment(write(file, rows), heldout_fraction=0.3)
    sides = [{str(task.prompt) for task in tasks(made, split)} for split in ("train", "heldout")]
    assert sides[0].isdisjoint(sides[1])


def test_rows_keep_their_side_when_others_are_added(tmp_path):
    few = environment(write(tmp_path / "a.jsonl", rows_of(100)), heldout_fraction=0.3)
    more = environment(write(tmp_path / "b.jsonl", rows_of(200)), heldout_fraction=0.3)
    held = [{str(t.prompt) for t in tasks(made, "heldout")} for made in (few, more)]
    assert held[0] <= held[1]


def test_a_tiny_file_still_holds_one_row_out(tmp_path):
    made = environment(write(tmp_path / "a.jsonl", rows_of(3)), heldout_fraction=0.01)
    assert (made.num_tasks("train"), made.num_tasks("heldout")) == (2, 1)


def test_nothing_is_held_out_on_request(tmp_path):
    made = environment(write(tmp_path / "a.jsonl", rows_of(3)), heldout_fraction=0.0)
    assert (made.num_tasks("train"), made.num_tasks("heldout")) == (3, 0)


def test_a_file_of_held_out_tasks(tmp_path):
    train, heldout = (
        write(tmp_path / "a.jsonl", rows_of(5)),
        write(tmp_path / "b.parquet", [{"prompt": "x", "answer": "1"}]),
    )
    made = environment(train, heldout_path=heldout)
    assert (made.num_tasks("train"), made.num_tasks("heldout")) == (5, 1)
    assert made.task("heldout", 0).id == "b:1"


def test_a_row_in_both_files_is_refused_or_dropped(tmp_path):
    train, heldout = write(tmp_path / "a.jsonl", rows_of(5)), write(tmp_path / "b.jsonl", rows_of(5)[3:4])
    with pytest.raises(ConfigError, match=r"a.jsonl, row 4: the prompt is also in .*b.jsonl, row 1; on_overlap: drop"):
        environment(train, heldout_path=heldout).num_tasks("train")
    made = environment(train, heldout_path=heldout, on_overlap="drop")
    assert [task.id for task in tasks(made, "train")] == ["a:1", "a:2", "a:3", "a:5"]


def test_dotted_fields_ids_metadata_and_templates(file):
    rows = [{"q": {"text": f"{i}?"}, "gold": [{"value": i}], "key": f"k{i}", "level": "easy"} for i in range(4)]
    made = environment(
        write(file, rows),
        template="Level {level}: {q.text} {{sic}}",
        answer="gold.0.value",
        id="key",
        metadata=["level"],
        match="number",
        system="Be brief.",
        heldout_fraction=0.0,
    )
    task = made.task("train", 2)
    assert task.id == "k2"
    assert task.answer == 2
    assert task.metadata == {"row": 3, "level": "easy"}
    assert task.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Level easy: 2? {sic}"},
    ]


def test_chat_messages_are_taken_as_they_are(file):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    made = environment(write(file, [{"prompt": messages, "answer": "a"}] * 2), heldout_fraction=0.0)
    assert made.task("train", 0).prompt == messages


def test_plain_prompts(file):
    made = environment(write(file, rows_of(2)), chat=False, heldout_fraction=0.0)
    assert made.task("train", 1).prompt == "What is 1 + 1?"


def test_blank_lines_count_as_rows_but_are_no_tasks(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"prompt": "p", "answer": "a"}\n\n  \n{"prompt": "q", "answer": "b"}')
    assert [task.id for task in tasks(environment(path, heldout_fraction=0.0), "train")] == ["a:2", "a:5"]


def test_scores_by_match(tmp_path):
    made = environment(write(tmp_path / "a.jsonl", rows_of(2)), match="number", inside=0.3, heldout_fraction=0.0)
    task = made.task("train", 0)
    assert made.score(Sample(task=task, response="1")) == 1.0
    assert made.score(Sample(task=task, response="so 1")) == 0.3


def test_a_row_without_an_answer_is_not_scored(tmp_path):
    rows = [{"prompt": "p", "answer": None}, {"prompt": "q", "answer": "a"}]
    made = environment(write(tmp_path / "a.jsonl", rows), heldout_fraction=0.0)
    assert made.score(Sample(task=made.task("train", 0), response="x")) is None
    made = environment(tmp_path / "a.jsonl", answer=None, match="none", heldout_fraction=0.0)
    assert made.score(Sample(task=made.task("train", 1), response="a")) is None


def test_a_scoring_process_reads_no_file(tmp_path):
    made = environment(write(tmp_path / "a.jsonl", rows_of(2)))
    task = made.task("train", 0)
    other = environment(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").unlink()
    assert other.score(Sample(task=task, response=task.answer)) == 1.0


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ("{", {}, "not JSON: Expecting property name"),
        ('[{"prompt": "p"}]', {}, "a row is an object with fields, not list"),
        ('"text"', {}, "a row is an object with fields, not str"),
        ("\udcff", {}, "not UTF-8 text"),
        ('{"promt": "p", "answer": "a"}', {}, "no field 'prompt'. Did you mean 'promt'?"),
        ('{"prompt": "p"}', {}, "no field 'answer'"),
        ('{"prompt": 3, "answer": "a"}', {}, "must be a text or a list of messages, not 3"),
        ('{"prompt": "  ", "answer": "a"}', {}, "must be a text or a list of messages"),
        ('{"prompt": [], "answer": "a"}', {}, "empty list of messages"),
        ('{"prompt": [{"role": "user"}], "answer": "a"}', {}, "message 1 of 'prompt' needs role and content"),
        ('{"prompt": "p", "answer": "a"}', {"match": "number"}, "the right answer 'a' is not a number"),
        ('{"prompt": "p", "answer": "E"}', {"match": "choice"}, "'E' is not among the choices A, B, C, D"),
        ('{"prompt": "p", "answer": {}}', {}, "neither a text nor a number"),
        ('{"prompt": "p", "answer": "a"}', {"id": "key"}, "no field 'key'"),
    ],
)
def test_every_error_names_the_row(tmp_path, line, options, message):
    path = tmp_path / "a.jsonl"
    good = {"prompt": "q", "answer": "A" if options.get("match") == "choice" else "1", "key": "k"}
    path.write_bytes(f"{json.dumps(good)}\n\n{line}\n".encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        environment(path, **options).num_tasks("train")
    assert f"{path}, row 3: " in str(caught.value)
    assert message in str(caught.value)


def test_a_json_array_gets_a_hint(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[\n{"prompt": "p"},\n]')
    with pytest.raises(ConfigError, match=r"row 1: not JSON.*one JSON array: write one object a line"):
        environment(path).num_tasks("train")


def test_parquet_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"has no column 'answer'. Did you mean 'answers'"):
        environment(write(tmp_path / "a.parquet", [{"prompt": "p", "answers": "a"}])).num_tasks("train")
    (tmp_path / "b.parquet").write_text("text")
    with pytest.raises(ConfigError, match="is not a parquet file"):
        environment(tmp_path / "b.parquet").num_tasks("train")
    rows = [{"prompt": "p", "answer": "a"}, {"prompt": None, "answer": "a"}]
    with pytest.raises(ConfigError, match=r"c.parquet, row 2: 'prompt' must be a text"):
        environment(write(tmp_path / "c.parquet", rows)).num_tasks("train")


def test_a_missing_file_is_reported_with_its_neighbour(tmp_path, monkeypatch):
    write(tmp_path / "tasks.jsonl", rows_of(1))
    with pytest.raises(
        ConfigError, match=r"environment.path: there is no file .*task.jsonl'.*Did you mean .*tasks.jsonl'"
    ):
        environment(tmp_path / "task.jsonl")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"looked for in {tmp_path}"):
        environment("nothing.jsonl")
    with pytest.raises(ConfigError, match="is a directory"):
        environment(tmp_path)
    with pytest.raises(ConfigError, match=r"environment.heldout_path: there is no file"):
        environment(tmp_path / "tasks.jsonl", heldout_path="no.jsonl")


def test_an_unknown_suffix_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer")
    with pytest.raises(ConfigError, match=r"ends in '.csv'; rows are read from .jsonl and .parquet"):
        environment(tmp_path / "a.csv").num_tasks("train")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_refused(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ConfigError, match="has 0 rows"):
        environment(tmp_path / "a.jsonl").num_tasks("train")


def test_a_file_that_changes_during_the_run_is_noticed(tmp_path):
    path = tmp_path / "a.jsonl"
    made = environment(write(path, rows_of(20)), heldout_fraction=0.0)
    assert made.num_tasks("train") == 20
    path.write_text("something shorter\n" * 30)
    with pytest.raises(RunError, match="was changed while the run used it"):
        made.task("train", 10)


def test_the_fingerprint_tells_files_and_splits_apart(file):
    made = environment(write(file, rows_of(20)))
    first = made.fingerprint()
    assert first == environment(file).fingerprint()
    assert first != environment(file, split_seed=1).fingerprint()
    write(file, rows_of(21))
    assert first != environment(file).fingerprint()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat": False, "system": "s"}, "needs chat: true"),
        ({"answer": None}, "needs the field of the right answer"),
        ({"template": "{"}, "a brace that is meant is written twice"),
        ({"template": "no field"}, "needs a row's field in braces"),
        ({"template": "{}"}, "needs a row's field in braces"),
        ({"extract": "("}, "not a regular expression"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        JsonlConfig(path="a.jsonl", **options)
