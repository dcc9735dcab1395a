"""What several folders of tests share."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile(
    "rollstock", deadline=None
)  # how long an example takes says more of the machine than of the code
settings.load_profile("rollstock")


@pytest.fixture(scope="session")
def cases() -> dict[str, Any]:
    """The known-right numbers of tests/cases, by subject."""
    return json.loads((Path(__file__).parent / "cases" / "numbers.json").read_text())
