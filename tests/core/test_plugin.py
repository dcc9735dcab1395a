from dataclasses import dataclass
from typing import Generic, TypeVar

import pytest

from rollstock import Algorithm, Reward
from rollstock.options import REQUIRED, option
from rollstock.plugin import C, NoOptions, Plugin

T = TypeVar("T")


@dataclass(kw_only=True)
class SomeConfig:
    size: int = option(3, "a size")


@dataclass(kw_only=True)
class OtherConfig(SomeConfig):
    path: str = option(REQUIRED, "a path")


class Some(Plugin[SomeConfig]):
    pass


class Child(Some):
    pass


class Other(Reward[OtherConfig]):
    def score(self, sample):  # type: ignore[no-untyped-def]
        return 0.0


class Mixed(Generic[T]):
    pass


class WithMixin(Mixed[int], Plugin[SomeConfig]):
    pass


class Bare(Plugin):  # type: ignore[type-arg]
    pass


class StillOpen(Plugin[C]):
    pass


@pytest.mark.parametrize(
    ("plugin", "config"),
    [
        (Some, SomeConfig),
        (Child, SomeConfig),
        (Other, OtherConfig),
        (WithMixin, SomeConfig),
        (Bare, NoOptions),
        (StillOpen, NoOptions),
        (StillOpen[SomeConfig], NoOptions),
        (Algorithm, NoOptions),
    ],
)
def test_the_config_class_is_the_argument_of_the_nearest_generic_base(plugin: type[Plugin], config: type) -> None:
    assert plugin.config_class() is config


def test_a_plugin_without_a_config_has_its_defaults() -> None:
    assert Some().config == SomeConfig(size=3)


def test_a_plugin_with_a_required_option_needs_a_config() -> None:
    with pytest.raises(TypeError, match="path"):
        Other()


def test_a_plugin_made_without_a_manager_has_its_class_name() -> None:
    assert Child().plugin_name == "Child"
    assert repr(Child()) == "Child(SomeConfig(size=3))"
