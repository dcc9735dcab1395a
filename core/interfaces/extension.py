"""The extension kind: what listens to a run, or wraps the stages of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, ClassVar

from rollstock.plugin import C, Plugin


class Extension(Plugin[C]):
    """A plugin whose methods are lifecycle hooks: any hook below the providers in `rollstock.hookspecs`.

    Mark methods with `@hookimpl` (to listen, or to replace a stage) or `@hookimpl(wrapper=True)` (to wrap one):

        @hookimpl(wrapper=True)
        def rollstock_score(self, run, batch):
            result = yield
            batch["scores"] = batch.scores - self.config.cost * batch.lengths
            return result
    """

    provides: ClassVar[Set[str]] = frozenset()
    """Columns that this extension puts into the batch, so that an algorithm may declare that it needs them."""

    def state(self) -> dict[str, Any]:
        """What must survive a restart, as JSON."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
