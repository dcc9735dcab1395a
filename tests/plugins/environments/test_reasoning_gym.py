"""Tasks of reasoning-gym: real generators and verifiers."""

import pickle

import pytest

from rollstock import ConfigError, Sample
from rollstock.plugins.environments.reasoning_gym import ReasoningGym, ReasoningGymConfig

pytest.importorskip("reasoning_gym")
SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def environment(task="chain_sum", seed=0, **options):
    made = ReasoningGym(ReasoningGymConfig(task=task, **options))
    made.setup(seed)
    return made


@pytest.mark.parametrize("name", ["chain_sum", "leg_counting", "knights_knaves", "caesar_cipher", "base_conversion"])
def test_the_right_answer_scores_1_and_nonsense_less(name):
    made = environment(name, heldout_size=5, train_size=20)
    for split in ("train", "heldout"):
        task = made.task(split, 3)
        assert made.score(Sample(task=task, response=f" {task.answer}\n")) == 1.0
        assert made.score(Sample(task=task, response="@")) < 0.5


def test_partial_credit_is_the_verifiers():
    made = environment(options=SMALL)
    task = made.task("train", 0)
    assert 0 < made.score(Sample(task=task, response=f"It is {task.answer}")) < 1


def test_a_verifier_that_checks_instead_of_comparing():
    # Any valid tour counts; the generator keeps no single answer.
    made = environment("graph_color", heldout_size=2, train_size=5)
    task = made.task("train", 0)
    assert task.answer is None
    assert made.score(Sample(task=task, response="{}")) < 1.0


def test_splits_share_no_question_even_in_a_small_space():
    made = environment(options=SMALL, train_size=500, heldout_size=100)
    heldout = {made.task("heldout", i).metadata["entry"]["question"] for i in range(100)}
    train = {made.task("train", i).metadata["entry"]["question"] for i in range(500)}
    assert heldout.isdisjoint(train)
    assert len(train) > 30


def test_too_small_a_space_is_reported():
    options = {**SMALL, "allow_negation": False, "min_digits": 1, "max_digits": 1}
    made = environment("chain_sum", options=options, train_size=5, heldout_size=3000)
    with pytest.raises(ConfigError, match="too few different questions"):
        [made.task("train", i) for i in range(5)]


def test_tasks_are_a_function_of_config_split_and_index():
    one, other = environment(seed=0), environment(seed=1)
    for split in ("train", "heldout"):
        assert one.task(split, 7) == other.task(split, 7)
    assert environment(split_seed=1).task("train", 7) != one.task("train", 7)
    assert (one.num_tasks("train"), one.num_tasks("heldout")) == (10_000, 200)
    assert "chain_sum" in one.fingerprint()


def test_tasks_travel_to_reward_processes():
    made = environment()
    task = pickle.loads(pickle.dumps(made.task("train", 1)))
    assert environment().score(Sample(task=task, response=task.answer)) == 1.0


def test_prompts_and_tags():
    made = environment(options=SMALL, system="Think.", suffix=" Number only.", tag="answer")
    task = made.task("train", 0)
    assert task.prompt[0] == {"role": "system", "content": "Think."}
    assert task.prompt[1]["content"].endswith("= Number only.")
    assert made.score(Sample(task=task, response=f"hm <answer>\n{task.answer}\n</answer>")) == 1.0
    assert made.score(Sample(task=task, response=f"<answer>x</answer> <answer>{task.answer}</answer>")) == 1.0
    assert made.score(Sample(task=task, response=task.answer)) == 0.0
    assert isinstance(environment(chat=False).task("train", 0).prompt, str)


def test_no_held_out_tasks_on_request():
    made = environment(heldout_size=0)
    assert made.num_tasks("heldout") == 0
    assert made.task("train", 0).answer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "chainsum"}, "reasoning-gym has no dataset 'chainsum'. Did you mean 'chain_sum'?"),
        ({"task": "chain_sum", "options": {"min_term": 2}}, "has no option 'min_term'. Did you mean 'min_terms'?"),
        (
            {"task": "chain_sum", "options": {"min_terms": 5, "max_terms": 2}},
            "refuses .*max_terms must be >= min_terms",
        ),
        ({"task": "chain_sum", "options": {"min_terms": "x"}}, "refuses"),
    ],
)
def test_what_the_package_does_not_have_is_a_clear_error(options, message):
    with pytest.raises(ConfigError, match=message):
        environment(**options)


@pytest.mark.parametrize(
    "options", [{"options": {"seed": 3}}, {"options": {"size": 3}}, {"system": "s", "chat": False}]
)
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match=r"set by the environment|needs chat"):
        ReasoningGymConfig(task="chain_sum", **options)
