"""Calls that may hang or crash, made in processes of their own and ended when they take too long.

For the scoring of trajectories, and for whoever else runs code that rollstock did not write once per sample. A
`Sandbox` starts its workers once, keeps them, and replaces one that hung or died; what a result means is left to the
caller.
"""

from rollstock.sandbox.outcome import Outcome
from rollstock.sandbox.pool import Sandbox
from rollstock.sandbox.worker import announce

__all__ = ["Outcome", "Sandbox", "announce"]
