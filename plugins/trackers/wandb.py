"""Weights & Biases: metrics, config and some samples, online or in files to sync later.

For those who compare runs at wandb.ai. Needs the `wandb` package (`pip install 'rollstock[wandb]'`). The key is
wandb's own affair (`wandb login`, or WANDB_API_KEY): there is no option for it, and it is written nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollstock import ConfigError, RunInfo, Tracker, hookimpl, import_optional, mask_secrets, option

SHOWN = ("step", "task_id", "prompt", "response", "reward", "finish_reason", "num_tokens")


@dataclass(kw_only=True)
class WandbConfig:
    """Options of the `wandb` tracker."""

    project: str = option("rollstock", "project that the run belongs to")
    entity: str | None = option(None, "user or team; none: the default of your account")
    run_name: str | None = option(None, "name of the run; none: rollstock's")
    group: str | None = option(None, "group of runs")
    tags: list[str] = option([], "tags")
    mode: Literal["online", "offline", "disabled"] = option(
        "online", "offline writes files into the run's directory, for `wandb sync`; disabled does nothing"
    )
    samples: int = option(8, "trajectories of a step that are shown as a table; 0: none", minimum=0, maximum=1_000_000)
    samples_every: int = option(10, "show trajectories of every n-th step", minimum=1, maximum=1_000_000_000)


class Wandb(Tracker[WandbConfig]):
    """One wandb run for a run and all its resumptions, by its id.

    A step that wandb has already is not sent again after a resume: it would be the same one.
    """

    def __init__(self, config: WandbConfig | None = None) -> None:
        """Raises PluginError without the package, so that a run without it fails before it begins."""
        super().__init__(config)
        self._wandb = import_optional("wandb", needed_by=self)

    def start(self, run: RunInfo, state: Mapping[str, Any]) -> None:
        """Open the wandb run. Raises ConfigError if wandb refuses."""
        config = self.config
        try:
            self._run = self._wandb.init(
                project=config.project,
                entity=config.entity,
                name=config.run_name or run.name,
                group=config.group,
                tags=config.tags,
                mode=config.mode,
                id=state.get("id"),
                resume="allow" if "id" in state else None,
                dir=str(run.directory),
                config=mask_secrets(dict(run.config)),
                # The terminal belongs to the run, and a command line may hold a secret.
                settings=self._wandb.Settings(
                    console="off",
                    quiet=True,
                    silent=config.mode == "offline",  # online, it shows the run's address
                    disable_code=True,
                    x_disable_meta=True,
                ),
            )
        except (self._wandb.errors.UsageError, self._wandb.errors.CommError) as error:
            raise ConfigError(
                f"wandb refuses to start: {error}. Run `wandb login`, or set trackers to {{name: wandb, mode: offline}}"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One point of each curve."""
        if step >= self._run.step:
            self._run.log(dict(metrics), step=step)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """One point of each curve, at the step after which the evaluation took place."""
        self.log(step, metrics)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table of the first trajectories."""
        if self.config.samples and step % self.config.samples_every == 0 and step >= self._run.step:
            data = [[str(row.get(key)) for key in SHOWN] for row in rows[: self.config.samples]]
            self._run.log({"samples": self._wandb.Table(columns=list(SHOWN), data=data)}, step=step)

    def state(self) -> dict[str, Any]:
        """The id of the wandb run."""
        return {"id": self._run.id}

    def finish(self, status: str) -> None:
        """Close the run; wandb marks it as crashed unless it finished."""
        self._run.finish(exit_code=0 if status == "finished" else 1)


@hookimpl
def rollstock_tracker() -> type[Tracker[Any]]:
    """The class of this plugin."""
    return Wandb
