"""The two-turn environment of the tests, through the plugin manager and in a reward process."""

import functools
from pathlib import Path

import pytest

from rollstock import Environment, Sample
from rollstock.manager import make_manager
from rollstock.sandbox import Sandbox
from rollstock.scoring import make_scorer


@pytest.fixture(autouse=True)
def package(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "packages" / "two_turn"))


@pytest.fixture
def environment():
    made = make_manager().create_as(Environment, {"name": "two_turn"})
    made.setup(0)
    return made


def play(environment, task, *guesses):
    """An episode: the turns that took place, and the environment's state."""
    turns, state = [], {}
    for guess in guesses:
        turns.append({"role": "assistant", "content": guess})
        reply = environment.respond(task, turns, state)
        if reply is None:
            break
        turns.append({"role": "user", "content": reply})
    return Sample(task=task, response=turns[-1]["content"], turns=turns, state=state)


def test_it_is_found_by_name_with_its_own_options(environment):
    assert environment.config.second == 0.5
    assert [environment.num_tasks(split) for split in ("train", "heldout")] == [8, 2]


@pytest.mark.parametrize(
    ("guesses", "replies", "value"),
    [
        (("4", "4"), [], 1.0),
        (("2", "4"), [" higher "], 0.5),
        (("9", "4"), [" lower "], 0.5),
        (("2", "3"), [" higher "], 0.0),
        (("?", "4"), [" higher "], 0.5),
        (("", ""), [" higher "], 0.0),
    ],
)
def test_episodes(environment, guesses, replies, value):
    sample = play(environment, environment.task("train", 3), *guesses)
    assert sample.task.answer == 4
    assert [turn["content"] for turn in sample.turns if turn["role"] == "user"] == replies
    assert environment.score(sample) == value


def test_reward_processes_find_it_too(environment):
    samples = [play(environment, environment.task("train", 3), *guesses) for guesses in (("4",), ("1", "4"))]
    factory = functools.partial(make_scorer, {"name": "two_turn", "second": 0.25}, [{"name": "environment"}], [], 0)
    with Sandbox(factory, name="rewards", limit=60) as sandbox:
        outcomes = sandbox.map([(0, sample) for sample in samples], names=["one", "two"])
    assert [outcome.value for outcome in outcomes] == [1.0, 0.25]
