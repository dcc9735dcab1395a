"""How many workers the scheduler `elastic` wants, and that it cuts batches as `dynamic_batch` does."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollstock import ConfigError, WorkerLoad
from rollstock.launch import train
from rollstock.plugins.schedulers.dynamic_batch import DynamicBatch, DynamicBatchConfig
from rollstock.plugins.schedulers.elastic import Elastic, ElasticConfig
from rollstock.testing import tiny_config


def load(
    utilisation: float, *, now: int = 4, queue: int = 1000, configured: int = 4, role: str = "rollout"
) -> WorkerLoad:
    return WorkerLoad(
        role=role, num_workers=now, queue_length=queue, utilisation=utilisation, num_configured=configured
    )


def at_once(**options: object) -> Elastic:
    return Elastic(ElasticConfig(patience=1, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (load(0.9), 8),  # 0.9 of 4 at an aim of 0.5 is 7.2
        (load(1.0, now=8), None),  # 200% is the most
        (load(1.0, now=2), 4),  # at most twice as many at a time
        (load(0.9, queue=40), 5),  # eight tasks for each
        (load(0.9, queue=32), None),
        (load(0.5), None),
        (load(0.3), None),
        (load(0.2), 2),
        (load(0.0), 1),
        (load(0.0, now=40, configured=40), 4),  # 10% is the least
        (load(0.0, now=1), None),
        (load(0.0, role="reward"), None),
        (WorkerLoad(role="rollout", num_workers=4, queue_length=1000, utilisation=1.0), 8),
    ],
)
def test_what_is_wanted(found: WorkerLoad, wanted: int | None) -> None:
    assert at_once().num_workers(found) == wanted


def test_it_waits_for_the_load_to_stay() -> None:
    made = Elastic(ElasticConfig(patience=3))
    said = [made.num_workers(load(share)) for share in (0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0)]
    assert said == [None, None, None, None, None, 1, None]
    said = [made.num_workers(load(share)) for share in (0.0, 0.9, 0.9, 0.9)]
    assert said == [None, None, None, 8]


def test_other_roles_and_shares_may_be_chosen() -> None:
    made = at_once(roles=["reward"], least=0.5, most=1.5)
    assert made.num_workers(load(0.0, role="reward")) == 2
    assert made.num_workers(load(1.0, role="reward")) == 6
    assert made.num_workers(load(1.0)) is None


def test_options_under_which_workers_would_come_and_go_are_refused() -> None:
    with pytest.raises(ValueError, match=r"idle \(0\.8\) must be below busy \(0\.7\)"):
        ElasticConfig(idle=0.8)


@pytest.mark.parametrize("roles", [[], ["rollout", "actor"]])
def test_roles_that_nobody_could_join_are_refused(roles: list[str]) -> None:
    with pytest.raises(ValueError, match="must name roles whose workers may join and leave"):
        ElasticConfig(roles=roles)


RAY = {"name": "ray", "dashboard": False}


@pytest.mark.parametrize(
    ("roles", "overrides", "said"),
    [
        ("[rollout, rolout]", (), "'rolout' is no role of this run .* Did you mean 'rollout'? Known: rollout, reward."),
        ("[reward]", ("roles.reward.colocate_with=rollout",), "'reward' is no role of this run .* There are none."),
        ("[rollout]", ("roles.rollout.colocate_with=actor",), "'rollout' is no role of this run .* Known: reward."),
        ("[rollout]", ("roles.rollout.devices=[0]",), "'rollout' is no role of this run .* Known: reward."),
    ],
)
def test_roles_whose_number_of_workers_cannot_change_are_refused_with_those_that_can(
    small_run: Callable[..., Any], tmp_path: Path, roles: str, overrides: Sequence[str], said: str
) -> None:
    chosen = f"scheduler={{name: elastic, roles: {roles}}}"
    with pytest.raises(ConfigError) as caught:
        train(small_run(tmp_path / "run", chosen, *overrides, executor=RAY))
    first, _, last = said.partition(" .* ")
    assert str(caught.value).startswith(f"scheduler.roles: {first} whose number of workers can change")
    assert str(caught.value).endswith(last)
    assert not (tmp_path / "run").exists()


def test_every_role_that_nobody_can_change_is_named_and_those_that_can_are_taken(tmp_path: Path) -> None:
    made, config = at_once(roles=["rollout", "judge", "critics"]), tiny_config(tmp_path)
    assert [problem.split("'")[1] for problem in made.validate(config, ["rollout"])] == ["judge", "critics"]
    assert made.validate(config, ["rollout", "judge", "critics"]) == []


def test_it_cuts_batches_as_dynamic_batch() -> None:
    lengths, groups = [5, 900, 31, 31, 2, 450, 77, 1], [0, 0, 1, 1, 2, 2, 3, 3]
    own = Elastic(ElasticConfig(tokens_per_micro_batch=500))
    other = DynamicBatch(DynamicBatchConfig(tokens_per_micro_batch=500))
    for num_parts in (1, 2):
        cut = own.micro_batches(lengths, groups=groups, num_parts=num_parts)
        assert cut == other.micro_batches(lengths, groups=groups, num_parts=num_parts)


def test_an_executor_that_cannot_change_the_number_is_named(small_run, tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="'elastic' changes the number of workers .* the executor 'local' cannot"):
        train(small_run(tmp_path / "run", scheduler={"name": "elastic"}))
    assert not (tmp_path / "run").exists()
