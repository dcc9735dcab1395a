"""What plugins answer, where a wrong answer would change a run without a word or fail far from its cause.

For the builder of a run and its workers. What a plugin's class must look like is checked by `rollstock.contract`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollstock.errors import PluginError
from rollstock.interfaces.scheduler import Scheduler
from rollstock.plugin import Plugin


def sentences(kind: str, plugin: Plugin[Any], found: object) -> list[str]:
    """The problems that a plugin's `validate` has found. Raises PluginError unless they are a list of texts."""
    if isinstance(found, (list, tuple)) and all(isinstance(problem, str) for problem in found):
        return list(found)
    name = f"{kind}:{plugin.plugin_name}"
    raise PluginError(
        f"validate of plugin {name} must return a list of sentences, empty if all is well, not {found!r}", name
    )


def micro_batches(
    scheduler: Scheduler[Any], lengths: Sequence[int], groups: Sequence[int] | None = None
) -> list[list[int]]:
    """How the scheduler cuts sequences; all at once if it leaves that to others.

    Raises PluginError unless each index is in one cut: a sequence that is left out, or there twice, would be trained on
    that often.
    """
    cuts: Any = scheduler.micro_batches(lengths, groups=groups)
    everything = list(range(len(lengths)))
    if cuts is None:
        return [everything]
    try:
        found = [[int(index) for index in cut] for cut in cuts]
    except (TypeError, ValueError):
        found = []
    if sorted(index for cut in found for index in cut) != everything:
        name = f"scheduler:{scheduler.plugin_name}"
        raise PluginError(
            f"micro_batches of plugin {name} must return lists that hold each index from 0 to {len(lengths) - 1} once, "
            f"not {str(cuts)[:200]}",
            name,
        )
    return found
