"""Turn a GGUF file into a directory in Hugging Face format, which the backends and rollouts of this folder load.

For people whose model comes as GGUF: `python -m rollstock.backends.gguf FILE DIRECTORY`, once. Quantised weights come
out as float32 numbers with the rounding that they went in with; training starts from these. Needs the `gguf` package.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rollstock import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def convert_gguf(source: Path, target: Path) -> None:
    """Write the model and tokenizer in the file `source` into the directory `target`, which must be new or empty.

    Raises UserError for a file that cannot be read, a directory that holds something, and a missing `gguf` package.
    """
    if not source.is_file():
        raise UserError(f"{source} does not exist")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} already holds something; give a new directory")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float32, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    except ImportError as error:
        raise UserError(f"reading {source.name} needs the gguf package: pip install 'rollstock[demo]'") from error
    except Exception as error:  # the reader raises whatever a damaged file makes it trip over
        raise UserError(f"transformers cannot read {source}: {error}") from error
    _clean(loaded).save_pretrained(target)
    tokenizer.save_pretrained(target)


def _clean(loaded: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model made from its config: transformers calls its own quantised, and will not save it."""
    from transformers import AutoModelForCausalLM

    settings = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        type(loaded.config).from_dict(settings), dtype=torch.float32, trust_remote_code=False
    )
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code, 2 for wrong input."""
    parser = argparse.ArgumentParser(prog="python -m rollstock.backends.gguf", description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, metavar="FILE", help="the GGUF file")
    parser.add_argument(
        "target", type=Path, metavar="DIRECTORY", help="a new directory for the model and its tokenizer"
    )
    given = parser.parse_args(arguments)
    try:
        convert_gguf(given.source.expanduser(), given.target.expanduser())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"wrote {given.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
