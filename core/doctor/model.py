"""How large a config's model is, found without making it: the layers are laid out with no memory behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollstock.errors import ConfigError

if TYPE_CHECKING:
    from rollstock.schema import ModelSection


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a model. linear_layers: (last name, inputs, outputs) of every matrix that an adapter may go beside."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    cache_width: int
    """Elements of keys and values that one token leaves in the cache of one layer."""
    max_positions: int | None
    linear_layers: tuple[tuple[str, int, int], ...]

    def adapter_parameters(self, rank: int, targets: list[str]) -> int:
        """Parameters of low-rank adapters of `rank` beside the layers with one of the last names `targets`, or all."""
        chosen = [layer for layer in self.linear_layers if not targets or layer[0] in targets]
        return sum(rank * (inputs + outputs) for _, inputs, outputs in chosen)


def model_facts(model: ModelSection, vocab_size: int) -> ModelFacts:
    """The facts of the model that a config means. Raises ConfigError if transformers cannot lay it out."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        config = _config(model, vocab_size)
        with torch.device("meta"):
            built: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # transformers has many exception classes for a model that it cannot make
        raise ConfigError(f"model: transformers cannot lay it out: {error}") from error
    output = built.get_output_embeddings()
    linear = [
        (name.rpartition(".")[2], module.in_features, module.out_features)
        for name, module in built.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not output
    ]
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", 1)
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return ModelFacts(
        num_parameters=sum(parameter.numel() for parameter in built.parameters()),  # tied ones are counted once
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocab_size=text.vocab_size,
        cache_width=2 * (getattr(text, "num_key_value_heads", None) or heads) * width,
        max_positions=getattr(text, "max_position_embeddings", None),
        linear_layers=tuple(linear),
    )


def _config(model: ModelSection, vocab_size: int) -> Any:
    from transformers import AutoConfig

    if model.path is not None:
        return AutoConfig.from_pretrained(model.path, local_files_only=True, trust_remote_code=False)
    block = {"vocab_size": vocab_size, **(model.config or {})}
    return AutoConfig.for_model(block.pop("model_type"), **block)
