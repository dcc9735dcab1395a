"""Reward models on disk: what transformers calls sequence classification with one label.

For the backends of this folder. A model with the head `score` is trained as a causal language model's transformer with
one linear layer on top; here it gets the class, the config and the weight names under which
`AutoModelForSequenceClassification` loads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollstock import UserError
from rollstock.backends.models import named_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def classifier_config(model: PreTrainedModel) -> PretrainedConfig:
    """The config of the one-label classifier that has the transformer of `model`, a causal language model.

    transformers finds a sequence's end, where the score is read, by the ids: at the last one that is not the padding's.
    Where the padding token is also one that ends a response, that would be a token too early, so the classifier then
    has no padding token; transformers reads single sequences rightly and refuses batches until it is given another.
    """
    config = type(model.config).from_dict(model.config.to_dict())
    config.num_labels = 1
    config.architectures = [_classifier_class(config).__name__]
    text = config.get_text_config()
    ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
    if text.pad_token_id in ends:
        text.pad_token_id = None
    return config


def score_weight_name(model: PreTrainedModel) -> str:
    """What the score head's weight is called in the classifier that has the transformer of `model`.

    Raises UserError if transformers has no such classifier, or one that is more than this transformer and a linear
    layer: the model could be trained, and nobody could load it.
    """
    config = classifier_config(model)
    with torch.device("meta"):
        classifier = _classifier_class(config)(config)
    names = {name: tensor.shape for name, tensor in named_weights(classifier)}
    head = model.get_output_embeddings()
    dropped = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    ours = {name for name, tensor in named_weights(model) if name in names or id(tensor) not in dropped}
    more, fewer = sorted(names.keys() - ours), sorted(ours - names.keys())
    if len(more) != 1 or fewer or names[more[0]] != (1, config.get_text_config().hidden_size):
        odd = ", ".join([*more, *fewer][:3]) or "nothing beside the transformer"
        raise UserError(
            f"model: {type(classifier).__name__} of transformers is not the transformer of {type(model).__name__} with "
            f"one linear layer (it differs in {odd}), so a reward model of it could not be exported; choose another "
            "architecture"
        )
    return more[0]


def saved_score_weight(path: Path, name: str) -> Tensor | None:
    """The weight of that name in a directory in Hugging Face format, as float32; None if there is none.

    Raises UserError for one with another number of labels than one.
    """
    from safetensors import safe_open

    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            if name in opened.keys():  # noqa: SIM118  # it is no mapping
                weight: Tensor = opened.get_tensor(name).float()
                if weight.shape[0] != 1:
                    raise UserError(
                        f"model.path: {path} classifies into {weight.shape[0]} labels; a reward model has one"
                    )
                return weight
    return None


def _classifier_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Raises UserError if there is none for this type of model."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise UserError(
            f"model: transformers has no sequence classification for {config.model_type}, so a reward model of it "
            "could not be exported; choose another architecture, such as llama or qwen3"
        )
    found: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    chosen: type[PreTrainedModel] = found
    return chosen
