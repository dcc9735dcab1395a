"""A GRPO step of rollstock against one of TRL's, or its generation against vLLM's, as ratios.

Both sides have the same machine, model, prompts and lengths, and compute in float32 on the CPU with the same number of
threads: 8 prompts x 8 samples x exactly 32 tokens unless told otherwise. Runs alternate, the first step of each is
dropped, and medians over all runs are compared. Nothing else may run meanwhile: spinning threads of a neighbour ruin
both sides, and not equally.

    python -m venv .venv-trl && .venv-trl/bin/pip install torch==2.13.0 trl==1.16.0 accelerate datasets
    python benchmarks/grpo_step.py --peer trl --peer-python .venv-trl/bin/python
    python benchmarks/grpo_step.py --peer vllm --peer-python VENV/bin/python --models smollm2
    python benchmarks/grpo_step.py --models tiny --rounds 1

Without `--peer` only rollstock's figures are printed. SmolLM2 is looked for where `examples/prepare_smollm2.py` puts
it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2 = ROOT / "models" / "smollm2-135m-instruct"
WARM_UP = 1
PEERS = {"trl": "TRL", "vllm": "vLLM"}
TINY = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
PROMPTS = [
    "Write down the first ten prime numbers.",
    "Count from 1 to 20.",
    "List the years of five Olympic games.",
    "What are the digits of pi?",
    "Give me a random phone number.",
    "What is 123 times 7?",
    "List the powers of two.",
    "How many days does each month have?",
]
REWARD = '''"""The share of digits in a response."""


def share(sample):
    return sum(letter.isdigit() for letter in sample.response) / max(1, len(sample.response))
'''


def tiny_model(folder: Path) -> Path:
    """A model of 0.8 million random weights with a tokenizer of characters, in Hugging Face format."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from rollstock.schema import ModelSection
    from rollstock.tokens import load_tokenizer

    letters = "".join(sorted({letter for prompt in PROMPTS for letter in prompt}))
    tokenizer = load_tokenizer(ModelSection(config=TINY, tokenizer={"characters": letters}))
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(**TINY, **ids, pad_token_id=tokenizer.pad_token_id)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def ours(model: Path, job: dict[str, Any], folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Run rollstock; for each step the seconds of its parts, and the peak memory of its process."""
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in job["prompts"]))
    (folder / "reward.py").write_text(REWARD)
    directory = folder / "run"
    config = {
        "model": {"path": str(model)},
        "algorithm": {"name": "grpo", "group_size": job["group_size"], "aggregation": "token_mean"},
        "environment": {
            "name": "jsonl",
            "path": str(folder / "tasks.jsonl"),
            "chat": job["chat"],
            "answer": None,
            "match": "none",
            "heldout_fraction": 0.0,
        },
        "rewards": [{"name": "rule", "kind": "function", "function": f"{folder / 'reward.py'}:share"}],
        "backend": {"name": "torch", "learning_rate": job["learning_rate"], "schedule": "constant"},
        "sampling": {"max_new_tokens": job["new_tokens"], "min_new_tokens": job["new_tokens"]},
        "train": {"steps": job["steps"], "prompts_per_step": len(job["prompts"]), "seed": job["seed"]},
        "evaluation": {"at_start": False, "at_end": False},
        "checkpoint": {"every_minutes": 0, "every_steps": 0},
        "run": {"directory": str(directory)},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"]), "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "rollstock", "train", str(path), "--overwrite", *overrides]
    with (folder / "ours.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"error: rollstock ended with {status}:\n{(folder / 'ours.log').read_text()[-2000:]}")
    rows = []
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line).get("metrics")
        if metrics:
            step, generation = metrics["timing_s/step"], metrics["timing_s/gen"]
            training = metrics["timing_s/update"]
            engine = metrics["rollout/generated_tokens"] / metrics["rollout/tokens_per_second"]
            rows.append(
                {
                    "step": step,
                    "generation": generation,
                    "training": training,
                    "rest": step - generation - training,
                    "loop": step - engine - training - metrics["timing_s/reward"],
                }
            )
    return {"rows": rows, "peak_gib": usage.ru_maxrss / 2**20}


def theirs(peer: str, model: Path, job: dict[str, Any], folder: Path, python: str) -> dict[str, Any]:
    """Run a peer under its own Python."""
    (folder / "job.json").write_text(json.dumps(job))
    environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"]), "HF_HUB_OFFLINE": "1"}
    script = ROOT / "benchmarks" / "peers" / f"{peer}_step.py"
    done = subprocess.run(
        [python, str(script), str(model), str(folder / "job.json")], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"error: {PEERS[peer]} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def medians(results: list[dict[str, Any]]) -> dict[str, float]:
    """Over the steps of all runs, without those of the warm-up."""
    rows = [row for result in results for row in result["rows"][WARM_UP:]]
    found = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return {**found, "peak_gib": statistics.median(result["peak_gib"] for result in results)}


def report(model: str, job: dict[str, Any], mine: dict[str, float], peer: str, their: dict[str, float]) -> str:
    """The table of one model; `their` has what the peer does, nothing without one."""
    tokens = len(job["prompts"]) * job["group_size"] * job["new_tokens"]
    name = PEERS.get(peer, "")
    lines = [f"{model}: {len(job['prompts'])} prompts x {job['group_size']} samples x {job['new_tokens']} tokens"]
    for label, part in (("whole step", "step"), ("generation", "generation"), ("training", "training")):
        line = f"  {label + ', s':<22}{mine[part]:9.3f}"
        if part in their:
            line += f"  {name} {their[part]:9.3f}  {name} / rollstock {their[part] / mine[part]:6.2f}"
        lines.append(line)
    lines.append(
        f"  {'rest, s':<22}{mine['rest']:9.3f}" + (f"  {name} {their['rest']:9.3f}" if "rest" in their else "")
    )
    line = f"  {'generated tokens/s':<22}{tokens / mine['generation']:9.0f}"
    lines.append(line + (f"  {name} {tokens / their['generation']:9.0f}" if their else ""))
    # What is neither the engine's, nor training, nor reward: tasks, tokens, advantages, weights, metrics, files.
    lines.append(f"  {'loop, % of a step':<22}{100 * mine['loop'] / mine['step']:9.2f}")
    line = f"  {'peak memory, GiB':<22}{mine['peak_gib']:9.2f}"
    if "step" in their:  # a peer that only generates needs less
        line += f"  {name} {their['peak_gib']:9.2f}  rollstock / {name} {mine['peak_gib'] / their['peak_gib']:6.2f}"
    return "\n".join([*lines, line])


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", choices=list(PEERS), default="", help="whom to compare with; default: nobody")
    parser.add_argument("--peer-python", help="the Python that has the peer; default: .venv-PEER/bin/python")
    parser.add_argument("--models", nargs="+", choices=["smollm2", "tiny"], default=["tiny", "smollm2"])
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side, alternating")
    parser.add_argument("--steps", type=int, default=4, help="steps of each run, the first of which is dropped")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of rollstock's config")
    options = parser.parse_args(arguments)
    job = {
        "prompts": PROMPTS,
        "group_size": options.group_size,
        "new_tokens": options.new_tokens,
        "steps": options.steps,
        "threads": options.threads,
        "learning_rate": 1e-5,
        "micro_batch": 16,
        "seed": 0,
    }
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.models:
            folder = Path(temporary) / name
            folder.mkdir()
            if name == "smollm2" and not SMOLLM2.exists():
                print(f"{name}: not in {SMOLLM2}; run examples/prepare_smollm2.py first", file=sys.stderr)
                return 2
            model = SMOLLM2 if name == "smollm2" else tiny_model(folder / "model")
            mine, peers = [], []
            this = {**job, "chat": name == "smollm2"}
            for _ in range(options.rounds):
                began = time.perf_counter()
                mine.append(ours(model, this, folder, options.set))
                if options.peer:
                    python = options.peer_python or f".venv-{options.peer}/bin/python"
                    peers.append(theirs(options.peer, model, this, folder, python))
                print(f"  ({name}, a round in {time.perf_counter() - began:.0f} s)", file=sys.stderr, flush=True)
            print(report(name, this, medians(mine), options.peer, medians(peers) if peers else {}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
