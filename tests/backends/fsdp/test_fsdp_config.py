"""What is wrong with a config of several processes is said before anything is started."""

from pathlib import Path
from typing import Any

import pytest

from rollstock import ConfigError
from rollstock.backends.fsdp.backend import FSDPBackend
from rollstock.backends.fsdp.config import FSDPConfig
from rollstock.build import choose
from rollstock.doctor.config import examine_config
from rollstock.testing import tiny_config

FSDP = ["backend={name: fsdp}", "executor=ray"]
HYBRID = ["backend={name: fsdp, sharding_strategy: HYBRID, replicas: 3}", "executor=ray"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([*HYBRID, "roles.actor.count=4"], "3 copies cannot have equal shares of 4 processes; choose a divisor"),
        ([*HYBRID, "roles.actor.count=3"], "nothing is sharded; say sharding_strategy: NO_SHARD"),
        ([*HYBRID], "3 copies cannot have equal shares of 1 processes"),
        (
            ["backend={name: fsdp, sharding_strategy: HYBRID}", "executor=ray", "roles.actor.count=3"],
            "2 copies cannot have equal shares of 3 processes",
        ),
        (
            ["backend={name: fsdp, replicas: 2}", "executor=ray", "roles.actor.count=4"],
            "backend.replicas: 2 would change nothing: only HYBRID counts copies, and sharding_strategy: FULL keeps "
            "one copy; leave it out, or say sharding_strategy: HYBRID",
        ),
        (
            ["backend={name: fsdp, sharding_strategy: NO_SHARD, replicas: 2}", "executor=ray", "roles.actor.count=2"],
            "backend.replicas: 2 would change nothing: only HYBRID counts copies, and sharding_strategy: NO_SHARD "
            "keeps a copy in each process",
        ),
        (["backend={name: fsdp, layers: lean}"], "lean leaves out the modules that are sharded"),
        (["backend={name: fsdp, compile: {enabled: true}}"], "layers whose weights are shared out are not compiled"),
        (
            [*FSDP, "algorithm=ppo", "roles.actor.count=2", "roles.critic.colocate_with=actor"],
            "roles.critic.count: 1 workers that work together in processes of 'actor' must be as many as those",
        ),
        (["executor=ray", "roles.actor.count=2"], "'torch' does not add up their gradients"),
    ],
)
def test_what_cannot_be_is_refused_before_the_start(tmp_path: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(tiny_config(tmp_path, {}, overrides))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "copies"),
    [
        ({"sharding_strategy": "HYBRID"}, 2),
        ({"sharding_strategy": "HYBRID", "replicas": 4}, 4),
        ({"sharding_strategy": "FULL"}, 1),
        ({"sharding_strategy": "NO_SHARD"}, 8),
    ],
)
def test_how_many_copies_eight_processes_keep(options: dict[str, Any], copies: int) -> None:
    config = FSDPConfig(**options)
    assert config.num_replicas(8) == copies
    assert list(config.problems(8)) == []


@pytest.mark.parametrize(
    ("options", "count", "said"),
    [
        ("sharding_strategy: FULL", 4, "25% of the actor's, 25% of the critic's weights"),
        ("sharding_strategy: HYBRID, replicas: 2", 8, "25% of the actor's, 25% of the critic's weights"),
        ("sharding_strategy: HYBRID", 4, "50% of the actor's, 50% of the critic's weights"),
        ("sharding_strategy: NO_SHARD", 4, None),
        ("sharding_strategy: FULL", 1, None),
    ],
)
def test_the_estimate_of_memory_counts_what_each_process_keeps(
    tmp_path: Path, options: str, count: int, said: str | None
) -> None:
    counts = [f"roles.{role}.count={count}" for role in ("actor", "critic")]
    overrides = [f"backend={{name: fsdp, {options}}}", "executor=ray", "algorithm=ppo", *counts]
    findings = examine_config(tiny_config(tmp_path, {}, overrides))
    (found,) = [finding.message for finding in findings if finding.subject == "memory of the run"]
    assert found.partition("each process keeps ")[2].partition(", gradients")[0] == (said or "")


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, [1, 1 / 2, 1 / 4, 1 / 8]),
        ({"sharding_strategy": "HYBRID", "replicas": 2}, [1, 1, 1 / 2, 1 / 4]),
        ({"sharding_strategy": "NO_SHARD"}, [1, 1, 1, 1]),
    ],
)
def test_the_share_of_a_model_that_each_process_keeps(options: dict[str, Any], shares: list[float]) -> None:
    backend = FSDPBackend(FSDPConfig(**options))
    assert [backend.share_kept(count) for count in (1, 2, 4, 8)] == shares


def test_workers_that_train_together_cannot_be_in_one_process(tmp_path: Path) -> None:
    findings = examine_config(tiny_config(tmp_path, {}, ["backend={name: fsdp}", "roles.actor.count=2"]))
    (found,) = [
        finding for finding in findings if finding.subject == "roles.actor.count" and "together" in finding.message
    ]
    assert found.severity == "error"
    assert "the executor 'local' keeps all in one" in found.message


def test_a_compressor_without_gradients_to_send_is_mentioned(tmp_path: Path) -> None:
    def said(*overrides: str) -> list[str]:
        findings = examine_config(tiny_config(tmp_path, {}, list(overrides)))
        return [finding.message for finding in findings if finding.subject == "compressor"]

    assert said("compressor=hybrid") == ["hybrid changes nothing: a model that one process trains sends no gradients"]
    assert said("compressor=hybrid", *FSDP, "roles.actor.count=2") == []
    assert said() == []
