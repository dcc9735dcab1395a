"""Saves checkpoints until it is killed: `python crash_writer.py ROOT`, a line on stdin starts each new writer.

The program forks one writer per line, so that torch is imported once. A writer goes on from the newest checkpoint, as
a resumed run does, prints `saved N` after each save, and saves every third step twice.
"""

import os
import sys
from pathlib import Path

import torch

from rollstock.checkpoint import CheckpointStore


def parts(step: int) -> dict[str, dict[str, torch.Tensor]]:
    noise = torch.rand(200_000, generator=torch.Generator().manual_seed(step))
    return {"actor/model": {"weight": noise}, "actor/optimizer": {"moment": noise * 2, "step": torch.tensor(step)}}


def write_for_ever(root: Path) -> None:
    store = CheckpointStore(root, keep=2, notice=lambda _: None)
    store.acquire()
    step = store.load().step + 1 if store.steps() else 0
    while True:
        for _ in range(2 if step % 3 == 0 else 1):
            store.save(step, tensors=parts(step), state={"step": step}, score=None)
        print(f"saved {step}", flush=True)
        step += 1


if __name__ == "__main__":
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            write_for_ever(Path(sys.argv[1]))
        print(f"writer {child}", flush=True)
        os.waitpid(child, 0)
        print("ended", flush=True)
