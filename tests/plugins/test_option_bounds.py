"""Numbers that can only be a mistake are refused: every numeric option of ours says how large it may be."""

import re

import pytest

from rollstock.config.file import ConfigFile
from rollstock.config.load import config_from_values
from rollstock.discovery import discover
from rollstock.errors import ConfigError
from rollstock.manager import make_manager
from rollstock.options import Option, describe_options
from rollstock.schema import RoleSection, RunConfig
from rollstock.static import describe_statically

OURS = [id for id, entry in discover().items() if entry.distribution == "rollstock"]
ANY_SEED = re.compile(r"(^|[._])seed$")
"""Every whole number of 64 bits is a seed."""


def without_an_end(options: list[Option]) -> list[str]:
    return [
        option.name
        for option in options
        if re.search(r"\b(int|float)\b", option.type) and option.maximum is None and not ANY_SEED.search(option.name)
    ]


@pytest.mark.parametrize("id", OURS)
def test_every_number_of_a_plugin_has_an_end(id: str) -> None:
    described = describe_statically(discover()[id])
    assert described is not None
    assert without_an_end(described) == []


def test_every_number_of_the_core_has_an_end() -> None:
    options = [*describe_options(RunConfig), *describe_options(RoleSection)]
    names = {option.name for option in options}
    assert {"train.steps", "sampling.temperature", "count", "devices"} <= names
    assert without_an_end(options) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("backend.learning_rate=.inf", r"backend\.learning_rate must be a finite number"),
        ("backend.learning_rate=1e30", r"backend\.learning_rate must be at most 10, not 1e\+30"),
        ("backend.eps=0", r"backend\.eps must be at least 1e-30, not 0"),
        ("backend.beta2=1", r"backend\.beta2 must be at most 0\.999999, not 1"),
        ("backend.lora.rank=1000000", r"backend\.lora\.rank must be at most 65536"),
        ("train.steps=1e30", r"train\.steps must be a whole number that 64 bits can hold"),
        ("train.steps=1e15", r"train\.steps must be at most 1000000000"),
        ("algorithm.group_size=1e8", r"algorithm\.group_size must be at most 100000"),
        ("sampling.temperature=-.inf", r"sampling\.temperature must be a finite number"),
        ("reward_limits.timeout_s=1e30", r"reward_limits\.timeout_s must be at most"),
        ("rewards=[{name: environment, weight: 1e30}]", r"rewards\.0 has a weight beyond 1e\+09: 1e\+30"),
        ("roles.actor.devices=[1e30]", r"roles\.actor\.devices\.0 must be a whole number"),
    ],
)
def test_a_number_beyond_all_sense_is_refused_by_name(override: str, message: str) -> None:
    values = {"model": {"path": "m"}, "algorithm": "grpo", "environment": "arithmetic", "backend": {"name": "torch"}}
    with pytest.raises(ConfigError, match=message):
        config = config_from_values(ConfigFile("tiny.yaml", values), [override])
        manager = make_manager()
        for kind in ("algorithm", "backend"):
            manager.create(kind, getattr(config, kind))
