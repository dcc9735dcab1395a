"""A package of its own brings an algorithm with a new option and a new column, and the extension that fills it.

Nothing of the core names either: both come from metadata, a config dataclass, `needs` and `provides`.
"""

import pytest

from rollstock import UserError
from rollstock.testing import check_algorithm, read_metrics, tiny_run

ALGORITHM = '''
"""Rewards short responses by a column that an extension measures."""

from dataclasses import dataclass

from rollstock import Algorithm, hookimpl, option


@dataclass(kw_only=True)
class BrevityConfig:
    brevity_weight: float = option(1.0, "weight of brevity beside the score", minimum=0)


class Brevity(Algorithm[BrevityConfig]):
    needs = frozenset({"brevity"})

    def advantages(self, batch):
        bonus = self.config.brevity_weight * batch.brevity[:, None] * batch.mask
        return {"advantages": batch.scores[:, None] * batch.mask + bonus, "bonus": bonus}

    def loss(self, micro):
        return micro.loss(-micro.advantages * micro.logprobs, {"actor/bonus": micro.mean(micro.bonus)})


@hookimpl
def rollstock_algorithm():
    return Brevity
'''

EXTENSION = '''
"""Measures brevity."""

from rollstock import Extension, NoOptions, hookimpl


class Stopwatch(Extension[NoOptions]):
    provides = frozenset({"brevity"})

    @hookimpl(wrapper=True)
    def rollstock_prepare(self, run, batch):
        done = yield
        batch["brevity"] = 0 * batch.scores + 0.25
        return done


@hookimpl
def rollstock_extension():
    return Stopwatch
'''


@pytest.fixture
def package(site):
    """The package, installed."""
    site.install(
        "brief",
        {"algorithm:brevity": "brief_algorithm", "extension:stopwatch": "brief_extension"},
        {"brief_algorithm": ALGORITHM, "brief_extension": EXTENSION},
    )


@pytest.fixture
def play(package, tmp_path):
    """A run with the algorithm: what its loss saw of the column, step by step."""

    def play(*overrides, extensions=("stopwatch",)):
        sections = {"algorithm": {"name": "brevity"}, "extensions": list(extensions)}
        tiny_run(tmp_path / "run", sections, overrides)
        return [row["metrics"]["actor/bonus"] for row in read_metrics(tmp_path / "run") if "metrics" in row]

    return play


def test_its_option_and_its_column_reach_the_loss(play):
    assert play("algorithm.brevity_weight=8.0") == [8.0 * 0.25] * 2


def test_without_the_extension_the_run_is_refused_by_the_column_s_name(play):
    with pytest.raises(UserError, match="algorithm 'brevity' needs the column 'brevity', which no role and no ext"):
        play(extensions=())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.brevity_wait=2.0", "brevity_weight"),
        ("algorithm.brevity_weight=-1", "at least 0"),
        ("algorithm.brevity_weight=much", "brevity_weight"),
    ],
)
def test_its_option_is_checked_as_those_of_built_in_ones_are(play, override, message):
    with pytest.raises(UserError, match=message):
        play(override)


def test_the_kit_checks_it_with_made_up_values_of_its_column(package):
    report = check_algorithm("brevity", columns={"brevity": lambda batch: 0.25 + 0 * batch.scores})
    assert "slicing" in report.passed
