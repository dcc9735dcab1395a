"""The algorithm kind: what turns rewards into advantages, and log-probs into a loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, ClassVar

from rollstock.plugin import C, Plugin

if TYPE_CHECKING:
    from torch import Tensor

    from rollstock.batch import Batch
    from rollstock.interfaces.model import Head
    from rollstock.metrics import Metric, Metrics
    from rollstock.micro import Loss, MicroBatch
    from rollstock.schema import RunConfig


class Algorithm(Plugin[C]):
    """One method of reinforcement learning.

    An algorithm sees `[B, T]` views only: it knows neither engines nor chips, and it is the same object in a test, on a
    laptop and on a cluster. Its `loss` is called in the workers that train, everything else in the controller.
    """

    needs: ClassVar[Set[str]] = frozenset()
    """Columns that `advantages` or `loss` read beyond those that every batch has (`scores`, `scored`, `groups`, `mask`,
    `rollout_logprobs`, `versions`): `old_logprobs`, `ref_logprobs`, `values`, ... The run starts the roles that provide
    them, and is refused before its first step if nobody does. An option may decide: override `needed_columns`."""

    early: ClassVar[Set[str]] = frozenset()
    """Those of `needs` that `advantages` reads already. Only `old_logprobs` makes a difference: with one update a step
    and no early reader they are taken from the training forward itself, which saves a pass over the batch."""

    head: ClassVar[Head] = "lm"
    """What the actor's model has on top: `lm` for a policy; `lm+value` for one that is its own critic, so that the
    column `values` comes from the actor and no critic is started; `score` for a reward model. An option may decide:
    override `actor_head`."""

    trains_with: ClassVar[Set[str]] = frozenset({"logprobs"})
    """What `loss` needs of the actor's model with a gradient: `logprobs`, `entropy`; `values` with the head `lm+value`,
    `token_scores` with the head `score`."""

    offline: ClassVar[bool] = False
    """Whether it trains on the responses that the tasks themselves hold (`Task.responses`), the first
    `samples_per_prompt` of each, in place of sampled ones. Nothing is generated then and nobody is asked for a score:
    of n responses the k-th has the score (n - 1 - k) / (n - 1): 1 and 0 in a pair, and 1 where it is alone. The model
    is trained at temperature 1, and evaluation is the loss on held-out tasks."""

    whole_groups: ClassVar[bool] = False
    """Whether `loss` compares the trajectories of a group, so that no worker and no micro-batch may get a part of one.
    With `offline`, each task must then hold exactly `samples_per_prompt` responses."""

    reads_step_rewards: ClassVar[bool] = False
    """Whether `advantages` adds the column `step_rewards` `[B, T]`, where there is one, to the score on the last token,
    so that what is paid or charged for single tokens reaches it. An extension that charges tokens asks: it takes the
    sum off the score of an algorithm that reads no such rewards."""

    refill_rounds: int = 0
    """How often a step may generate again, with new tasks, while `select` left fewer than `train.prompts_per_step`
    groups."""

    def needed_columns(self) -> Set[str]:
        """`needs`, as the options have it (a KL coefficient of 0 needs no reference model)."""
        return frozenset(self.needs)

    def early_columns(self) -> Set[str]:
        """`early`, as the options have it."""
        return frozenset(self.early)

    def actor_head(self) -> Head:
        """`head`, as the options have it."""
        return self.head

    def training_outputs(self) -> Set[str]:
        """`trains_with`, as the options have it."""
        return frozenset(self.trains_with)

    @property
    def samples_per_prompt(self) -> int:
        """How many trajectories each task is sampled: the option `group_size` where there is one, else 1."""
        return int(getattr(self.config, "group_size", 1))

    def validate(self, config: RunConfig) -> Sequence[str]:
        """What in the resolved run config makes this algorithm do nothing or fail; each sentence refuses the run.

        Called before anything starts. Return nothing when all is well.
        """
        return ()

    def select(self, batch: Batch) -> Sequence[int] | None:
        """Indices of the trajectories to train on, or None for all. Called after scoring, before any column is
        prepared."""
        return None

    @abstractmethod
    def advantages(self, batch: Batch) -> Tensor | Mapping[str, Tensor]:
        """Advantages `[B, T]`, 0 where `batch.mask` is False; or several columns by name, `advantages` among them."""

    @abstractmethod
    def loss(self, micro: MicroBatch) -> Loss:
        """The policy loss of a slice: losses per token through `micro.loss`, which sees to the global counts."""

    def critic_loss(self, micro: MicroBatch) -> Loss:
        """The critic's loss of a slice, from `micro.values` `[b, T]`; only algorithms that need `values` have one.

        A run calls it where the critic is a model of its own.
        """
        raise NotImplementedError(f"{self.plugin_name} needs `values` but has no critic_loss")

    def after_update(self, batch: Batch, metrics: Mapping[str, Metric]) -> Metrics:
        """Called once a step after the updates: the place to adapt coefficients. Returns metrics to add."""
        return {}

    def state(self) -> dict[str, Any]:
        """What must survive a restart (adaptive coefficients), as JSON. Restored by `load_state`."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
