"""One checkpoint on disk: a folder of tensor files and a state, and a manifest that says what each file must be.

    step-000012/
        actor.model.safetensors.zst    one file a part, `/` in the part's name written as `.`
        state.json                     counters, positions, controllers: plain data
        manifest.json                  step, score, size and SHA-256 of every file
        manifest.json.sha256           of the manifest, in the form that `sha256sum -c` reads

Naming folders, choosing among them and replacing them is the store's part.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstock.checkpoint import tensors as layout
from rollstock.checkpoint.errors import CheckpointCorruptError
from rollstock.checkpoint.files import Compression, Digest, check_file, open_file, sync_directory, write_file

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
MANIFEST = "manifest.json"
SEAL = "manifest.json.sha256"
STATE = "state.json"
_PART = re.compile(r"[a-z0-9][a-z0-9_-]*(/[a-z0-9][a-z0-9_-]*)*")


@dataclass(frozen=True)
class Content:
    """Everything that goes into a checkpoint, checked and laid out before the first byte is written."""

    step: int
    score: float | None
    parts: Mapping[str, layout.Layout]
    state: bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the files before compression, in total."""
        return sum(len(part.header) + part.num_bytes for part in self.parts.values()) + len(self.state)


@dataclass(frozen=True)
class Manifest:
    """What a finished checkpoint says of itself."""

    format: int
    step: int
    score: float | None
    created: str
    compression: Compression
    raw_bytes: int
    files: Mapping[str, Digest]
    parts: Mapping[str, str]

    @property
    def stored_bytes(self) -> int:
        """Bytes of the files as they lie on disk, in total."""
        return sum(digest.size for digest in self.files.values())


def lay_out(
    step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], score: float | None
) -> Content:
    """Check what is to be saved.

    Raises `ValueError` for a part name that is not lower-case words joined by `/`, and `TypeError` for a tensor that
    has no raw bytes or a state that JSON would not give back as it is.
    """
    for part in tensors:
        if not _PART.fullmatch(part):
            raise ValueError(f"the checkpoint part name {part!r} is not lower-case words joined by '/'")
    _refuse_unfaithful(state, "state")
    text = json.dumps(state).encode()
    return Content(step, score, {part: layout.plan(named) for part, named in tensors.items()}, text)


def _refuse_unfaithful(value: Any, path: str) -> None:
    """JSON turns tuples into lists and integer keys into strings; a resumed run would then differ from its past."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{path} has the key {key!r}; only strings come back as they were")
            _refuse_unfaithful(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _refuse_unfaithful(inner, f"{path}[{index}]")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise TypeError(f"{path} is a {type(value).__name__}; only str, int, float, bool, None, list, dict can be kept")


def write_folder(folder: Path, content: Content, compression: Compression) -> Manifest:
    """Write a checkpoint into the existing, empty `folder`; all of it is on the disk when this returns."""
    files: dict[str, Digest] = {}
    parts: dict[str, str] = {}
    suffix = ".safetensors.zst" if compression == "zstd" else ".safetensors"
    for part, planned in content.parts.items():
        name = part.replace("/", ".") + suffix
        files[name] = write_file(folder / name, partial(layout.write, planned), compression=compression)
        parts[part] = name
    files[STATE] = write_file(folder / STATE, lambda out: out.write(content.state))
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    manifest = Manifest(FORMAT, content.step, content.score, created, compression, content.num_bytes, files, parts)
    text = json.dumps(asdict(manifest), indent=2).encode() + b"\n"
    digest = write_file(folder / MANIFEST, lambda out: out.write(text))
    write_file(folder / SEAL, lambda out: out.write(f"{digest.sha256}  {MANIFEST}\n".encode()))
    sync_directory(folder)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest, and that every file is there in its full size: cheap, no tensor is read.

    Raises `CheckpointCorruptError` naming the file at fault.
    """
    try:
        text = (folder / MANIFEST).read_bytes()
        seal = (folder / SEAL).read_bytes()
    except OSError as error:
        raise CheckpointCorruptError(f"{error.filename}: cannot be read ({error.strerror})") from error
    if seal != f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode():
        raise CheckpointCorruptError(f"{folder / MANIFEST}: does not match its checksum in {SEAL}")
    raw = json.loads(text)
    if raw["format"] != FORMAT:
        raise CheckpointCorruptError(f"{folder}: has format {raw['format']}, this version of rollstock reads {FORMAT}")
    raw["files"] = {name: Digest(**digest) for name, digest in raw["files"].items()}
    manifest = Manifest(**raw)
    for name, digest in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointCorruptError(f"{folder / name}: is missing ({error.strerror})") from error
        if size != digest.size:
            raise CheckpointCorruptError(f"{folder / name}: has {size} bytes, expected {digest.size}")
    return manifest


def verify(folder: Path) -> Manifest:
    """Read every byte of a checkpoint and compare the checksums; `CheckpointCorruptError` names the first fault."""
    manifest = read_manifest(folder)
    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="checkpoint-verify") as pool:
        checks = [pool.submit(check_file, folder / name, digest) for name, digest in manifest.files.items()]
    for check in checks:
        check.result()
    return manifest


def read_state(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Read the state of a checkpoint, checked."""
    with open_file(folder / STATE, manifest.files[STATE]) as source:
        buffer = bytearray(manifest.files[STATE].size)
        layout.fill(source, memoryview(buffer), str(folder / STATE))
    state: dict[str, Any] = json.loads(buffer)
    return state


class Parts(Mapping[str, "dict[str, Tensor]"]):
    """The tensors of a checkpoint by part, read (and checked) each time a part is asked for.

    Nothing is kept: weights and optimizer state can be taken one after the other without both being in memory twice.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest

    def __getitem__(self, part: str) -> dict[str, Tensor]:
        name = self._manifest.parts[part]
        path = self._folder / name
        with open_file(path, self._manifest.files[name], compression=self._manifest.compression) as source:
            return layout.read(source, str(path))

    def __contains__(self, part: object) -> bool:
        return part in self._manifest.parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.parts)

    def __len__(self) -> int:
        return len(self._manifest.parts)
