"""A reward model's score: any Hugging Face sequence classifier with one label, such as an export of `reward_model`.

For rewards that no rule knows, learnt from preferences (arXiv:2203.02155, section 3.5). The model reads prompt and
response as the policy's chat template and tokenizer would have them, with its own tokenizer. Where it was trained on
other texts than the policy writes, its score means little: watch a reward that cannot be fooled beside it, with the
weight 0, and keep the policy near its start with a KL penalty.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rollstock import (
    REQUIRED,
    BatchReward,
    ConfigError,
    Environment,
    Sample,
    encode_sample,
    hookimpl,
    option,
    read_tokenizer,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True)
class ModelRewardConfig:
    """Options of the `model` reward."""

    path: str = option(REQUIRED, "directory of a sequence classifier with one label, and of its tokenizer")
    tokenizer: str | None = option(None, "directory of its tokenizer, where that is another one")
    batch_size: int = option(
        16, "samples that are scored in one call, under one time limit", minimum=1, maximum=1_000_000
    )
    tokens_per_pass: int = option(
        4096,
        "tokens, padding included, that go through the model at a time; a longer sample goes alone",
        minimum=1,
        maximum=1_000_000_000,
    )
    max_tokens: int | None = option(
        None, "longest sample, in tokens; none: what the model can read", minimum=1, maximum=10_000_000
    )
    overlong: Literal["abstain", "truncate_left"] = option(
        "abstain", "what to do with a longer one: say nothing, which is counted, or read its last tokens alone"
    )
    mean: float = option(
        0.0, "subtracted from each score, such as the mean over a reference's responses", minimum=-1e9, maximum=1e9
    )
    std: float = option(1.0, "then divides it", minimum=1e-6, maximum=1e9)
    dtype: Literal["float32", "bfloat16"] = option("float32", "type of the model's weights")


class ModelReward(BatchReward[ModelRewardConfig]):
    """Holds one model. Decoders are read at a sample's last token, others as transformers reads them."""

    def setup(self, environment: Environment[Any]) -> None:
        """Load the model and its tokenizer onto the run's device. Raises ConfigError if it is no reward model."""
        import torch

        path = Path(self.config.path).expanduser()
        check_directory(path)
        source = self.config.tokenizer
        place = "rewards.model.path" if source is None else "rewards.model.tokenizer"
        self._tokenizer = read_tokenizer(str(path) if source is None else source, place=place)
        self._device = self.device.torch_device()
        self._model = _load(path, getattr(torch, self.config.dtype)).eval().requires_grad_(False).to(self._device)
        longest = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        self._limit = self.config.max_tokens or longest

    def score_batch(self, samples: Sequence[Sample]) -> list[float | None]:
        """The model's score of each sample, normalised; None for one that is too long."""
        kept: dict[int, list[int]] = {}
        for place, sample in enumerate(samples):
            ids = encode_sample(self._tokenizer, sample)
            if self._limit is None or len(ids) <= self._limit:
                kept[place] = ids
            elif self.config.overlong == "truncate_left":
                kept[place] = ids[-self._limit :]
        scores: list[float | None] = [None] * len(samples)
        for places in self._passes(kept):
            for place, score in zip(places, self._read([kept[p] for p in places]), strict=True):
                scores[place] = (score - self.config.mean) / self.config.std
        return scores

    def _passes(self, kept: dict[int, list[int]]) -> Iterator[list[int]]:
        """Samples of similar length together, as many as the budget of padded tokens takes."""
        current: list[int] = []
        for place in sorted(kept, key=lambda p: len(kept[p])):
            if current and (len(current) + 1) * len(kept[place]) > self.config.tokens_per_pass:
                yield current
                current = []
            current.append(place)
        if current:
            yield current

    def _read(self, rows: Sequence[Sequence[int]]) -> list[float]:
        import torch

        lengths = torch.tensor([len(row) for row in rows])
        tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
        for row, ids in zip(tokens, rows, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        inputs = {"input_ids": tokens.to(self._device), "attention_mask": mask.long().to(self._device)}
        with torch.inference_mode():
            found: Tensor = self._last_scores(inputs, lengths.to(self._device) - 1)
        return [float(score) for score in found.float().cpu()]

    def _last_scores(self, inputs: dict[str, Tensor], last: Tensor) -> Tensor:
        """[B]. Padding is known by its place: transformers would look for a token id, and take an end for padding."""
        import torch

        model, body = self._model, getattr(self._model, self._model.base_model_prefix, None)
        if body is None or not hasattr(model, "score"):
            whole: Tensor = model(**inputs).logits[:, 0]
            return whole
        hidden = body(**inputs, use_cache=False).last_hidden_state
        scores: Tensor = model.score(hidden[torch.arange(len(last), device=last.device), last])[:, 0]
        return scores


def check_directory(path: Path) -> None:
    """Raise ConfigError for what is no directory of a one-label classifier, with what to do."""
    place = "rewards.model.path"
    if not path.is_dir():
        what = "is a file, not a directory" if path.exists() else "does not exist"
        raise ConfigError(f"{place}: {path} {what}; give the directory of a reward model (nothing is downloaded)")
    if (path / "manifest.json").is_file() and (path / "checkpoints").is_dir():
        raise ConfigError(
            f"{place}: {path} is a run, not a model; export its reward model with "
            f"`rollstock export {path} --to DIRECTORY` and give that directory"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(f"{place}: {path} has no config.json, so it is no model in Hugging Face format")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    names = [str(name) for name in config.get("architectures") or []]
    if not any(name.endswith("ForSequenceClassification") for name in names):
        raise ConfigError(
            f"{place}: {path} holds {', '.join(names) or 'a model of unknown class'}, not a sequence classifier; train "
            "one with `algorithm: reward_model` and export it"
        )


def _load(path: Path, dtype: Any) -> Any:
    """The classifier; ConfigError for several labels, missing weights, and what transformers cannot load."""
    from transformers import AutoModelForSequenceClassification

    place = "rewards.model.path"
    try:
        model, report = AutoModelForSequenceClassification.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # broken files, unknown types and remote code all arrive as different classes
        raise ConfigError(f"{place}: transformers cannot load {path} as a sequence classifier: {error}") from error
    if model.config.num_labels != 1:
        raise ConfigError(
            f"{place}: {path} tells {model.config.num_labels} labels apart; a reward model has one, which is the score"
        )
    if report["missing_keys"]:
        raise ConfigError(f"{place}: {path} lacks weights of the model, first {min(report['missing_keys'])!r}")
    return model


@hookimpl
def rollstock_reward() -> type[ModelReward]:
    """The class of this plugin."""
    return ModelReward
