"""The extension kind: what listens to a run, or wraps the stages of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, ClassVar

from rollstock.plugin import C, Plugin

if TYPE_CHECKING:
    from rollstock.interfaces.algorithm import Algorithm
    from rollstock.interfaces.executor import WorkerSpec
    from rollstock.schema import RunConfig


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

    needs: ClassVar[Set[str]] = frozenset()
    """Columns that this extension reads, from the end of the prepare stage on: `old_logprobs`, `ref_logprobs`,
    `values`, or what another extension provides. The run starts the roles that compute them, whether or not the
    algorithm asks for them too. An option may decide: override `needed_columns`."""

    def needed_columns(self) -> Set[str]:
        """`needs`, as the options have it."""
        return frozenset(self.needs)

    def roles(self, config: RunConfig) -> Sequence[WorkerSpec]:
        """The roles that this extension brings, as they are started where the config's `roles` says nothing of them.

        Started after the core's own, they are in `run.roles` under their names, for the extension's hooks to call. A
        worker class marks its methods with `rollstock.dispatch.register`, a method `close` among them, and stands at
        the top of a module, so that another process can import it. `roles.<name>` of the config sets count, devices,
        cpus and colocate_with.
        """
        return ()

    def validate(self, config: RunConfig, algorithm: Algorithm[Any]) -> Sequence[str]:
        """What in the resolved run config, or in the algorithm that it names, makes this extension do nothing or harm;
        each sentence refuses the run.

        Called before anything starts. Return nothing when all is well.
        """
        return ()

    def state(self) -> dict[str, Any]:
        """What must survive a restart, as JSON."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
