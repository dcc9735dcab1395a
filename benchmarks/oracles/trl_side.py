"""TRL's answers: its trainers' own loss and advantage methods, called on drawn numbers. Runs under the Python of TRL's
environment.

    PYTHON trl_side.py DRAWS.safetensors OUTPUT.safetensors

Written for TRL 1.16.0, whose names it uses. Each trainer is built as usual, around the tiny model in the folder `model`
beside the draws. Where it asks the model for log-probs, or for rewards of a reward model, it is answered with the drawn
ones, so that gradients are by those (except where a case is about the model); where it would generate, the drawn
responses are handed to it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
import trl
from answers import Results, main
from cases import Case
from datasets import Dataset
from draws import RESPONSE_LIMIT, VOCABULARY, Columns
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl_cases import CASES, DIFFERENT

MODEL = Path(sys.argv[1]).with_name("model")
ROWS = {
    "policy": {"prompt": "w2 w3"},
    "dpo": {"prompt": "w2 w3", "chosen": " w4", "rejected": " w5"},
    "reward": {"chosen": "w2 w3 w4", "rejected": "w2 w3 w5"},
    "sft": {"text": "w2 w3 w4"},
}
TRAINERS: Mapping[str, tuple[str, type[Any], type[Any]]] = {
    "grpo": ("policy", trl.GRPOConfig, trl.GRPOTrainer),
    "gmpo": ("policy", GMPOConfig, GMPOTrainer),
    "rloo": ("policy", trl.RLOOConfig, trl.RLOOTrainer),
    "dpo": ("dpo", trl.DPOConfig, trl.DPOTrainer),
    "reward": ("reward", trl.RewardConfig, trl.RewardTrainer),
    "sft": ("sft", trl.SFTConfig, trl.SFTTrainer),
}


class Replay:
    """In place of a model: says the drawn log-probs `[B, T]` of the last T tokens, 0 where no label asks for one."""

    def __init__(self, logprobs: Tensor) -> None:
        self.logprobs = logprobs

    def __call__(self, labels: Tensor, **inputs: Any) -> SimpleNamespace:
        asked = labels[:, -self.logprobs.shape[1] :] != -100
        nothing = torch.zeros_like(self.logprobs)
        return SimpleNamespace(
            log_probs=torch.where(asked, self.logprobs, 0.0),
            entropy=nothing,
            mean_logits=nothing,
            is_top1=torch.zeros_like(asked),
            label_mask=asked,
        )


def make_trainer(name: str, size: int, **options: Any) -> Any:
    """A trainer for batches of `size` trajectories, on a CPU and in one process."""
    data, config_class, trainer_class = TRAINERS[name]
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model_class = Qwen3ForSequenceClassification if name == "reward" else Qwen3ForCausalLM
    model = model_class.from_pretrained(MODEL, num_labels=1, dtype=torch.float32)
    if data == "policy":
        options = {"num_generations": 4, "max_completion_length": RESPONSE_LIMIT, **options}
    arguments = config_class(
        output_dir=str(MODEL.with_name("out")),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=size,
        **options,
    )
    extra = {"reward_funcs": _no_reward} if data == "policy" else {}
    trainer = trainer_class(
        model=model,
        args=arguments,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"),
        train_dataset=Dataset.from_list([ROWS[data]] * size),
        **extra,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # what `train` sets before the first step
    return trainer


def _no_reward(completions: list[Any], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def loss(columns: Columns, case: Case) -> Results:
    """A policy loss on given advantages, one a trajectory, with its gradient."""
    mask, inside = columns["mask"].long(), _inside(columns).long()
    size = len(mask)
    options = dict(case.options)
    drawn = columns["old_logprobs" if options.pop("on_policy", False) else "logprobs"]
    trainer = make_trainer(case.theirs, size, **options)
    leaf = drawn.clone().requires_grad_()
    inputs = {
        "prompt_ids": torch.full((size, 1), 2),
        "prompt_mask": torch.ones(size, 1, dtype=torch.long),
        "completion_ids": columns["tokens"],
        "completion_mask": inside,
        "tool_mask": mask,
        "advantages": columns["sequence_advantages"],
        "old_per_token_logps": columns["old_logprobs"],
        "old_logps": torch.where(columns["mask"], columns["old_logprobs"], 0.0).sum(1),
        "ref_per_token_logps": columns["ref_logprobs"],
        "num_items_in_batch": mask.sum(),
    }
    if case.theirs == "rloo":  # it knows no tool mask
        inputs["completion_mask"] = mask
    return _with_gradient(trainer.compute_loss(Replay(leaf), inputs), leaf)


def advantages(columns: Columns, case: Case) -> Results:
    """What a trainer makes of the rewards of responses that are handed to it."""
    trainer = make_trainer(case.theirs, len(columns["mask"]), **case.options)
    found = _scored(trainer, columns, case)["advantages"].double()
    return {"advantages": found[:, None] * columns["mask"]}


def sampler_weights(columns: Columns, case: Case) -> Results:
    """What losses are multiplied by where another engine sampled, `[B, T]`."""
    mask = columns["mask"]
    trainer = make_trainer(case.theirs, len(mask), **case.options)
    trainer.use_vllm = True  # only from here on, so that no engine is started
    found = _scored(trainer, columns, case)["importance_sampling_ratio"].double()  # [B, T] or [B, 1]
    width = mask.shape[1] - found.shape[1] if found.shape[1] > 1 else 0
    return {"weights": torch.nn.functional.pad(found, (0, width)) * mask}


def _scored(trainer: Any, columns: Columns, case: Case) -> dict[str, Tensor]:
    """What a trainer says of responses, if it has generated the drawn ones and rewards are the drawn ones."""
    inside, mask = _inside(columns), columns["mask"]
    size = len(mask)
    scores = columns["scores"].tolist()
    trainer.reward_funcs = [lambda completions, **rest: scores]
    trainer.reward_func_names = ["drawn"]
    responses = [row[chosen].tolist() for row, chosen in zip(columns["tokens"], inside, strict=True)]
    prompts = [[2]] * size
    texts = ["w4"] * size
    if case.theirs == "rloo":
        trainer._generate = lambda given, *rest: (prompts, responses, texts)
    else:
        tool_masks = [row[chosen].long().tolist() for row, chosen in zip(mask, inside, strict=True)]
        sampled = [row[chosen].tolist() for row, chosen in zip(columns["rollout_logprobs"], inside, strict=True)]
        trainer._generate = lambda given, *rest: (prompts, responses, tool_masks, texts, sampled, {}, None, None)
    said = {id(trainer.model): columns["old_logprobs"], id(trainer.ref_model): columns["ref_logprobs"]}
    trainer._get_per_token_logps_and_entropies = lambda model, *rest, **more: (
        torch.where(inside, said[id(model)], 0.0)[:, : inside.any(0).sum()],
        None,
        None,
    )
    found: dict[str, Tensor] = trainer._generate_and_score_completions([dict(ROWS["policy"]) for _ in range(size)])
    return found


def dpo(columns: Columns, case: Case) -> Results:
    """A loss of pairs: the first half of a draw is chosen over the second. Several losses are mixed as `mix` says.

    `mix` has weights for the pairs as they are and for the pairs swapped.
    """
    options = dict(case.options)
    kept, swapped = options.pop("mix", (1.0, 0.0))
    mask = columns["mask"].long()
    size = len(mask)
    trainer = make_trainer("dpo", size // 2, **options)
    leaf = columns["logprobs"].clone().requires_grad_()

    def one(order: Tensor) -> Tensor:
        trainer.ref_model = Replay(columns["ref_logprobs"][order])
        prompt = torch.full((size, 1), 2)
        inputs = {
            "input_ids": torch.cat([prompt, columns["tokens"]], 1),
            "attention_mask": torch.cat([torch.ones_like(prompt), _inside(columns)[order].long()], 1),
            "completion_mask": torch.cat([torch.zeros_like(prompt), mask[order]], 1),
        }
        found: Tensor = trainer.compute_loss(Replay(leaf[order]), inputs)
        return found

    straight = torch.arange(size)
    crossed = torch.cat([straight[size // 2 :], straight[: size // 2]])
    value = kept * one(straight)
    if swapped:
        value = value + swapped * one(crossed)
    return _with_gradient(value, leaf)


def reward_model(columns: Columns, case: Case) -> Results:
    """The Bradley-Terry loss of pairs, with its gradient by the predicted rewards `[B]`."""
    options = dict(case.options)
    margin, (kept, swapped) = options.pop("margin", 0.0), options.pop("mix", (1.0, 0.0))
    pairs = len(columns["heads"]) // 2
    trainer = make_trainer("reward", pairs, **options)
    leaf = columns["heads"].clone().requires_grad_()

    def one(heads: Tensor) -> Tensor:
        inputs = {
            "attention_mask": torch.ones(len(heads), 1, dtype=torch.long),
            "margin": torch.full((pairs,), margin).double(),
        }
        found: Tensor = trainer.compute_loss(lambda **given: SimpleNamespace(logits=heads[:, None]), inputs)
        return found

    value = kept * one(leaf)
    if swapped:
        value = value + swapped * one(leaf.roll(pairs))
    return _with_gradient(value, leaf)


def sft(columns: Columns, case: Case) -> Results:
    """The loss of supervised fine-tuning, with its gradient by the log-probs."""
    mask = columns["mask"]
    trainer = make_trainer("sft", len(mask), **case.options)
    leaf = columns["logprobs"].clone().requires_grad_()
    labels = torch.where(mask, columns["tokens"], -100)
    inputs = {"input_ids": columns["tokens"], "attention_mask": _inside(columns).long(), "labels": labels}
    return _with_gradient(trainer.compute_loss(Replay(leaf), inputs), leaf)


def through_model(columns: Columns, case: Case) -> Results:
    """A loss of the tiny model itself, the norm of its gradient, and what the model says of each token, `[B, T]`."""
    mask, inside, prompts = columns["mask"].long(), _inside(columns).long(), columns["prompts"]
    size = len(mask)
    trainer = make_trainer(case.theirs, size // (2 if case.theirs == "dpo" else 1), **case.options)
    prompt_mask, nothing = (prompts > 0).long(), torch.zeros_like(prompts)
    whole = {
        "input_ids": _joined(prompts, columns["tokens"], prompt_mask),
        "attention_mask": _joined(prompt_mask, inside, prompt_mask),
    }
    chosen = _joined(nothing, mask, prompt_mask)
    found: Results = {}
    if case.theirs == "dpo":
        reference = _joined(nothing.double(), columns["ref_logprobs"], prompt_mask)
        trainer.ref_model = Replay(reference[:, 1:])
        inputs = {**whole, "completion_mask": chosen}
    elif case.theirs == "sft":
        inputs = {**whole, "labels": torch.where(chosen > 0, whole["input_ids"], -100)}
    else:
        prompts, prompt_mask = _left_padded(prompts)
        inputs = {
            "prompt_ids": prompts,
            "prompt_mask": prompt_mask,
            "completion_ids": columns["tokens"],
            "completion_mask": inside,
            "tool_mask": mask,
            "advantages": columns["sequence_advantages"],
            "old_per_token_logps": columns["old_logprobs"],
            "num_items_in_batch": mask.sum(),
        }
        logprobs, entropy, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([prompts, columns["tokens"]], 1),
            torch.cat([prompt_mask, inside], 1),
            mask.shape[1],
            compute_entropy=True,
        )
        found = {"logprobs": logprobs.detach(), "entropy": entropy.detach()}
    value = trainer.compute_loss(trainer.model, inputs)
    value.backward()
    gradients = [parameter.grad.double().square().sum() for parameter in trainer.model.parameters()]
    return {**found, "loss": value.detach(), "grad_norm": torch.stack(gradients).sum().sqrt()}


def _joined(first: Tensor, second: Tensor, mask: Tensor) -> Tensor:
    """What stands in the mask of `first`, then `second`, then padding, row by row."""
    order = torch.cat([mask, torch.ones_like(second, dtype=mask.dtype)], 1).argsort(dim=1, descending=True, stable=True)
    counts = mask.sum(1, keepdim=True) + second.shape[1]
    places = torch.arange(order.shape[1])
    return torch.where(places < counts, torch.cat([first, second], 1).gather(1, order), 0)


def _left_padded(prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Right-padded prompts as TRL has them, and the mask of what is not padding."""
    order = (prompts > 0).long().argsort(dim=1, stable=True)
    moved = prompts.gather(1, order)
    return moved, (moved > 0).long()


def _inside(columns: Columns) -> Tensor:
    """`[B, T]` bool: everything up to the last token of the policy, observations too."""
    return columns["mask"].flip(1).cumsum(1).flip(1) > 0


def _with_gradient(value: Tensor, leaf: Tensor) -> Results:
    (gradient,) = torch.autograd.grad(value, leaf)
    return {"loss": value.detach().clone(), "gradient": gradient}


KINDS: Mapping[str, Callable[[Columns, Case], Results]] = {
    "advantages": advantages,
    "sampler_weights": sampler_weights,
    "loss": loss,
    "dpo": dpo,
    "reward_model": reward_model,
    "sft": sft,
    "through_model": through_model,
}


if __name__ == "__main__":
    main("trl", KINDS, [*CASES, *DIFFERENT])
