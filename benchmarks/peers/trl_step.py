"""One GRPO step of TRL's trainer, timed: the peer's side of `grpo_step.py`, which runs it under a Python of its own.

Needs `pip install torch==2.13.0 trl==1.16.0 accelerate datasets`. The trainer is used as it comes, in float32 on the
CPU; nothing of it is changed but for timers around its own methods. Prints one JSON object: for each step the seconds
of generation, of training (forward, loss, backward and optimizer) and of the whole, and the process's peak memory.

    python benchmarks/peers/trl_step.py MODEL JOB.json
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


class Clock:
    """Seconds spent in methods of a class, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, owner: type, method: str, name: str) -> None:
        """Time every call of a method."""
        plain = getattr(owner, method)

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return plain(*arguments, **options)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

        setattr(owner, method, timed)


class Steps(TrainerCallback):
    """What each optimizer step took."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.rows = clock, []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.clock.seconds.clear()
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        whole = time.perf_counter() - self.began
        spent = self.clock.seconds
        rest = spent["prepare"] - spent["generation"]
        self.rows.append(
            {
                "step": whole,
                "generation": spent["generation"],
                "training": whole - spent["prepare"],  # the optimizer included
                "rest": rest,
            }
        )


def share_of_digits(completions: list[Any], **_: Any) -> list[float]:
    """A reward that costs nothing."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(letter.isdigit() for letter in text) / max(1, len(text)) for text in texts]


def main(model_path: str, job_path: str) -> None:
    """Train for the steps of the job."""
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    clock = Clock()
    clock.watch(trl.GRPOTrainer, "_generate", "generation")
    clock.watch(trl.GRPOTrainer, "_generate_and_score_completions", "prepare")
    steps = Steps(clock)
    size = len(job["prompts"]) * job["group_size"]
    chat = job["chat"]
    prompts = [[{"role": "user", "content": text}] if chat else text for text in job["prompts"]]
    config = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        max_steps=job["steps"],
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        per_device_train_batch_size=min(job["micro_batch"], size),
        gradient_accumulation_steps=max(1, size // job["micro_batch"]),
        num_generations=job["group_size"],
        beta=0.0,
        temperature=1.0,
        max_completion_length=job["new_tokens"],
        generation_kwargs={"min_new_tokens": job["new_tokens"]},
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=job["seed"],
    )
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model_path),
        reward_funcs=share_of_digits,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        callbacks=[steps],
    )
    trainer.train()
    print(
        json.dumps(
            {
                "rows": steps.rows,
                "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                "versions": {m.__name__: m.__version__ for m in (trl, transformers, torch)},
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
