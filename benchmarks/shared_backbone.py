"""What a shared backbone saves: peak memory of PPO with a critic of its own against one transformer with both heads.

For the figures in docs/explanation/performance.md: `python benchmarks/shared_backbone.py [--smollm2 DIRECTORY]`. Each
measurement is a run of its own in a fresh process, of two steps on the same data, that differs in
`algorithm.shared_backbone` alone. On a CPU the peak is the largest resident set of the process, and what the program
itself takes (everything imported, no model) is told apart; on another device it is the device plugin's own count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TINY = {
    "config": {
        "model_type": "llama",
        "hidden_size": 192,
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    },
    "tokenizer": {"characters": "0123456789+-= "},
}


def settings(model: dict[str, Any], directory: Path, *, shared: bool, device: str) -> dict[str, Any]:
    """The config of one measured run."""
    return {
        "model": model,
        "device": device,
        "algorithm": {"name": "ppo", "shared_backbone": shared},
        "environment": {"name": "arithmetic", "chat": False, "prompt": "{a}{op}{b}="},
        "sampling": {"max_new_tokens": 16},
        "train": {"steps": 2, "prompts_per_step": 8},
        "evaluation": {"at_start": False, "at_end": False},
        "checkpoint": {"every_minutes": 0, "compression": "none"},
        "trackers": ["jsonl"],
        "reward_limits": {"workers": 1},
        "run": {"directory": str(directory)},
    }


def measure(path: Path) -> None:
    """In a process of its own: train as the config says, and print the peak and what the program takes, as JSON."""
    import transformers.models.llama.modeling_llama  # noqa: F401  # a part of the program, not of the model

    from rollstock.config import load_config
    from rollstock.defaults import DEFAULT_PLUGINS
    from rollstock.interfaces.device import Device
    from rollstock.launch import train
    from rollstock.manager import make_manager
    from rollstock.testing import read_metrics

    config = load_config(str(path))
    device = make_manager().create_as(Device, config.device)
    device.activate()
    is_default = config.device.name == DEFAULT_PLUGINS["device"]
    before = device.memory().peak if is_default else 0  # the program; elsewhere the count is of tensors alone
    rows = [row["metrics"] for row in read_metrics(train(config).directory) if "metrics" in row]
    peak = max(row["perf/peak_memory_gib"] for row in rows) * 2**30
    seconds = rows[-1]["timing_s/prepare"] + rows[-1]["timing_s/update"]
    print(json.dumps({"peak": peak, "program": before, "seconds": seconds}))


def run(model: dict[str, Any], *, shared: bool, device: str) -> dict[str, float]:
    """One measurement in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"  # JSON is YAML
        config.write_text(json.dumps(settings(model, Path(folder) / "run", shared=shared, device=device)))
        done = subprocess.run(
            [sys.executable, __file__, "--measure", str(config)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found


def main() -> None:
    """Measure both models, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smollm2", type=Path, default=Path("models/smollm2-135m-instruct"), help="its directory")
    parser.add_argument("--device", default="cpu", help="the device plugin")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure)
        return
    models: dict[str, dict[str, Any]] = {"tiny (1.2M)": TINY}
    if options.smollm2.is_dir():
        models["SmolLM2 (135M)"] = {"path": str(options.smollm2.resolve())}
    print("| model | critic | peak | above the program | prepare and update |\n|---|---|---|---|---|")
    for name, model in models.items():
        above: list[float] = []
        for shared in (False, True):
            found = run(model, shared=shared, device=options.device)
            above.append(found["peak"] - found["program"])
            critic = "shared backbone" if shared else "of its own"
            sizes = f"{found['peak'] / 2**20:,.0f} MiB | {above[-1] / 2**20:,.0f} MiB"
            print(f"| {name} | {critic} | {sizes} | {found['seconds']:.2f} s |", flush=True)
        print(f"| {name} | saved | | {(1 - above[1] / above[0]):.0%} | |", flush=True)


if __name__ == "__main__":
    main()
