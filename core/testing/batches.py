"""Made-up batches for tests of algorithms and backends: small, seeded, with everything that goes wrong in real ones.

For the kits and for the tests of plugin authors. Rewards are 0 or 1, so that every method can take them; lengths
vary, and some trajectories have observations (masked tokens) inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rollstock.batch import Batch, Trajectory

LENGTHS = (5, 1, 7, 3, 6, 2, 8, 4)


def make_trajectory(
    length: int,
    *,
    group: int = 0,
    reward: float | None = 1.0,
    observations: Sequence[int] = (),
    seed: int = 0,
    prompt: Sequence[int] | None = None,
    vocab_size: int = 16,
) -> Trajectory:
    """One made-up trajectory of `length` tokens after the prompt; those at the places `observations` are not the
    policy's."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(length, dtype=torch.bool)
    mask[list(observations)] = False
    logprobs = -2 * torch.rand(length, generator=generator) - 0.1
    tokens = torch.randint(1, vocab_size, (length,), generator=generator)
    made = torch.randint(1, vocab_size, (3,), generator=torch.Generator().manual_seed(group))
    return Trajectory(
        prompt=made if prompt is None else torch.tensor(prompt, dtype=torch.int64),
        response=tokens,
        action_mask=mask,
        rollout_logprobs=torch.where(mask, logprobs, 0.0),
        versions=torch.where(mask, 0, -1),
        group=group,
        task_id=f"task-{group}",
        finish_reason="stop",
        reward=reward,
    )


def make_batch(group_size: int = 4, *, num_groups: int = 3, observations: bool = True, vocab_size: int = 16) -> Batch:
    """A batch of `num_groups` groups; each has both rewards where it has room for them, and every fourth trajectory
    an observation in its middle.
    """
    trajectories = []
    for group in range(num_groups):
        for k in range(group_size):
            place = group * group_size + k
            length = LENGTHS[place % len(LENGTHS)]
            inside = [length // 2] if observations and place % 4 == 2 else []
            reward = float((k + group) % 2 == 0) if group_size > 1 else float(group % 2)
            trajectories.append(
                make_trajectory(
                    length, group=group, reward=reward, observations=inside, seed=place, vocab_size=vocab_size
                )
            )
    return Batch.from_trajectories(trajectories)


def columns_of(batch: Batch, *, seed: int = 0) -> dict[str, Tensor]:
    """What the roles of a run would say of a batch: `old_logprobs`, `old_entropy`, `ref_logprobs` and `values`, flat
    `[N]`, 0 on masked tokens. The old log-probs are the sampler's.
    """
    generator = torch.Generator().manual_seed(seed)
    mask = batch.flat("action_mask")

    def noise() -> Tensor:
        return torch.randn(batch.num_tokens, generator=generator)

    sampled = batch.flat("rollout_logprobs")
    found = {
        "old_logprobs": sampled.clone(),
        "old_entropy": noise().abs() + 0.1,
        "ref_logprobs": (sampled + 0.2 * noise()).clamp(max=-1e-3),
        "values": 0.5 * noise(),
    }
    return {name: torch.where(mask, value, 0.0) for name, value in found.items()}


def greedy_columns_of(batch: Batch, *, seed: int = 0) -> dict[str, Tensor]:
    """What the greedy responses to the tasks of a batch might have scored: `greedy_scores`, 0 or 1 and one a group, and
    `greedy_scored`, False for the last group where there are several; `[B]`.
    """
    members = batch.members()
    drawn = torch.randint(0, 2, (len(members),), generator=torch.Generator().manual_seed(seed)).float()
    scores, scored = torch.zeros(len(batch)), torch.ones(len(batch), dtype=torch.bool)
    for place, group in enumerate(members):
        scores[group] = drawn[place]
    if len(members) > 1:
        scores[members[-1]], scored[members[-1]] = 0.0, False
    return {"greedy_scores": scores, "greedy_scored": scored}


def insert_observations(batch: Batch, places: Mapping[int, Sequence[int]], *, count: int = 2) -> tuple[Batch, Tensor]:
    """The same batch with `count` masked tokens put in before each of the `places` of a trajectory (`{index:
    places}`; its length is a place too). Token columns get made-up values there.

    Returns the batch and, for each old token [N], its index among the new ones.
    """
    pieces: list[int] = []  # indices of old tokens, -1 for new ones
    lengths: list[int] = []
    start = 0
    for index, length in enumerate(batch.lengths.tolist()):
        row: list[int] = []
        for place in range(length + 1):
            if place in places.get(index, ()):
                row += [-1] * count
            if place < length:
                row.append(start + place)
        pieces += row
        lengths.append(len(row))
        start += length
    source = torch.tensor(pieces, dtype=torch.int64)
    is_new = source < 0
    where = torch.nonzero(~is_new)[:, 0]
    tokens = {name: _spread(name, batch.flat(name), source, is_new) for name in _token_columns(batch)}
    sequences = {name: batch[name] for name in batch.columns if name not in tokens}
    longer = Batch(
        prompts=batch.prompts,
        lengths=torch.tensor(lengths, dtype=torch.int64),
        token_columns=tokens,
        sequence_columns=sequences,
        task_ids=batch.task_ids,
        finish_reasons=batch.finish_reasons,
        metadata=batch.metadata,
    )
    return longer, where


def _token_columns(batch: Batch) -> list[str]:
    found = []
    for name in batch.columns:
        try:
            batch.flat(name)
        except KeyError:
            continue
        found.append(name)
    return found


def _spread(name: str, column: Tensor, source: Tensor, is_new: Tensor) -> Tensor:
    """A token column with room for new tokens; what stands there must not matter."""
    empty = column.new_zeros((len(source), *column.shape[1:]))
    values = column[source.clamp(min=0)] if len(column) else empty
    if name == "action_mask":
        values[is_new] = False
    elif name == "response":
        values[is_new] = 1
    elif name == "versions":
        values[is_new] = -1
    elif name == "rollout_logprobs":
        values[is_new] = 0
    elif values.is_floating_point():
        values[is_new] = 7.5
    return values
