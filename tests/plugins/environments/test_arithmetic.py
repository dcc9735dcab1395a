"""Arithmetic: right answers, disjoint splits, the same tasks in every process."""

import pytest

from rollstock import ConfigError, Sample
from rollstock.plugins.environments.arithmetic import Arithmetic, ArithmeticConfig

CHECK = {"add": int.__add__, "subtract": int.__sub__, "multiply": int.__mul__, "divide": int.__floordiv__}


def environment(seed=0, **options):
    made = Arithmetic(ArithmeticConfig(**options))
    made.setup(seed)
    return made


def tasks(made, split, limit=3000):
    count = made.num_tasks(split)
    return [made.task(split, i) for i in range(limit if count is None else count)]


def pair(task):
    """What must not be shared by the splits; of a division the operands are quotient and divisor."""
    a, b = task.metadata["operands"]
    return tuple(sorted((task.answer, b) if task.metadata["operation"] == "divide" else (a, b)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"operations": ["add", "subtract", "multiply", "divide"], "digits": 2},
        {"operations": ["subtract"], "negative": False},
        {"min_operand": -3, "max_operand": 3, "operations": ["multiply", "divide"]},
        {"digits": 3, "operations": ["add", "divide"]},
        {"digits": 9},
    ],
    ids=str,
)
def test_answers_are_right_and_splits_disjoint(options):
    made = environment(**options)
    pairs = {}
    for split in ("train", "heldout"):
        found = tasks(made, split)
        assert found
        for task in found:
            a, b = task.metadata["operands"]
            assert task.answer == CHECK[task.metadata["operation"]](a, b)
            assert task.metadata["operation"] != "divide" or a == task.answer * b
        pairs[split] = {pair(task) for task in found}
    assert pairs["train"].isdisjoint(pairs["heldout"])


def test_small_ranges_are_complete_and_every_task_is_there_once():
    made = environment(heldout_fraction=0.2)
    found = tasks(made, "train") + tasks(made, "heldout")
    assert len({task.id for task in found}) == len(found) == 100
    assert {tuple(task.metadata["operands"]) for task in found} == {(a, b) for a in range(10) for b in range(10)}
    assert len({pair(task) for task in tasks(made, "heldout")}) == 11  # of 55 pairs


def test_a_sum_and_its_reverse_are_on_one_side():
    heldout = {tuple(t.metadata["operands"]) for t in tasks(environment(), "heldout")}
    assert heldout == {(b, a) for a, b in heldout}


def test_a_pair_is_on_one_side_for_all_operations():
    made = environment(operations=["add", "multiply"])
    by_operation = {}
    for task in tasks(made, "heldout"):
        by_operation.setdefault(task.metadata["operation"], set()).add(pair(task))
    assert by_operation["add"] == by_operation["multiply"]


def test_no_negative_differences_unless_asked_for():
    answers = [task.answer for task in tasks(environment(operations=["subtract"], negative=False), "train")]
    assert min(answers) == 0
    assert min(t.answer for t in tasks(environment(operations=["subtract"]), "train")) < 0


@pytest.mark.parametrize("digits", [1, 6])
def test_tasks_are_a_function_of_config_split_and_index(digits):
    one, other = environment(digits=digits), environment(digits=digits)
    for split in ("train", "heldout"):
        assert [one.task(split, i) for i in (17, 3)] == [other.task(split, i) for i in (3, 17)][::-1]


def test_the_runs_seed_moves_no_task_between_the_splits():
    assert [t.id for t in tasks(environment(0), "heldout")] == [t.id for t in tasks(environment(1), "heldout")]
    large = [environment(seed, digits=5) for seed in (0, 1)]
    assert tasks(large[0], "heldout", 20) == tasks(large[1], "heldout", 20)
    assert tasks(large[0], "train", 20) != tasks(large[1], "train", 20)


def test_another_split_seed_holds_other_pairs_out():
    held = [{pair(t) for t in tasks(environment(split_seed=s), "heldout")} for s in (0, 1)]
    assert held[0] != held[1]
    assert environment(split_seed=0).fingerprint() != environment(split_seed=1).fingerprint()


def test_large_ranges_have_no_end_and_keep_the_fraction():
    made = environment(digits=4, heldout_fraction=0.25)
    assert made.num_tasks("train") is None
    sides = [made._side(a, a + 1) for a in range(4000)]
    assert 0.22 < sides.count("heldout") / len(sides) < 0.28


def test_prompts_as_chat_or_plain():
    plain = environment(chat=False, prompt="{a}{op}{b}=").task("train", 0)
    a, b = plain.metadata["operands"]
    assert plain.prompt == f"{a}+{b}="
    chat = environment(system="Be brief.").task("train", 0)
    assert chat.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"What is {a} + {b}? Answer with a number only."},
    ]


@pytest.mark.parametrize(
    ("response", "value"), [("{0}", 1.0), ("It is {0}.", 0.3), ("1000", 0.1), ("no idea", 0.0), ("", 0.0)]
)
def test_shaped_scores(response, value):
    made = environment()
    task = made.task("heldout", 0)
    assert made.score(Sample(task=task, response=response.format(task.answer))) == value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operations": []}, "operations is empty"),
        ({"min_operand": 5, "max_operand": 4}, "max_operand .4. is below min_operand .5."),
        ({"prompt": "{x}?"}, "may hold {a}, {op} and {b}"),
        ({"system": "x", "chat": False}, "needs chat: true"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ArithmeticConfig(**options)


def test_a_split_without_tasks_is_refused():
    with pytest.raises(ConfigError, match="no heldout task is left with operands from 3 to 3"):
        environment(min_operand=3, max_operand=3)
