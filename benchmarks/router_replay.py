"""How far trainer and sampler are apart in log-probs of a mixture-of-experts model, with and without replayed experts.

    python benchmarks/router_replay.py
    python benchmarks/router_replay.py --layers 8 --experts 64 --top-k 8 --json

One engine samples, in float32 or bfloat16, from a random Qwen3-MoE; one trainer then scores the same tokens, in another
precision and in batches cut otherwise. A rounding error that changes an expert changes a log-prob by far more than
rounding does; with the router `replay` the trainer takes the sampler's experts. Printed for each pair of precisions:
the mean and the largest difference of log-probs in nats, and the share of tokens whose
probability ratio is outside of PPO's usual clip range, 0.8 to 1.2, before anything was learned.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollstock import Batch, Completion, GenerationRequest, ModelSpec, Router, Sampling, Trajectory, derive_seed
from rollstock.backends.native import Native, NativeConfig
from rollstock.backends.torch.backend import TorchBackend
from rollstock.backends.torch.config import TorchConfig
from rollstock.hardware.cpu import CPU
from rollstock.manager import make_manager
from rollstock.routing import filled

VOCABULARY = 512
PRECISIONS = (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"))


@dataclass(frozen=True)
class Gap:
    """What is printed of one pair of precisions."""

    sampler: str
    trainer: str
    replayed: bool
    mean: float
    largest: float
    clipped: float


def main() -> None:
    options = _arguments()
    torch.set_num_threads(options.threads)
    spec = _model(options)
    requests = _requests(options)
    gaps: list[Gap] = []
    for sampler in ("float32", "bfloat16"):
        batch = _sample(spec, requests, sampler, options.tokens)
        for trainer in (trainer for own, trainer in PRECISIONS if own == sampler):
            for replayed in (False, True):
                seen = batch if replayed else batch.without("routed_experts")
                gaps.append(_gap(_score(spec, seen, trainer), batch, sampler, trainer, replayed))
    if options.json:
        print(json.dumps([vars(gap) for gap in gaps], indent=1))
    else:
        _table(gaps)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "layers": 8, "hidden": 256, "experts": 32, "top-k": 4, "prompts": 4, "samples": 4, "tokens": 48, "threads": 1,
        "seed": 0,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _model(options: argparse.Namespace) -> ModelSpec:
    """Weights are twice as large as is usual at the start, so that the model has opinions, as a trained one does."""
    block = {
        "model_type": "qwen3_moe", "vocab_size": VOCABULARY, "hidden_size": options.hidden,
        "intermediate_size": options.hidden, "moe_intermediate_size": options.hidden // 2,
        "num_experts": options.experts, "num_experts_per_tok": options.top_k, "norm_topk_prob": True,
        "num_hidden_layers": options.layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 1024, "initializer_range": 0.04,
    }  # fmt: skip
    return ModelSpec(config=block, seed=options.seed)


def _requests(options: argparse.Namespace) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(options.seed)
    found = []
    for prompt in range(options.prompts):
        tokens = tuple(torch.randint(1, VOCABULARY, (16 + prompt,), generator=generator).tolist())
        found += [
            GenerationRequest(prompt=tokens, seed=derive_seed(options.seed, prompt, k)) for k in range(options.samples)
        ]
    return found


def _router() -> Router[Any]:
    return make_manager().create_as(Router, {"name": "replay"})


def _sample(spec: ModelSpec, requests: list[GenerationRequest], dtype: Any, tokens: int) -> Batch:
    engine = Native(NativeConfig(dtype=dtype))
    engine.use_router(_router())
    engine.setup(spec, CPU(), None)
    done = engine.generate(requests, Sampling(max_new_tokens=tokens)).completions
    groups = {prompt: number for number, prompt in enumerate(dict.fromkeys(request.prompt for request in requests))}
    return Batch.from_trajectories(
        [_trajectory(request, one, groups[request.prompt]) for request, one in zip(requests, done, strict=True)]
    )


def _trajectory(request: GenerationRequest, done: Completion, group: int) -> Trajectory:
    assert done.routed_experts is not None
    return Trajectory(
        prompt=torch.tensor(request.prompt),
        response=torch.tensor(done.tokens),
        action_mask=torch.ones(len(done.tokens), dtype=torch.bool),
        rollout_logprobs=torch.tensor(done.logprobs),
        versions=torch.tensor(done.versions),
        group=group,
        routed_experts=filled(done.routed_experts, len(request.prompt) + len(done.tokens)),
    )


def _score(spec: ModelSpec, batch: Batch, dtype: Any) -> Tensor:
    """[N]: the trainer's log-probs, from micro-batches of four trajectories that the sampler never saw together."""
    backend = TorchBackend(TorchConfig(compute_dtype=dtype))
    backend.use_router(_router())
    backend.setup(spec, CPU(), trainable=False, total_updates=0)
    step = max(1, len(batch) // 4)
    cuts = [list(range(start, len(batch), step)) for start in range(step)]
    return backend.forward(batch, ["logprobs"], temperature=1.0, micro_batches=cuts)["logprobs"]


def _gap(found: Tensor, batch: Batch, sampler: str, trainer: str, replayed: bool) -> Gap:
    difference = (found - batch.flat("rollout_logprobs")).double()
    ratio = difference.exp()
    outside = ((ratio < 0.8) | (ratio > 1.2)).double().mean()
    return Gap(
        sampler, trainer, replayed, float(difference.abs().mean()), float(difference.abs().max()), float(outside)
    )


def _table(gaps: list[Gap]) -> None:
    print("| sampler | trainer | experts | mean difference | largest | ratio outside 0.8-1.2 |")
    print("|---|---|---|---|---|---|")
    for gap in gaps:
        experts = "replayed" if gap.replayed else "chosen again"
        print(f"| {gap.sampler} | {gap.trainer} | {experts} | {gap.mean:.2g} | {gap.largest:.2g} | {gap.clipped:.2%} |")


if __name__ == "__main__":
    main()
