"""Checkpoints that survive: written beside, checksummed, renamed into place, and never chosen unless they are whole.

For the run, which saves and resumes, and for `export`, `eval` and `report`, which only read. What goes into a
checkpoint (which parts, which state) is the caller's business; how often, the loop's.
"""

from rollstock.checkpoint.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    DiskFullError,
)
from rollstock.checkpoint.store import Checkpoint, CheckpointStore
from rollstock.checkpoint.writer import CheckpointWriter

__all__ = [
    "Checkpoint",
    "CheckpointCorruptError",
    "CheckpointNotFoundError",
    "CheckpointStore",
    "CheckpointWriteError",
    "CheckpointWriter",
    "DiskFullError",
]
