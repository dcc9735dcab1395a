"""TensorBoard: metrics as scalars, the config and some samples as text.

For those who watch runs with `tensorboard --logdir`. Needs the `tensorboard` package (`pip install
'rollstock[tensorboard]'`).
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollstock import RunInfo, Tracker, hookimpl, import_optional, mask_secrets, option


@dataclass(kw_only=True)
class TensorBoardConfig:
    """Options of the `tensorboard` tracker."""

    directory: str = option("tensorboard", "where event files go, in the run's directory unless absolute")
    samples: int = option(4, "trajectories of a step that are shown as text; 0: none", minimum=0, maximum=1_000_000)
    samples_every: int = option(10, "show trajectories of every n-th step", minimum=1, maximum=1_000_000_000)


class TensorBoard(Tracker[TensorBoardConfig]):
    """Writes event files. After a resume, what came after the checkpoint is purged from the curves."""

    def __init__(self, config: TensorBoardConfig | None = None) -> None:
        """Raises PluginError without the package, so that a run without it fails before it begins."""
        super().__init__(config)
        self._module = import_optional("torch.utils.tensorboard", needed_by=self)

    def start(self, run: RunInfo, state: Mapping[str, Any]) -> None:
        """Open an event file."""
        purge = None if run.resumed_at is None else run.resumed_at + 1
        self._writer = self._module.SummaryWriter(str(run.directory / self.config.directory), purge_step=purge)
        if run.resumed_at is None:
            self._writer.add_text("config", as_table(flat(mask_secrets(run.config))), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar a metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar a metric."""
        self.log(step, metrics)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table of the first trajectories."""
        if self.config.samples and step % self.config.samples_every == 0:
            chosen = rows[: self.config.samples]
            text = "\n\n".join(as_table({key: row.get(key) for key in SHOWN}) for row in chosen)
            self._writer.add_text("samples", text, step)

    def message(self, text: str) -> None:
        """Not shown: TensorBoard has no place for it."""

    def state(self) -> dict[str, Any]:
        """Nothing: the step of the checkpoint says all."""
        self._writer.flush()
        return {}

    def finish(self, status: str) -> None:
        """Close the file."""
        self._writer.close()


SHOWN = ("task_id", "prompt", "response", "reward", "finish_reason", "num_tokens")


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested config with dotted names."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def as_table(values: Mapping[str, Any]) -> str:
    """Names and values as a Markdown table; what a model wrote cannot break out of its cell."""
    rows = [f"|{name}|<pre>{cell(value)}</pre>|" for name, value in values.items()]
    return "\n".join(["|name|value|", "|---|---|", *rows])


def cell(value: Any) -> str:
    """A value as the text of a cell."""
    return html.escape(str(value)).replace("|", "&#124;").replace("\n", "<br>")


@hookimpl
def rollstock_tracker() -> type[Tracker[Any]]:
    """The class of this plugin."""
    return TensorBoard
