"""Rewards by rule, alone and in a real reward process."""

import sys

import pytest

from rollstock import ConfigError, Sample, Task, UserError
from rollstock.plugins.environments.arithmetic import Arithmetic
from rollstock.plugins.rewards.environment import EnvironmentReward
from rollstock.plugins.rewards.rule import Rule, RuleConfig
from rollstock.roles.reward import RewardWorker


def sample(response, answer="7", *, finish_reason="stop", **metadata):
    return Sample(
        task=Task(id="t", prompt="p", answer=answer, metadata=metadata), response=response, finish_reason=finish_reason
    )


def rule(**options):
    made = Rule(RuleConfig(**options))
    made.setup(Arithmetic())
    return made


def value(response, answer="7", *, metadata=None, finish_reason="stop", **options):
    return rule(**options).score(sample(response, answer, finish_reason=finish_reason, **(metadata or {})))


@pytest.mark.parametrize(
    ("kind", "response", "answer", "expected"),
    [
        ("exact", " 7 ", "7", 1.0),
        ("exact", "7!", "7", 0.0),
        ("number", "7.0", "7", 1.0),
        ("number", "it is 7", "7", 0.3),
        ("number", "8", "7", 0.1),
        ("contains", "x 7 y", "7", 0.3),
        ("contains", "77", "7", 0.0),
        ("choice", "(B)", "B", 1.0),
        ("choice", "I say C", "B", 0.0),
    ],
)
def test_kinds(kind, response, answer, expected):
    assert value(response, answer, kind=kind, inside=0.3, wrong=0.1) == expected


def test_the_answer_may_be_in_the_metadata():
    made = rule(kind="number", answer="solution.final")
    assert made.score(sample("9", "5", solution={"final": 9})) == 1.0
    assert made.score(sample("5", "5", solution={"final": 9})) == 0.0
    assert made.score(sample("5", "5")) is None


@pytest.mark.parametrize(
    ("pattern", "response", "expected"),
    [
        (r"^\d+$", "7", 1.0),
        (r"^\d+$", "seven", 0.0),
        (r"answer: (\w+)", "answer: 7", 1.0),
        (r"answer: (\w+)", "answer: 5, answer: 7", 1.0),
        (r"answer: (\w+)", "answer: 8", 0.1),
        (r"answer: (\w+)", "7", 0.0),
    ],
)
def test_patterns(pattern, response, expected):
    assert value(response, kind="regex", pattern=pattern, wrong=0.1) == expected


def test_a_pattern_without_a_group_needs_no_answer():
    assert value("7", None, kind="regex", pattern=r"\d") == 1.0
    assert value("7", None, kind="regex", pattern=r"(\d)") is None


@pytest.mark.parametrize(
    ("abstain_on", "options", "expected"),
    [
        (["no_answer"], {"response": "7", "answer": None}, None),
        (["empty"], {"response": " \n"}, None),
        ([], {"response": " \n"}, 0.0),
        (["length"], {"response": "7", "finish_reason": "length"}, None),
        ([], {"response": "7", "finish_reason": "length"}, 1.0),
        (["no_match"], {"response": "7", "extract": "#(.*)"}, None),
        ([], {"response": "7", "extract": "#(.*)"}, 0.0),
        (["no_match"], {"response": "#7", "extract": "#(.*)"}, 1.0),
    ],
)
def test_abstention_is_none_and_not_0(abstain_on, options, expected):
    assert value(abstain_on=abstain_on, **options) == expected


def test_no_answer_and_no_abstention_is_an_error():
    with pytest.raises(ValueError, match="task 't' has no answer to compare with"):
        value("7", None, abstain_on=[])


def test_a_function_of_a_module_or_a_file(tmp_path, monkeypatch):
    source = (
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Scale:\n    factor: float\n"
        "def length(sample, factor=1):\n    return Scale(factor).factor * len(sample.response)\n"
        "def silent(sample):\n    return None\n"
        "class Judge:\n    @staticmethod\n    def verdict(sample):\n"
        "        return sample.response == sample.task.answer\n"
    )
    (tmp_path / "my_rewards.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    for where in ("my_rewards", str(tmp_path / "my_rewards.py")):
        assert value("abc", kind="function", function=f"{where}:length", arguments={"factor": 2}) == 6.0
        assert value("abc", kind="function", function=f"{where}:silent") is None
        assert value("7", kind="function", function=f"{where}:Judge.verdict") == 1.0
        with pytest.raises(ConfigError, match=r"has no function 'lenght'. Did you mean 'length'"):
            rule(kind="function", function=f"{where}:lenght")
    sys.modules.pop("my_rewards", None)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", "not of the form module:name"),
        (":f", "not of the form module:name"),
        ("no_such_module:f", r"neither installed nor on PYTHONPATH. For a file, write path/to/no_such_module.py:name"),
        ("missing/file.py:f", "there is no file 'missing/file.py'"),
        ("math:pi", "math has no function 'pi'"),
    ],
)
def test_a_function_that_is_not_there(function, message):
    with pytest.raises(ConfigError, match=message):
        rule(kind="function", function=function)


def test_a_file_that_does_not_run(tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    with pytest.raises(ConfigError, match=r"broken.py does not run: ModuleNotFoundError: .*no_such_package"):
        rule(kind="function", function=f"{tmp_path / 'broken.py'}:f")


def test_a_file_that_exits(tmp_path, monkeypatch):
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit('needs a GPU')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"leaving.py does not run: SystemExit: needs a GPU"):
        rule(kind="function", function=f"{tmp_path / 'leaving.py'}:f")
    with pytest.raises(ConfigError, match=r"cannot import 'leaving': SystemExit: needs a GPU"):
        rule(kind="function", function="leaving:f")


@pytest.mark.parametrize("ending", ["sys.exit('needs a GPU')", "os._exit(3)"])
def test_a_file_that_ends_its_process_is_named_with_its_reward(tmp_path, ending):
    file = tmp_path / "leaving.py"
    file.write_text(f"import os, sys\n{ending}\n")
    with pytest.raises(UserError) as caught:
        RewardWorker(
            environment={"name": "arithmetic"},
            rewards=[{"name": "rule", "kind": "function", "function": f"{file}:judge"}],
            blocked=[],
            seed=0,
            timeout_s=30.0,
            num_processes=2,
        )
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert f"reward 'rule' (kind: function, function: {file}:judge)" in told
    assert ("needs a GPU" if "sys" in ending else "exit code 3") in told


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "regex"},
        {"kind": "function"},
        {"pattern": "x"},
        {"function": "m:f"},
        {"kind": "regex", "pattern": "("},
    ],
)
def test_options_that_do_not_belong_together_are_refused(options):
    with pytest.raises(ValueError, match=r"belong together|not a regular expression"):
        RuleConfig(**options)


def test_the_environments_own_score():
    environment = Arithmetic()
    environment.setup(0)
    reward = EnvironmentReward()
    reward.setup(environment)
    task = environment.task("train", 0)
    assert reward.score(Sample(task=task, response=str(task.answer))) == 1.0
    assert reward.score(Sample(task=task, response="999")) == 0.1


def test_a_hanging_function_of_the_users_is_ended_and_named(tmp_path, caplog):
    (tmp_path / "mine.py").write_text(
        "import time\ndef judge(sample):\n    while sample.response == 'hang':\n        pass\n"
        "    return None if sample.response == 'skip' else float(sample.response)\n"
    )
    worker = RewardWorker(
        environment={"name": "arithmetic"},
        rewards=[
            {"name": "rule", "kind": "function", "function": f"{tmp_path / 'mine.py'}:judge", "weight": 2.0},
            {"name": "environment"},
        ],
        blocked=[],
        seed=0,
        timeout_s=1.0,
        num_processes=2,
    )
    try:
        samples = [sample(response, 3) for response in ("1", "hang", "bad", "3", "skip")]
        scores = worker.score(samples, 4)
    finally:
        worker.close()
    assert scores.totals == [2.1, None, None, 7.0, 0.0]
    assert [part["rule"] for part in scores.parts] == [1.0, None, None, 3.0, None]
    counts = {
        name: scores.metrics[f"reward/num_{name}"].value for name in ("abstained", "raised", "timed_out", "unscored")
    }
    assert counts == {"abstained": 1, "raised": 1, "timed_out": 1, "unscored": 2}
    assert "reward 'rule' of task 't' (step 4) timed out: no answer within 1 s" in caplog.text
    assert (
        "reward 'rule' of task 't' (step 4) raised: ValueError: could not convert string to float: 'bad'" in caplog.text
    )
