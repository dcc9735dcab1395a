"""Checkpoints written while the run waits, or in the background while it goes on.

For the run. In the background, only the copying of tensors that change is waited for. Writing, checking, renaming and
pruning are the store's in both cases, one checkpoint after the other, so that a kill in the middle leaves what it would
have left otherwise.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstock.checkpoint.store import CheckpointStore
from rollstock.checkpoint.tensors import identity

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """Hands checkpoints to a store, and tells which are complete."""

    def __init__(self, store: CheckpointStore, *, background: bool) -> None:
        self._store = store
        self._background = background
        self._thread: threading.Thread | None = None
        self._complete: list[tuple[int, Path]] = []
        self._failure: BaseException | None = None

    def write(
        self,
        step: int,
        *,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        score: float | None,
        live: bool,
    ) -> None:
        """Write a checkpoint; in the background, wait for the one before, copy what is to be kept, and begin.

        live: whether the tensors may change once this returns, so that they have to be copied. Raises what the store
        raises, in the background of the checkpoint before.
        """
        if not self._background:
            self._save(step, tensors, state, score)
            return
        self.wait()
        began = time.monotonic()
        kept = copied(tensors) if live else tensors
        logger.info("checkpoint of step %d: copied in %.2f s, being written", step, time.monotonic() - began)
        content = (step, kept, copy.deepcopy(dict(state)), score)
        self._thread = threading.Thread(target=self._guarded, args=content, name="rollstock-checkpoint")
        self._thread.start()

    def take_complete(self) -> list[tuple[int, Path]]:
        """The checkpoints that became complete since this was last asked. Raises why one in the background could not be
        written; once."""
        self._raise_failure()
        found: list[tuple[int, Path]] = []
        while self._complete:
            found.append(self._complete.pop(0))
        return found

    def wait(self) -> None:
        """Wait until nothing is being written. Raises as `take_complete` does."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _save(
        self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], score: float | None
    ) -> None:
        began = time.monotonic()
        path = self._store.save(step, tensors=tensors, state=state, score=score)
        logger.info("checkpoint of step %d written in %.1f s: %s", step, time.monotonic() - began, path)
        self._complete.append((step, path))

    def _guarded(self, *content: Any) -> None:
        try:
            self._save(*content)
        except BaseException as error:  # whatever it is, the run shall raise it
            error.add_note(f"while the checkpoint of step {content[0]} was written in the background")
            self._failure = error


def copied(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Copies on the CPU; names that share a tensor share its copy."""
    known: dict[tuple[Any, ...], torch.Tensor] = {}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        mark = identity(tensor)
        if mark not in known or not tensor.numel():
            known[mark] = tensor.detach().to("cpu", copy=True)
        return known[mark]

    return {part: {name: own(tensor) for name, tensor in named.items()} for part, named in tensors.items()}
