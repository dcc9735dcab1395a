"""Progress for the person who watches: a growing table and a progress bar on a terminal, plain lines elsewhere.

The default tracker. A plain line holds the same numbers with their full names, so that `grep` finds them.
"""

from __future__ import annotations

import atexit
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rollstock import RunInfo, Tracker, hookimpl, option

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.progress import Progress

COLUMN_WIDTH = 11
LINES_PER_HEADER = 20
DEFAULT_METRICS = [
    "reward/mean",
    "reward/std",
    "response_length/mean",
    "actor/pg_loss",
    "actor/loss",
    "rewards/accuracies",
    "rewards/margins",
    "actor/entropy",
    "actor/grad_norm",
    "critic/vf_loss",
    "timing_s/step",
]


@dataclass(kw_only=True)
class ConsoleConfig:
    """Options of the `console` tracker."""

    metrics: list[str] = option(
        DEFAULT_METRICS, "metrics to show, in this order; those that a run does not have are left out"
    )
    every: int = option(1, "show every n-th step", minimum=1, maximum=1_000_000_000)
    samples: int = option(
        0,
        "trajectories to show of each step that is shown, the best and the worst among them",
        minimum=0,
        maximum=1_000_000,
    )
    style: Literal["auto", "rich", "plain"] = option("auto", "auto: rich on a terminal, plain elsewhere")
    stream: Literal["stdout", "stderr"] = option("stdout", "where to write")


class Console(Tracker[ConsoleConfig]):
    """Shows the steps as they end."""

    _progress: Progress | None = None

    def start(self, run: RunInfo, state: Mapping[str, Any]) -> None:
        """Say what runs, and start the progress bar on a terminal."""
        from rich.console import Console as RichConsole

        self._began = time.monotonic()
        self._run = run
        self._columns: list[str] = []
        self._samples: list[str] = []
        self._num_lines = 0
        self._last_step = run.resumed_at or 0
        stream = sys.stdout if self.config.stream == "stdout" else sys.stderr
        self._rich = stream.isatty() if self.config.style == "auto" else self.config.style == "rich"
        # Plain lines are never wrapped, however narrow the terminal is said to be.
        self._console: RichConsole = RichConsole(file=stream, highlight=False, soft_wrap=not self._rich)
        resumed = "" if run.resumed_at is None else f", from step {run.resumed_at}"
        self.message(f"{run.name}: {run.num_steps} steps{resumed}, in {run.directory}")
        if self._rich:
            self._progress = self._bar()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A line of the table."""
        self._last_step = step
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step)
        if not self._shows(step):
            return
        if self._rich:
            self._row(step, metrics)
        else:
            shown = [f"{name} {short(metrics[name])}" for name in self.config.metrics if name in metrics]
            self._line(f"step {step}/{self._run.num_steps}  " + "  ".join(shown))
        for text in self._samples:
            self._line(text, style="dim")
        self._samples = []

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """A line of its own: scores, and whatever else is neither a length nor a count of nothing."""
        shown = [
            f"{name.removeprefix('eval/')} {short(value)}"
            for name, value in sorted(metrics.items())
            if not ("/response_length/" in name or name.endswith("/num_samples") or (value == 0 and "/num_" in name))
        ]
        self._line(f"evaluation after step {step}:  " + "  ".join(shown), style="bold cyan")

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """The best and the worst responses of a step, one line each; they are shown below the step's numbers."""
        if self.config.samples == 0 or not self._shows(step):
            return
        scored = sorted((row for row in rows if row.get("reward") is not None), key=lambda row: -float(row["reward"]))
        num_best = (self.config.samples + 1) // 2
        worst = scored[num_best:][-(self.config.samples - num_best) :] if self.config.samples > num_best else []
        self._samples = [
            f"  {short(float(row['reward'])):>6}  {row.get('task_id')}: {shortened(row.get('response'))}"
            for row in [*scored[:num_best], *worst]
        ]

    def message(self, text: str) -> None:
        """A line."""
        self._line(text)

    def finish(self, status: str) -> None:
        """Take the bar away and say how it went."""
        self._stop()
        minutes, seconds = divmod(round(time.monotonic() - self._began), 60)
        style = "bold green" if status == "finished" else "bold red"
        self._line(
            f"{status} at step {self._last_step}/{self._run.num_steps} after {minutes}m {seconds:02d}s", style=style
        )

    def _shows(self, step: int) -> bool:
        return step % self.config.every == 0 or step == self._run.num_steps

    def _row(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row under a header that comes again now and then; the columns are those of the first step."""
        if not self._columns:
            present = [name for name in self.config.metrics if name in metrics]
            self._columns = present[: max(1, (self._console.width - 8) // (COLUMN_WIDTH + 1))]
        if self._num_lines % LINES_PER_HEADER == 0:
            for heads in zip(*(head(name) for name in self._columns), strict=True):
                first = "step" if heads == tuple(head(name)[1] for name in self._columns) else ""
                self._line(f"{first:>7}" + "".join(f" {text:>{COLUMN_WIDTH}}" for text in heads), style="bold")
        self._num_lines += 1
        values = [short(metrics[name]) if name in metrics else "-" for name in self._columns]
        self._line(f"{step:>7}" + "".join(f" {text:>{COLUMN_WIDTH}}" for text in values))

    def _line(self, text: str, style: str = "") -> None:
        """Print above the bar; what a model wrote is shown as it is, never as markup."""
        console = self._console if self._progress is None else self._progress.console
        console.print(printable(text), style=style or None, markup=False, emoji=False)

    def _bar(self) -> Progress:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            refresh_per_second=2,
        )
        progress.add_task("steps", total=self._run.num_steps, completed=self._last_step)
        progress.start()
        # The terminal gets its cursor back, whatever ends the process.
        atexit.register(self._stop)
        return progress

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            atexit.unregister(self._stop)


def short(value: float) -> str:
    """A number in at most 9 characters."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.4f}" if 0.001 <= abs(value) < 1000 else f"{value:.3g}"


def head(name: str) -> tuple[str, str]:
    """A metric's name in two lines, each cut to the width of a column."""
    group, _, rest = name.rpartition("/")
    return group[:COLUMN_WIDTH], rest[:COLUMN_WIDTH]


def shortened(text: object, length: int = 100) -> str:
    """A text in one line."""
    line = " ".join(str(text).split())
    return line if len(line) <= length else f"{line[: length - 3]}..."


def printable(text: str) -> str:
    """A text without control characters, which could move the cursor or change the terminal."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


@hookimpl
def rollstock_tracker() -> type[Tracker[Any]]:
    """The class of this plugin."""
    return Console
