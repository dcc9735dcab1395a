"""What can go wrong with a checkpoint, told apart so that callers can react."""

from rollstock.errors import RunError, UserError


class CheckpointNotFoundError(UserError):
    """No checkpoint, or not the one asked for, can be loaded; the message names those that can."""


class CheckpointCorruptError(RunError):
    """A file of a checkpoint is missing, cut short or altered; the message names the file."""


class CheckpointWriteError(RunError):
    """A checkpoint could not be written; nothing of it is left, and the older ones are untouched."""


class DiskFullError(CheckpointWriteError):
    """The disk has no room for a checkpoint; the message names the bytes needed and free."""
