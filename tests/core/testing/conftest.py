"""What the tests of the kits share: one check at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest


@pytest.fixture(scope="session")
def all_but() -> Callable[[Sequence[Any], str], dict[str, str]]:
    """The checks to skip so that only one is run: the others take their time, and right plugins show that they
    pass."""

    def skipped(checks: Sequence[Any], check: str) -> dict[str, str]:
        names = [each.__name__.removeprefix("check_") for each in checks]
        assert check in names
        return {name: "it is tried elsewhere" for name in names if name != check}

    return skipped
