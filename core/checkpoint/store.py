"""The folder of a run's checkpoints: save, choose, prune, and come back from a kill at any moment.

A checkpoint is written into a hidden folder beside the others, flushed, read back and compared with its checksums, and
only then renamed to `step-NNNNNN`. Whatever a kill leaves behind has a name that is never taken for a checkpoint, and
is cleared away by the next writer. Readers (`export`, `eval`) take no lock and change nothing.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rollstock.checkpoint.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    DiskFullError,
)
from rollstock.checkpoint.files import Compression, sync_directory
from rollstock.checkpoint.folder import (
    Content,
    Manifest,
    Parts,
    lay_out,
    read_manifest,
    read_state,
    verify,
    write_folder,
)
from rollstock.lockfile import LockFile
from rollstock.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)
_STEP = re.compile(r"(\.old-)?step-(\d{6,})")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every byte was compared with its checksum.

    `tensors` maps a part ("actor/model") to its tensors by name; each look-up reads from the disk and keeps nothing.
    """

    step: int
    path: Path
    score: float | None
    state: dict[str, Any]
    tensors: Mapping[str, dict[str, Tensor]]


class CheckpointStore:
    """Checkpoints under `root`, which is created by the first save.

    `keep` is how many of the newest stay (at least 1), `keep_best` keeps the one of the highest score as well. `notice`
    receives what a user should be told (an older checkpoint was chosen, remains were cleared); by default it is logged.
    `verify_writes` reads each new checkpoint back before it counts.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep: int = 5,
        keep_best: bool = True,
        compression: Compression = "zstd",
        verify_writes: bool = True,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}: a run without a checkpoint cannot be resumed")
        if compression not in get_args(Compression):
            raise ValueError(f"compression must be one of {', '.join(get_args(Compression))}, not {compression!r}")
        self.root = Path(root)
        self.keep = keep
        self.keep_best = keep_best
        self.compression: Compression = compression
        self.verify_writes = verify_writes
        self._notice = notice or _log.warning
        self._lock = LockFile(self.root / ".lock", f"the checkpoint folder {self.root}")
        self._sound: set[int] = set()  # steps of which this process has compared every byte

    def acquire(self) -> None:
        """Become the only writer and clear away what a killed one left; `save` and `prune` do so when needed.

        Raises `LockedError` (a `UserError`) if another run writes here.
        """
        if self._lock.held:
            return
        self.root.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()
        self._clear_remains()

    def release(self) -> None:
        """Let others write here."""
        self._lock.release()

    def save(
        self, step: int, *, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], score: float | None
    ) -> Path:
        """Write the checkpoint of `step`, replacing one of the same step, then prune; returns its folder.

        `tensors` maps part names such as "actor/model" to flat dictionaries; `state` is plain data; `score` ranks
        checkpoints (higher is better; None or NaN: no rank). Raises `DiskFullError` or `CheckpointWriteError` (both
        `RunError`); then nothing of the new checkpoint is left and the older ones are as they were.
        """
        if step < 0:
            raise ValueError(f"a checkpoint's step is not negative: {step}")
        content = lay_out(step, tensors, state, score if score is not None and math.isfinite(score) else None)
        try:
            self.acquire()
            self._check_room(content)
            target = self._write(content)
        except OSError as error:
            raise self._explain(error, content) from error
        self.prune()
        return target

    def _write(self, content: Content) -> Path:
        name = _folder_name(content.step)
        target, temporary, old = self.root / name, self.root / f".tmp-{name}-{os.getpid()}", self.root / f".old-{name}"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            write_folder(temporary, content, self.compression)
            if self.verify_writes:
                verify(temporary)
            if target.exists():
                # A directory cannot be renamed over another: for one instant only `.old-` exists, and it is looked for.
                shutil.rmtree(old, ignore_errors=True)
                target.rename(old)
            temporary.rename(target)
            sync_directory(self.root)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        shutil.rmtree(old, ignore_errors=True)
        self._sound.add(content.step)
        return target

    def _check_room(self, content: Content) -> None:
        needed, free = self._estimate(content), shutil.disk_usage(self.root).free
        if needed > free:
            raise DiskFullError(_full_message(content.step, self.root, needed, free))

    def _estimate(self, content: Content) -> int:
        """Bytes that the checkpoint will take; compression is taken from an earlier checkpoint, or as no gain."""
        ratio = 1.0
        if self.compression == "zstd":
            earlier = [manifest for manifest in self._manifests().values() if manifest.compression == "zstd"]
            if earlier and earlier[-1].raw_bytes:
                ratio = min(1.0, earlier[-1].stored_bytes / earlier[-1].raw_bytes)
        blocks = 4096 * (len(content.parts) + 4)  # each file, and the folder, ends in a block that is not full
        return int(content.num_bytes * ratio) + blocks

    def _explain(self, error: OSError, content: Content) -> CheckpointWriteError:
        if error.errno in _FULL:
            free = shutil.disk_usage(self.root).free
            message = _full_message(content.step, self.root, self._estimate(content), free)
            if error.errno != errno.ENOSPC:  # there is room, for others
                message += f" The system says: {error.strerror}; it is a limit on files (`ulimit -f`) or a quota."
            return DiskFullError(message)
        return CheckpointWriteError(
            f"the checkpoint of step {content.step} could not be written to {self.root}: {error}"
        )

    def _clear_remains(self) -> None:
        """Finish or undo what a killed writer was doing."""
        for path in sorted(self.root.iterdir()):
            if path.name.startswith(".old-"):
                target = self.root / path.name.removeprefix(".old-")
                if target.exists():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.rename(target)
            elif path.name.startswith((".tmp-", ".trash-")):
                self._notice(f"removed {path}, left by a process that was killed")
                shutil.rmtree(path, ignore_errors=True)

    def prune(self) -> None:
        """Remove all but the newest `keep` and the best checkpoint; at least one that is sound in every byte stays.

        A damaged checkpoint does not count towards `keep`, and goes as soon as a sound newer one exists.
        """
        self.acquire()
        manifests = self._manifests()
        kept = set(sorted(manifests)[-self.keep :])
        best = _best(manifests) if self.keep_best else None
        if best is not None:
            kept.add(best)
        if not any(self._is_sound(step) for step in sorted(kept, reverse=True)):
            others = sorted(set(manifests) - kept, reverse=True)
            last_resort = next((step for step in others if self._is_sound(step)), None)
            if last_resort is None:
                return
            kept.add(last_resort)
        for step, path in self._folders().items():
            if step not in kept and step < max(kept):
                trash = self.root / f".trash-{path.name}"
                path.rename(trash)  # first the name, so that a half-removed folder is never looked at
                shutil.rmtree(trash, ignore_errors=True)

    def steps(self) -> list[int]:
        """Steps whose checkpoint looks whole (manifest sealed, every file of the right size), oldest first."""
        return list(self._manifests())

    def best(self) -> int | None:
        """The step of the highest score, the newest among equals; None if no checkpoint has a score."""
        return _best(self._manifests())

    def load(self, step: int | None = None) -> Checkpoint:
        """The checkpoint of `step`, or the newest that is sound, every byte compared.

        Passing over a newer, damaged one is told through `notice`. Raises `CheckpointNotFoundError` (a `UserError`) if
        there is none, and `CheckpointCorruptError` (a `RunError`) if the one asked for, or every one, is damaged.
        """
        folders = self._folders()
        if step is not None and step not in folders:
            have = ", ".join(map(str, folders)) or "none"
            raise CheckpointNotFoundError(f"{self.root} has no checkpoint of step {step}; steps there: {have}")
        if not folders:
            raise CheckpointNotFoundError(f"{self.root} has no checkpoint")
        faults: list[str] = []
        for candidate in [step] if step is not None else sorted(folders, reverse=True):
            try:
                checkpoint = self._open(folders[candidate])
            except CheckpointCorruptError as error:
                faults.append(str(error))
                continue
            self._sound.add(checkpoint.step)
            for fault in faults:
                self._notice(f"passed over a damaged checkpoint: {fault}")
            if faults:
                self._notice(f"chose the older checkpoint of step {checkpoint.step}: {checkpoint.path}")
            return checkpoint
        sound = [other for other in self.steps() if other != step]
        hint = f"; steps that look whole: {', '.join(map(str, sound))}" if step is not None and sound else ""
        raise CheckpointCorruptError("; ".join(faults) + hint)

    def _open(self, folder: Path) -> Checkpoint:
        manifest = verify(folder)
        state = read_state(folder, manifest)
        return Checkpoint(manifest.step, folder, manifest.score, state, Parts(folder, manifest))

    def _folders(self) -> dict[int, Path]:
        """Folders by step, oldest first; while a replacement is under way, or was killed, the replaced one counts."""
        found: dict[int, Path] = {}
        names = sorted(path.name for path in self.root.iterdir()) if self.root.is_dir() else []
        for name in names:  # ".old-" sorts before "step-", so that a finished replacement wins
            match = _STEP.fullmatch(name)
            if match:
                found[int(match[2])] = self.root / name
        return dict(sorted(found.items()))

    def _manifests(self) -> dict[int, Manifest]:
        found: dict[int, Manifest] = {}
        for step, folder in self._folders().items():
            try:
                found[step] = read_manifest(folder)
            except CheckpointCorruptError as error:
                _log.debug("not a whole checkpoint: %s", error)
        return found

    def _is_sound(self, step: int) -> bool:
        if step not in self._sound:
            try:
                verify(self._folders()[step])
            except CheckpointCorruptError:
                return False
            self._sound.add(step)
        return True


def _folder_name(step: int) -> str:
    return f"step-{step:06d}"


def _best(manifests: Mapping[int, Manifest]) -> int | None:
    scored = [(manifest.score, step) for step, manifest in manifests.items() if manifest.score is not None]
    return max(scored)[1] if scored else None


def _full_message(step: int, root: Path, needed: int, free: int) -> str:
    return (
        f"no room for the checkpoint of step {step}: about {format_bytes(needed)} needed, {format_bytes(free)} free on "
        f"the disk of {root}. Nothing was left half-written and older checkpoints are as they were; free some space or "
        "lower checkpoint.keep."
    )
