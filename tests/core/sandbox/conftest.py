"""What the tests of the sandbox share: whether a process has ended."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def gone() -> Callable[[int], bool]:
    """Whether the process of an id has ended, given some time to do so (a zombie has)."""

    def gone(pid: int) -> bool:
        for _ in range(500):
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):
                return True
            if state in "ZX":
                return True
            time.sleep(0.02)
        return False

    return gone
