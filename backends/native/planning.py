"""Which requests are generated together: groups of equal prompts, cut into batches that fit.

For the engine. A batch runs until its last row ends, so requests with prompts of similar length go together, and the
samples of a prompt stay together as far as a batch has room, because they share its prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollstock import GenerationRequest


@dataclass(frozen=True)
class Group:
    """Requests with the same prompt: the prompt, and the places of the requests in the caller's list."""

    prompt: tuple[int, ...]
    members: tuple[int, ...]


@dataclass(frozen=True)
class Footprint:
    """Bytes that generation takes, from which the size of a batch follows.

    cached_token: keys and values of one token of one row, all layers; vocabulary: tokens that logits are computed for;
    shared: whether the samples of a prompt hold its keys and values once.
    """

    cached_token: int
    vocabulary: int
    shared: bool

    def row(self, prompt: int, response: int) -> int:
        """Bytes of one more row with `prompt` tokens before its `response`, the prompt itself included if it is not
        shared.

        A cache that grows is there twice for a moment, half as long the first time; sampling holds logits, scaled
        logits, probabilities and what top-p leaves of them, in float32.
        """
        own = response * self.cached_token * 3 // 2 + self.vocabulary * 4 * 4
        return own if self.shared else own + 2 * prompt * self.cached_token

    def prompt(self, length: int) -> int:
        """Bytes of one more distinct prompt."""
        return length * self.cached_token if self.shared else 0


def group_requests(requests: Sequence[GenerationRequest], wanted: Sequence[int]) -> list[Group]:
    """The requests at the places `wanted`, grouped by prompt, short prompts first; equal lengths keep their order."""
    places: dict[tuple[int, ...], list[int]] = {}
    for index in wanted:
        places.setdefault(requests[index].prompt, []).append(index)
    groups = [Group(prompt, tuple(members)) for prompt, members in places.items()]
    return sorted(groups, key=lambda group: len(group.prompt))


def next_batch(groups: list[Group], most_rows: int, *, mixes_lengths: bool) -> tuple[list[Group], list[Group]]:
    """Take up to `most_rows` rows from the front of `groups`; returns the batch and what is left.

    A group is cut only if it alone is larger than a batch, or if cutting it fills one that is less than half full.
    """
    batch: list[Group] = []
    rest = list(groups)
    rows = 0
    while rest and rows < most_rows:
        group = rest[0]
        if batch and not mixes_lengths and len(group.prompt) != len(batch[0].prompt):
            break
        room = most_rows - rows
        if len(group.members) > room and rows * 2 > most_rows:
            break
        batch.append(Group(group.prompt, group.members[:room]))
        rows += len(batch[-1].members)
        left = group.members[room:]
        rest[0:1] = [Group(group.prompt, left)] if left else []
    return batch, rest


def rows_that_fit(budget: int, footprint: Footprint, groups: Sequence[Group], response: int, most: int) -> int:
    """How many rows from the front of `groups` fit into `budget` bytes: at least 1, at most `most`.

    response: the most tokens that one of them gets.
    """
    used = rows = 0
    for group in groups:
        used += footprint.prompt(len(group.prompt))
        cost = footprint.row(len(group.prompt), response)
        fit = max(0, (budget - used) // cost)
        rows += min(fit, len(group.members))
        used += cost * len(group.members)
        if fit < len(group.members) or rows >= most:
            return max(1, min(rows, most))
    return most
