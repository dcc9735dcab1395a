"""Arithmetic: sums, differences, products and quotients of two whole numbers, made up from a seed.

For first runs, tests and the demo: it needs no file, answers are known, and the difficulty is an option. Every pair
of operands belongs to one split, together with its reverse and for all operations, so that nothing of a held-out task
was ever trained on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from rollstock import ConfigError, Environment, Sample, Split, Task, derive_seed, hookimpl, option
from rollstock.plugins.answers import MatchOptions

Operation: TypeAlias = Literal["add", "subtract", "multiply", "divide"]
Made: TypeAlias = "tuple[int, int, int]"
"""First operand, second operand, answer."""

SYMBOLS: dict[Operation, str] = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
MAKE: dict[Operation, Callable[[int, int], Made]] = {
    "add": lambda a, b: (a, b, a + b),
    "subtract": lambda a, b: (a, b, a - b),
    "multiply": lambda a, b: (a, b, a * b),
    "divide": lambda a, b: (a * b, b, a),  # whole quotients only
}
# Up to this many unordered pairs are listed and shuffled, and the fraction is met exactly; beyond, a hash decides.
MAX_LISTED_PAIRS = 20_000


@dataclass(kw_only=True)
class ArithmeticConfig:
    """Options of the `arithmetic` environment."""

    operations: list[Operation] = option(["add"], "what is asked: add, subtract, multiply, divide")
    digits: int = option(1, "operands have up to this many digits", minimum=1, maximum=9)
    min_operand: int = option(0, "smallest operand", minimum=-1_000_000_000, maximum=1_000_000_000)
    max_operand: int | None = option(
        None, "largest operand; none: the largest of `digits` digits", minimum=-1_000_000_000, maximum=1_000_000_000
    )
    negative: bool = option(True, "ask for differences below 0 too")
    heldout_fraction: float = option(0.2, "share of operand pairs kept for evaluation", minimum=0.001, maximum=0.999)
    split_seed: int = option(0, "another number holds other pairs out")
    prompt: str = option(
        "What is {a} {op} {b}? Answer with a number only.", "the question; {a}, {op} and {b} are filled in"
    )
    system: str | None = option(None, "a system message before the question (chat only)")
    chat: bool = option(True, "ask as a chat message; otherwise the prompt is encoded as it is")
    which: Literal["last", "first", "any"] = option("any", "the numbers of a longer text that may be the right one")
    exact: float = option(1.0, "value of the right number alone", minimum=-1e9, maximum=1e9)
    inside: float = option(0.3, "value of the right number inside other text", minimum=-1e9, maximum=1e9)
    wrong: float = option(0.1, "value of a wrong number alone", minimum=-1e9, maximum=1e9)
    otherwise: float = option(0.0, "value of anything else", minimum=-1e9, maximum=1e9)

    def __post_init__(self) -> None:
        if not self.operations:
            raise ValueError(f"operations is empty; choose from {', '.join(SYMBOLS)}")
        if self.max_operand is None:
            self.max_operand = 10**self.digits - 1
        if self.max_operand < self.min_operand:
            raise ValueError(f"max_operand ({self.max_operand}) is below min_operand ({self.min_operand})")
        if self.system is not None and not self.chat:
            raise ValueError("a system message needs chat: true; put its text into the prompt")
        try:
            self.prompt.format(a=1, op="+", b=2)
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"prompt may hold {{a}}, {{op}} and {{b}} in braces, and nothing else: {error!r}"
            ) from error


class Arithmetic(Environment[ArithmeticConfig]):
    """Small operand ranges are finite splits in a seeded order; large ones are endless, and sampled."""

    def setup(self, seed: int) -> None:
        """Draw the splits. Raises ConfigError if one of them is left without a task.

        What is held out depends on `split_seed`, so that runs with different seeds can be compared; `seed` only samples
        from an endless training split.
        """
        config = self.config
        self._seed = derive_seed(config.split_seed, "arithmetic")
        self._train_seed = derive_seed(seed, "arithmetic", "train")
        self._low, self._high = config.min_operand, config.max_operand or 0
        values = MatchOptions(
            which=config.which,
            exact=config.exact,
            inside=config.inside,
            wrong=config.wrong,
            otherwise=config.otherwise,
        )
        self._value = values.number_value
        size = self._high - self._low + 1
        self._listed: dict[Split, list[tuple[int, int, Operation]]] | None = None
        if size * (size + 1) // 2 <= MAX_LISTED_PAIRS:
            self._listed = self._list()
            for split, found in self._listed.items():
                if not found:
                    raise ConfigError(
                        f"environment 'arithmetic': no {split} task is left with operands from {self._low} to "
                        f"{self._high}; widen the operands or change heldout_fraction"
                    )

    def num_tasks(self, split: Split) -> int | None:
        """The number of tasks of a small operand range; None for a large one, whose tasks have no end."""
        return None if self._listed is None else len(self._listed[split])

    def task(self, split: Split, index: int) -> Task:
        """The task at `index`. Its id tells operation and operands; `answer` is the result, an int."""
        a, b, operation = self._sampled(split, index) if self._listed is None else self._listed[split][index]
        first, second, answer = MAKE[operation](a, b)
        text = self.config.prompt.format(a=first, op=SYMBOLS[operation], b=second)
        system = [] if self.config.system is None else [{"role": "system", "content": self.config.system}]
        return Task(
            id=f"{operation}-{first}-{second}",
            prompt=[*system, {"role": "user", "content": text}] if self.config.chat else text,
            answer=answer,
            metadata={"operation": operation, "operands": [first, second]},
        )

    def score(self, sample: Sample) -> float:
        """`exact`, `inside`, `wrong` or `otherwise`, by what the response makes of the number."""
        return self._value(sample.response, sample.task.answer)

    def fingerprint(self) -> str:
        """All options; the tasks are a function of them."""
        return f"arithmetic:{self.config!r}"

    def _list(self) -> dict[Split, list[tuple[int, int, Operation]]]:
        """All tasks, each split in a shuffled order, so that its beginning is a fair sample of it."""
        values = range(self._low, self._high + 1)
        pairs = [(a, b) for a in values for b in values if a <= b]
        pairs = [pair for pair in pairs if self._ways(*pair)]  # 1 - 0 may be asked for where 0 - 1 may not
        random.Random(derive_seed(self._seed, "splits")).shuffle(pairs)
        cut = min(max(1, round(self.config.heldout_fraction * len(pairs))), max(len(pairs) - 1, 0))
        listed: dict[Split, list[tuple[int, int, Operation]]] = {}
        split: Split
        for split, part in (("heldout", pairs[:cut]), ("train", pairs[cut:])):
            listed[split] = [way for pair in part for way in self._ways(*pair)]
            random.Random(derive_seed(self._seed, "order", split)).shuffle(listed[split])
        return listed

    def _ways(self, a: int, b: int) -> list[tuple[int, int, Operation]]:
        """The tasks that a pair gives, in either order of its operands."""
        orders = [(a, b)] if a == b else [(a, b), (b, a)]
        return [(x, y, op) for op in self.config.operations for x, y in orders if self._possible(op, x, y)]

    def _possible(self, operation: Operation, a: int, b: int) -> bool:
        if operation == "divide":
            return b != 0
        return operation != "subtract" or self.config.negative or a >= b

    def _sampled(self, split: Split, index: int) -> tuple[int, int, Operation]:
        """The task at `index` of an endless split: draws until one is on this side and possible."""
        generator = random.Random(derive_seed(self._train_seed if split == "train" else self._seed, "task", index))
        while True:
            a, b = generator.randint(self._low, self._high), generator.randint(self._low, self._high)
            operation = generator.choice(self.config.operations)
            if self._side(a, b) == split and self._possible(operation, a, b):
                return a, b, operation

    def _side(self, a: int, b: int) -> Split:
        share = derive_seed(self._seed, "side", min(a, b), max(a, b)) / 2**63
        return "heldout" if share < self.config.heldout_fraction else "train"


@hookimpl
def rollstock_environment() -> type[Environment[Any]]:
    """The class of this plugin."""
    return Arithmetic
