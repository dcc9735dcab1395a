"""What policy-gradient methods share, whatever their advantages: which columns and model outputs their terms need.

For the algorithms of this folder, whose options derive from `TermOptions`. Advantages and loss are the subclass's.
"""

from __future__ import annotations

from collections.abc import Set
from typing import TypeVar

from rollstock import Algorithm, RunConfig
from rollstock.algorithms.policy_loss import TermOptions, term_columns, term_outputs

T = TypeVar("T", bound=TermOptions)
"""The dataclass that holds the options of a policy-gradient method."""


class PolicyGradient(Algorithm[T]):
    """An algorithm whose loss may have a KL and an entropy term."""

    needs = frozenset({"old_logprobs"})

    def needed_columns(self) -> Set[str]:
        """The reference model's log-probs only if the loss has a KL term."""
        return self.needs | term_columns(self.config)

    def training_outputs(self) -> Set[str]:
        """The entropy only if the loss has a bonus for it."""
        return term_outputs(self.config)


def greedy_sampling(config: RunConfig) -> str:
    """The setting with which every sample is the likeliest response, `sampling.top_k: 1`; empty if there is none."""
    if config.sampling.temperature == 0:
        return "sampling.temperature: 0"
    return "sampling.top_k: 1" if config.sampling.top_k == 1 else ""
