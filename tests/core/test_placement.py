"""In which order roles start, and which of them may share processes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstock import ConfigError, WorkerSpec
from rollstock.placement import start_order

Order = Callable[..., list[str]]


@pytest.fixture
def order(small_run: Callable[..., Any], tmp_path: Path) -> Order:
    """The order in which actor, rollout and a role that an extension brings are started, under some overrides."""

    def order(*overrides: str, **brought: Any) -> list[str]:
        judge = WorkerSpec(role="judge", factory=dict, **brought)
        return start_order(small_run(tmp_path / "run", *overrides), ["actor", "rollout"], {"judge": judge})

    return order


def test_a_role_starts_behind_the_one_whose_processes_it_shares(order: Order) -> None:
    assert order() == ["actor", "rollout", "judge"]
    assert order("roles.rollout.colocate_with=judge") == ["actor", "judge", "rollout"]
    assert order("roles.actor.colocate_with=rollout", colocate_with="actor") == ["rollout", "actor", "judge"]


def test_as_many_workers_may_share_the_processes_of_a_role_as_its_extension_starts(order: Order) -> None:
    shared = ("roles.rollout.colocate_with=judge", "roles.rollout.count=2")
    assert order(*shared, count=2) == ["actor", "judge", "rollout"]
    with pytest.raises(ConfigError, match=r"roles\.rollout\.count: 2 workers .* of 'judge', of which there are 1"):
        order(*shared)


def test_an_extension_may_not_bring_more_workers_than_there_are_processes_to_share(order: Order) -> None:
    with pytest.raises(ConfigError, match=r"roles\.judge\.count: 2 workers .* of 'actor', of which there are 1"):
        order(count=2, colocate_with="actor")
