"""The directory of a run: where each file lies, who may write there, and what an occupied one is told.

    config.yaml  manifest.json  metrics.jsonl  rollouts/  checkpoints/  model/  logs/  report.html

For the run that writes it and the commands that read it. What is in the files is their writers' business.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollstock.defaults import TRACKER_FOLDERS
from rollstock.errors import UserError
from rollstock.folders import make_folder, path_error, remove_empty
from rollstock.lockfile import LockFile
from rollstock.secrets import MaskingFormatter, known_secrets

_log = logging.getLogger(__name__)
_LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_OWN_NAMES = (
    *("config.yaml", "manifest.json", "metrics.jsonl", "report.html"),
    *("rollouts", "checkpoints", "model", "logs", "profile"),
    *TRACKER_FOLDERS,
)
_ELSEWHERE = "choose another with run.directory=DIR, or give this process the right to write there"
_open_handlers: set[logging.Handler] = set()
_levels: dict[str, int] = dict.fromkeys(("rollstock", "py.warnings"), logging.NOTSET)
"""Of the loggers that are written to a file, before the first one was opened."""
_STEP_FILE = re.compile(r"step-(\d+)")


class OccupiedError(UserError):
    """The directory already holds something; the message names the ways out."""


class RunDirectory:
    """The paths of one run, and the lock that keeps a second process out of it.

    Make one with `create` (a new run) or `open` (an existing one).
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.manifest = self.path / "manifest.json"
        self.metrics = self.path / "metrics.jsonl"
        self.rollouts = self.path / "rollouts"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.logs = self.path / "logs"
        self.report = self.path / "report.html"
        self._lock = LockFile(self.path / ".lock", f"the run directory {self.path}")
        self._made: list[Path] = []
        self._made_lock = False

    @classmethod
    def create(cls, path: Path, *, overwrite: bool = False) -> RunDirectory:
        """Make the directory of a new run and lock it: `reserve` and `prepare` in one. Raises as `reserve` does."""
        run = cls.reserve(path, overwrite=overwrite)
        try:
            run.prepare()
        except BaseException:
            run.unlock()
            raise
        return run

    @classmethod
    def reserve(cls, path: Path, *, overwrite: bool = False) -> RunDirectory:
        """Lock the directory of a run that may begin; what is in it stays as it is until `prepare`.

        If it comes to nothing, `unlock` removes what was made for it, the directory itself included. Raises
        `OccupiedError` if something is there already, unless `overwrite` is set and it is a run that nobody is
        writing. Raises `LockedError` if another process writes there.
        """
        run = cls(path)
        if run.path.exists() and not run.path.is_dir():
            raise OccupiedError(f"the run directory {run.path} is a file; choose another with run.directory=DIR")
        try:
            run._made = make_folder(run.path)
        except OSError as error:
            raise path_error(error, f"the run directory {run.path} cannot be made", _ELSEWHERE) from error
        run._made_lock = not run._lock.path.exists()
        try:
            run.lock()
        except BaseException:
            run._tidy()
            raise
        try:
            occupants = run.occupants()
            if occupants:
                run._refuse(occupants, overwrite=overwrite)
        except BaseException:
            run.unlock()
            raise
        return run

    def prepare(self) -> None:
        """Remove rollstock's own files of an earlier run, with a warning that says what is gone, and make the
        folders."""
        if self.occupants():
            self._clear()
        for folder in (self.rollouts, self.checkpoints, self.logs):
            folder.mkdir()
        self._made, self._made_lock = [], False

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """An existing run, not locked. Raises `UserError` if the path is no run, naming runs that lie near it."""
        run = cls(path)
        if run.is_run():
            return run
        base = run.path if run.path.is_dir() else run.path.parent
        configs = base.glob("*/config.yaml") if base.is_dir() else ()
        near = sorted(str(found.parent) for found in configs if cls(found.parent).is_run())[:5]
        missing = "manifest.json or metrics.jsonl beside its config.yaml" if run.config.is_file() else "config.yaml"
        reason = f"holds no run (it has no {missing})" if run.path.exists() else "does not exist"
        hint = f" Runs near it: {', '.join(near)}." if near else " Give the directory that `rollstock train` wrote to."
        raise UserError(f"{run.path} {reason}.{hint}")

    def is_run(self) -> bool:
        """Whether a run was started here. A config alone says little, since many projects have a file of that name; the
        manifest alone may be lost, and a run can go on without."""
        return self.config.is_file() and (self.manifest.is_file() or self.metrics.is_file())

    def occupants(self) -> list[str]:
        """Names of what lies in the directory, the lock aside."""
        return sorted(path.name for path in self.path.iterdir() if path.name != ".lock")

    def lock(self) -> None:
        """Keep other processes out until `unlock` or the end of this process; raises `LockedError`, or the error of a
        place that cannot be written."""
        try:
            self._lock.acquire()
        except OSError as error:
            raise path_error(error, f"the run directory {self.path} cannot be written", _ELSEWHERE) from error

    @contextmanager
    def locked(self) -> Iterator[RunDirectory]:
        """Unlock at the end, whatever it is; lock at the beginning if that was not done yet."""
        self.lock()
        try:
            yield self
        finally:
            self.unlock()

    def unlock(self) -> None:
        """Let others in. Of a directory that was reserved and never prepared, nothing stays that is new."""
        self._lock.release(remove=self._made_lock)
        self._tidy()

    def _tidy(self) -> None:
        remove_empty(self._made)
        self._made, self._made_lock = [], False

    def checkpoint_steps(self) -> list[int]:
        """Steps that have a checkpoint folder, oldest first; whether they are sound is the store's to say."""
        matches = (_STEP_FILE.fullmatch(path.name) for path in self.checkpoints.glob("step-*"))
        return sorted(int(match[1]) for match in matches if match)

    def describe(self) -> str:
        """A few words about the run that is here: how far it came and whether it can be resumed."""
        steps = self.checkpoint_steps()
        return f"a run with a checkpoint of step {steps[-1]}" if steps else "a run without a checkpoint"

    def check_free(self) -> None:
        """Raise `OccupiedError`, as `create` would, if a new run cannot begin here; changes nothing."""
        if self.path.is_dir() and self.occupants():
            self._refuse(self.occupants(), overwrite=False)
        elif self.path.exists() and not self.path.is_dir():
            raise OccupiedError(f"the run directory {self.path} is a file; choose another with run.directory=DIR")

    def _refuse(self, occupants: list[str], *, overwrite: bool) -> None:
        if not (self.is_run() and self.manifest.is_file()):  # what may be deleted must be surely a run
            shown = ", ".join(occupants[:3]) + (", ..." if len(occupants) > 3 else "")
            raise OccupiedError(
                f"the directory {self.path} is not empty ({shown}) and holds no run, so it is left alone. "
                "Choose another with run.directory=DIR."
            )
        if not overwrite:
            resume = f"go on with it: rollstock resume {self.path}; " if self.checkpoint_steps() else ""
            raise OccupiedError(
                f"the directory {self.path} already holds {self.describe()}. Ways out: {resume}"
                "write elsewhere: run.directory=DIR; or throw it away and start anew: --overwrite"
            )

    def _clear(self) -> None:
        _log.warning("overwriting %s, which held %s", self.path, self.describe())
        for name in _OWN_NAMES:
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def log_to_file(path: Path, level: int = logging.INFO, *, config: object = None) -> logging.Handler:
    """Append log records and Python warnings to `path`, secrets masked, those of a config (plain data) among them;
    `stop_logging` takes the handler off again.

    The controller logs to `logs/controller.log`, a worker to `logs/<role>-<rank>.log`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    handler.setLevel(level)
    handler.setFormatter(MaskingFormatter(_LOG_FORMAT, known_secrets(config)))
    logging.captureWarnings(True)
    for name in _levels:
        logger = logging.getLogger(name)
        if not _open_handlers:
            _levels[name] = logger.level
        logger.addHandler(handler)
        logger.setLevel(min(level, logger.level or level))
    _open_handlers.add(handler)
    return handler


def stop_logging(handler: logging.Handler) -> None:
    """Take off and close what `log_to_file` put on."""
    handler.close()
    _open_handlers.discard(handler)
    for name, level in _levels.items():
        logging.getLogger(name).removeHandler(handler)
        if not _open_handlers:
            logging.getLogger(name).setLevel(level)
    if not _open_handlers:
        logging.captureWarnings(False)  # where no log file is open, warnings go where they went before
