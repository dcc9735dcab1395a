"""The options of the torch backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollstock import option
from rollstock.backends.torch.schedule import Schedule


@dataclass(kw_only=True)
class LoRAConfig:
    """Low-rank adapters in place of full training."""

    rank: int = option(0, "rank of the adapters; 0 trains all weights", minimum=0, maximum=65_536)
    alpha: float = option(16.0, "the adapters' output is scaled by alpha / rank", minimum=0, maximum=1e6)
    targets: list[str] = option(
        [], "last names of the modules that get an adapter (q_proj, ...); none: every linear layer"
    )


@dataclass(kw_only=True)
class CompileConfig:
    """How `torch.compile` is used."""

    enabled: bool = option(False, "compile the model's layers when they first run; whether that pays is to be measured")
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = option(
        "default", "what the compiler aims at: see torch.compile"
    )
    fullgraph: bool = option(
        False,
        "take the attention of packed streams in, which compiles anew for every plan of lengths; for batches whose "
        "lengths are always the same",
    )
    dynamic: bool | None = option(
        True, "compile once for all numbers of tokens; false: for each; none: for each until there are two"
    )


@dataclass(kw_only=True)
class TorchConfig:
    """Options of `backend: {name: torch}`."""

    learning_rate: float = option(1e-6, "peak learning rate", minimum=0, maximum=10)
    schedule: Schedule = option("constant", "how the learning rate falls after the warm-up: constant, linear or cosine")
    warmup_updates: int = option(
        0, "optimizer updates over which the learning rate rises", minimum=0, maximum=1_000_000_000
    )
    warmup_ratio: float = option(
        0.0, "the same as a share of the run's updates, if warmup_updates is 0", minimum=0, maximum=1
    )
    min_lr_ratio: float = option(0.0, "where the schedule ends, as a share of learning_rate", minimum=0, maximum=1)
    beta1: float = option(0.9, "AdamW: decay of the mean of gradients", minimum=0, maximum=0.9999)
    beta2: float = option(0.999, "AdamW: decay of the mean of squared gradients", minimum=0, maximum=0.999999)
    eps: float = option(1e-8, "AdamW: added to the root in the denominator", minimum=1e-30, maximum=1)
    weight_decay: float = option(0.01, "AdamW: decay of matrices; norms and biases never decay", minimum=0, maximum=10)
    max_grad_norm: float = option(
        1.0, "gradients are scaled down to this norm; 0 leaves them as they are", minimum=0, maximum=1e9
    )
    compute_dtype: Literal["float32", "bfloat16"] = option(
        "float32", "type of matrix products; the weights that the optimizer changes stay float32"
    )
    share_prompts: bool = option(
        True, "compute only once what sequences of a micro-batch begin with alike: prompts, and parts of either"
    )
    layers: Literal["auto", "lean", "modules"] = option(
        "auto",
        "lean runs the layers of Llama-like models in float32 from their weights, in fewer operations and less memory; "
        "modules runs any model's own; auto takes lean where its numbers are the model's",
    )
    activation_checkpointing: bool = option(
        False, "keep only each layer's input, and compute the layer again in the backward pass"
    )
    activation_memory_mib: int = option(
        0,
        "what one micro-batch may keep for its backward pass, by estimate; larger ones are cut. 0: 768 on a CPU, where "
        "more at once is no faster, and no limit on other devices",
        minimum=0,
        maximum=100_000_000,
    )
    logits_memory_mib: int = option(
        512, "logits beyond this are computed in parts, each again in the backward pass", minimum=1, maximum=100_000_000
    )
    lora: LoRAConfig = option(LoRAConfig(), "low-rank adapters")
    compile: CompileConfig = option(CompileConfig(), "torch.compile")

    def __post_init__(self) -> None:
        if self.compile.enabled and self.layers == "lean":
            raise ValueError("compile.enabled compiles the model's own modules, and layers: lean does without them")
