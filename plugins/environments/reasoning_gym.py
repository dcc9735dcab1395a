"""Tasks of the reasoning-gym package: any of its generators by name, scored by its own verifiers.

For reasoning tasks without data files. Tasks are made from seeds, those of the two splits from different ones, and a
training task whose question was held out by coincidence is replaced by another. What a task means, and what its
options are, is reasoning-gym's to say (`pip install 'rollstock[tasks]'`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import Any

from rollstock import (
    REQUIRED,
    ConfigError,
    Environment,
    Sample,
    Split,
    Task,
    derive_seed,
    hookimpl,
    import_optional,
    option,
    suggest,
)

MAX_REPLACEMENTS = 50


@dataclass(kw_only=True)
class ReasoningGymConfig:
    """Options of the `reasoning_gym` environment."""

    task: str = option(REQUIRED, "name of a reasoning-gym dataset, such as chain_sum")
    options: dict[str, Any] = option({}, "options of that dataset; seed and size are set here")
    train_size: int = option(10_000, "number of training tasks", minimum=1, maximum=1_000_000_000)
    heldout_size: int = option(200, "number of held-out tasks", minimum=0, maximum=1_000_000_000)
    split_seed: int = option(0, "another number makes other tasks")
    system: str | None = option(None, "a system message before each question (chat only)")
    suffix: str = option("", "text after each question, such as ' Answer with a number only.'")
    chat: bool = option(True, "ask as a chat message; otherwise the question is encoded as it is")
    tag: str | None = option(
        None, "score what stands between <tag> and </tag>, and 0 without it; none: the whole response"
    )

    def __post_init__(self) -> None:
        if self.system is not None and not self.chat:
            raise ValueError("a system message needs chat: true; put its text into the suffix")
        for name in ("seed", "size"):
            if name in self.options:
                raise ValueError(
                    f"options.{name} is set by the environment; use split_seed, train_size and heldout_size"
                )


class ReasoningGym(Environment[ReasoningGymConfig]):
    """A dataset of reasoning-gym for each split. Scores are the verifier's, from 0 to 1, partial credit included."""

    def setup(self, seed: int) -> None:
        """Make the generators. Raises ConfigError for an unknown dataset or option, PluginError without the package.

        Tasks depend on `split_seed`, not on the run's seed, so that runs with different seeds can be compared.
        """
        # The generators seed item i with seed + i: the ranges of the two splits lie side by side.
        base = derive_seed(self.config.split_seed, "reasoning_gym") % 2**31
        self._datasets: dict[Split, Any] = {
            "train": self._dataset(base + self.config.heldout_size, self.config.train_size)
        }
        if self.config.heldout_size:
            self._datasets["heldout"] = self._dataset(base, self.config.heldout_size)
        self._base = base

    def num_tasks(self, split: Split) -> int:
        """The size of a split."""
        return self.config.train_size if split == "train" else self.config.heldout_size

    def task(self, split: Split, index: int) -> Task:
        """The task at `index`; its metadata hold what the verifier needs."""
        entry = self._entry(split, index)
        question = str(entry["question"]) + self.config.suffix
        system = [] if self.config.system is None else [{"role": "system", "content": self.config.system}]
        return Task(
            id=f"{self.config.task}:{split}:{index}",
            prompt=[*system, {"role": "user", "content": question}] if self.config.chat else question,
            answer=entry["answer"],
            metadata={"entry": entry},
        )

    def score(self, sample: Sample) -> float:
        """What the dataset's verifier gives for the response, or for what stands in the last pair of tags."""
        answer: str | None = sample.response.strip()
        if self.config.tag is not None:
            tag = re.escape(self.config.tag)
            found = re.findall(rf"<{tag}>(.*?)</{tag}>", sample.response, re.DOTALL)
            if not found:
                return 0.0
            answer = found[-1].strip()
        return float(self._datasets["train"].score_answer(answer=answer, entry=sample.task.metadata["entry"]))

    def fingerprint(self) -> str:
        """The package's version, the dataset, its options and the seed."""
        import importlib.metadata

        version = importlib.metadata.version("reasoning-gym")
        config = self.config
        sizes = f"{config.train_size}:{config.heldout_size}"
        return f"reasoning-gym {version}:{config.task}:{config.options!r}:{self._base}:{sizes}"

    def _dataset(self, seed: int, size: int) -> Any:
        factory = import_optional("reasoning_gym", needed_by=self).factory
        name, options = self.config.task, self.config.options
        if name not in factory.DATASETS:
            raise ConfigError(
                f"environment.task: reasoning-gym has no dataset {name!r}. {suggest(name, factory.DATASETS)}"
            )
        known = [
            field.name for field in dataclasses.fields(factory.DATASETS[name][1]) if field.name not in ("seed", "size")
        ]
        for option_name in options:
            if option_name not in known:
                advice = suggest(option_name, known)
                raise ConfigError(f"environment.options: dataset {name!r} has no option {option_name!r}. {advice}")
        try:
            return factory.create_dataset(name, seed=seed, size=size, **options)
        except (AssertionError, TypeError, ValueError) as error:  # how its configs refuse a value
            raise ConfigError(f"environment.options: dataset {name!r} refuses {options!r}: {error}") from error

    def _entry(self, split: Split, index: int) -> dict[str, Any]:
        """What the dataset makes of an index, in plain data."""
        for attempt in range(MAX_REPLACEMENTS):
            # Steps of a size prime to most others, so that replacements are not each other's neighbours.
            entry = self._datasets[split][(index + attempt * 7919) % self.num_tasks(split)]
            if split == "heldout" or entry["question"] not in self._heldout_questions:
                return dict(entry)
        raise ConfigError(
            f"environment: dataset {self.config.task!r} has too few different questions with these options: "
            f"nearly all are among the {self.config.heldout_size} held-out ones. Lower heldout_size, or make it harder"
        )

    @functools.cached_property
    def _heldout_questions(self) -> frozenset[str]:
        return frozenset(str(self._entry("heldout", i)["question"]) for i in range(self.config.heldout_size))


@hookimpl
def rollstock_environment() -> type[Environment[Any]]:
    """The class of this plugin."""
    return ReasoningGym
