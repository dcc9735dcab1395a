"""How long training waits for a checkpoint: written while it waits, and written in the background.

The state is that of SmolLM2-135M in training: its weights, and two moments of noise for each, 1.6 GB. Both ways write
the same checkpoint into a directory of their own, in turns; what is compared is the median time until training can go
on. The background's own time, from then until the checkpoint is complete, is printed beside it.

    python benchmarks/checkpoint_pause.py [--repeats N] [--model models/smollm2-135m-instruct] [--folder DIR]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from rollstock.checkpoint import CheckpointStore, CheckpointWriter

ROOT = Path(__file__).resolve().parent.parent


def training_state(model: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Weights in float32, and moments as an optimizer would have them."""
    weights = {name: tensor.float() for path in model.glob("*.safetensors") for name, tensor in load_file(path).items()}
    generator = torch.Generator().manual_seed(0)
    moments = {
        f"{kind}.{name}": torch.randn(tensor.shape, generator=generator) * 1e-4
        for kind in ("first", "second")
        for name, tensor in weights.items()
    }
    return {"actor/model": weights, "actor/optimizer": moments}


def measure(
    state: dict[str, dict[str, torch.Tensor]], folder: Path, step: int, *, background: bool
) -> tuple[float, float]:
    """Seconds until training can go on, and until the checkpoint is complete."""
    writer = CheckpointWriter(CheckpointStore(folder, keep=1), background=background)
    began = time.monotonic()
    writer.write(step, tensors=state, state={"step": step}, score=None, live=True)
    pause = time.monotonic() - began
    writer.wait()
    return pause, time.monotonic() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m-instruct")
    parser.add_argument("--folder", type=Path, default=None)
    chosen = parser.parse_args()
    state = training_state(chosen.model)
    size = sum(tensor.numel() * tensor.element_size() for part in state.values() for tensor in part.values())
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        for number in range(chosen.repeats):
            for background in (False, True):
                path = Path(folder, "background" if background else "waits")
                found[background].append(measure(state, path, number, background=background))
                pause, whole = found[background][-1]
                print(
                    f"{'background' if background else 'waits':10} pause {pause:6.2f} s, complete after {whole:6.2f} s"
                )
    waits, behind = (statistics.median(pause for pause, _ in found[way]) for way in (False, True))
    print(f"state of {size / 1e9:.2f} GB; pause {waits:.2f} s, behind {behind:.2f} s: {behind / waits:.3f} of it")


if __name__ == "__main__":
    main()
