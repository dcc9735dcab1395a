"""Where benchmarks write: found out before they measure, not after."""

from __future__ import annotations

import argparse
from pathlib import Path


def file(text: str) -> Path:
    """An argument that names a file to be written; makes its folder. Raises argparse.ArgumentTypeError otherwise."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file in it")
    folder(str(path.parent))
    return path


def folder(text: str) -> Path:
    """An argument that names a folder to write into; makes it. Raises argparse.ArgumentTypeError otherwise."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be a folder: {error.strerror}") from None
    return path
