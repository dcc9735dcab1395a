"""The local executor: calls that nobody waits for, results handed on, and results that do not depend on how many
workers there are."""

from concurrent.futures import Future
from pathlib import Path

import pytest

from rollstock import ConfigError, PluginError, RunError, WorkerSpec
from rollstock.dispatch import register
from rollstock.launch import train
from rollstock.plugins.executors.local import Local

from .conftest import assert_same, small


class Worker:
    def __init__(self, *, rank: int, world_size: int) -> None:
        self.rank = rank
        self.data_parallel_rank = rank // 2

    @register(dispatch="rank_zero")
    def make(self) -> list[int]:
        return [1, 2, 3, 4, 5]

    @register(dispatch="data_parallel", places=True)
    def double(self, numbers: list[int], places: list[int] | None = None) -> list[tuple[int, int, int | None]]:
        where = places or [None] * len(numbers)
        return [(2 * number, self.rank, place) for number, place in zip(numbers, where, strict=True)]

    @register(dispatch="all_gather")
    def ranks(self) -> int:
        return self.rank

    @register(sync=False)
    def later(self) -> str:
        return "now"

    @register(role="other")
    def others(self) -> None:
        raise AssertionError


@pytest.fixture
def group():
    executor = Local()
    yield executor.start(WorkerSpec(role="mine", factory=Worker, count=4))
    executor.shutdown()


def test_groups_of_ranks_share_a_part_and_their_first_answers(group) -> None:
    found = group.call("double", group.submit("make"))
    assert found == [(2, 0, 0), (4, 0, 1), (6, 2, 2), (8, 2, 3), (10, 2, 4)]


def test_all_gather_gives_what_every_rank_says(group) -> None:
    assert group.call("ranks") == [0, 1, 2, 3]


def test_a_method_that_nobody_waits_for_gives_a_future(group) -> None:
    found = group.call("later")
    assert isinstance(found, Future)
    assert found.result() == "now"


def test_a_method_of_another_role_is_refused(group) -> None:
    with pytest.raises(RunError, match="the role 'mine' has no method 'others'; these have: other"):
        group.call("others")


def test_results_do_not_depend_on_how_many_workers_generate_and_score(tmp_path: Path) -> None:
    rewards = [{"name": "environment"}, {"name": "rule", "weight": 0.5}]
    train(small(tmp_path / "one", rewards=rewards))
    train(small(tmp_path / "many", "roles.rollout.count=3", "roles.reward.count=2", rewards=rewards))
    assert_same(tmp_path / "many", tmp_path / "one", other_counts=True)


@pytest.mark.usefixtures("judged")
def test_an_extension_brings_a_role_and_the_config_says_how_many(tmp_path: Path) -> None:
    train(small(tmp_path / "one", extensions=["judged"]))
    train(small(tmp_path / "many", "roles.judge.count=3", extensions=["judged"]))
    train(small(tmp_path / "without"))
    assert_same(tmp_path / "many", tmp_path / "one")
    with pytest.raises(AssertionError):
        assert_same(tmp_path / "one", tmp_path / "without")


@pytest.mark.usefixtures("judged")
def test_a_role_that_nobody_brings_or_two_bring_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"roles\.jugde: this run has no such role\. Did you mean 'judge'"):
        train(small(tmp_path / "run", "roles.jugde.count=3", extensions=["judged"]))
    with pytest.raises(ConfigError, match=r"roles\.judge: this run has no such role"):
        small(tmp_path / "run", "roles.judge.count=3")
    with pytest.raises(PluginError, match="brings the role 'judge', which extension:judged has already"):
        train(small(tmp_path / "run", extensions=["judged", "judged"]))
