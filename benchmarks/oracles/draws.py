"""Random batches for the comparison with other packages: the numbers that both sides read, and how they are stored.

For `run.py`, which draws them anew, and for the tests, which read stored ones. Needs torch and safetensors, but nothing
of rollstock: the peers' side reads with it too.

A draw is named `sort@seed`. Its columns are float64 and padded, `[B, T]` for tokens and `[B]` for trajectories; ids are
int64, those of `prompts` right-padded with 0. Masked slots hold junk (except rewards, where verl expects 0), so that a
leak shows up as a difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

Columns = dict[str, Tensor]

JUNK = 7.5
PROMPT, LENGTH = 4, 9
RESPONSE_LIMIT = 16  # the constant that divides in `seq_mean_token_sum_norm`, larger than any response
VOCABULARY = 11


@dataclass(frozen=True)
class Sort:
    """How a batch is drawn.

    groups: sizes, in order; shuffled: members of groups stand apart; observations: share of masked tokens inside of
    responses; drift: standard deviation of the log-ratio to the policy that sampled; binary: rewards are 0 or 1;
    special: the first group has equal rewards, the last trajectory no action token, and three tokens lie far off.
    """

    groups: tuple[int, ...] = (4, 4, 4)
    shuffled: bool = False
    observations: float = 0.0
    drift: float = 0.15
    binary: bool = False
    special: bool = False


SORTS: dict[str, Sort] = {
    "plain": Sort(),
    "turns": Sort(groups=(5, 2, 3, 2), shuffled=True, observations=0.3, drift=0.3),
    "special": Sort(binary=True, drift=0.8, special=True),
    "lone": Sort(groups=(4, 1, 3, 1), binary=True),
}


def draw(sort: Sort, seed: int) -> Columns:
    """The columns of one random batch."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    size = sum(sort.groups)
    groups = torch.repeat_interleave(torch.arange(len(sort.groups)), torch.tensor(sort.groups))
    if sort.shuffled:
        groups = groups[torch.randperm(size, generator=generator)]
    mask = _mask(sort, size, generator)
    scores = (torch.rand(size, generator=generator) < 0.5).double() if sort.binary else normal(size)
    if sort.special:
        scores[groups == 0] = 1.0
        scores[groups == 1] = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    old = -2 * torch.rand(size, LENGTH, generator=generator, dtype=torch.float64) - 0.05
    new = old + sort.drift * normal(size, LENGTH)
    if sort.special:  # beyond the exponents that everyone cuts off, and far outside of every clip range
        new[0, 0], new[1, 0], new[2, 0] = old[0, 0] - 30.0, old[1, 0] - 4.0, old[2, 0] + 4.0
    columns = {
        "scores": scores,
        "greedy_scores": normal(size),
        "old_logprobs": old,
        "logprobs": new,
        "ref_logprobs": old + 0.3 * normal(size, LENGTH),
        "rollout_logprobs": old + sort.drift * normal(size, LENGTH),
        "rollout_weights": 2 * torch.rand(size, LENGTH, generator=generator, dtype=torch.float64),
        "values": normal(size, LENGTH),
        "new_values": normal(size, LENGTH),
        "returns": normal(size, LENGTH),
        "token_advantages": normal(size, LENGTH),
        "sequence_advantages": normal(size),
        "heads": normal(size),
        "margins": normal(size // 2).abs(),
    }
    columns = {name: torch.where(mask, x, JUNK) if x.shape == mask.shape else x for name, x in columns.items()}
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    columns["token_rewards"] = torch.where(last, scores[:, None], 0.0)
    # A response without tokens has its score in the last slot, where verl's reward managers put it (at length - 1).
    columns["token_rewards"][~mask.any(1), -1] = scores[~mask.any(1)]
    columns["step_rewards"] = torch.where(mask, 0.3 * normal(size, LENGTH), 0.0)
    columns["logits"] = 2 * normal(size, LENGTH, VOCABULARY)
    tokens = torch.randint(2, VOCABULARY, (size, LENGTH), generator=generator)
    prompts = torch.randint(2, VOCABULARY, (len(sort.groups), PROMPT), generator=generator)[groups]
    lengths = torch.randint(1, PROMPT + 1, (len(sort.groups),), generator=generator)[groups]
    prompts = torch.where(torch.arange(PROMPT) < lengths[:, None], prompts, 0)
    return {**columns, "mask": mask, "groups": groups, "tokens": tokens, "prompts": prompts}


def _mask(sort: Sort, size: int, generator: torch.Generator) -> Tensor:
    """`[B, T]` bool: the tokens of the policy. Every response begins and ends with one, except the empty one."""
    lengths = torch.randint(2, LENGTH + 1, (size,), generator=generator)
    lengths[0] = LENGTH
    places = torch.arange(LENGTH)
    inside = places < lengths[:, None]
    observed = torch.rand(size, LENGTH, generator=generator) < sort.observations
    edge = (places == 0) | (places == lengths[:, None] - 1)
    mask = inside & (~observed | edge)
    if sort.special:
        mask[-1] = False
    return mask


def draw_all(seeds: int) -> dict[str, Columns]:
    """Every sort of batch, with the seeds 0 to `seeds` - 1."""
    return {f"{name}@{seed}": draw(sort, seed) for seed in range(seeds) for name, sort in SORTS.items()}


def save(path: Path, found: Mapping[str, Mapping[str, Tensor]], metadata: Mapping[str, str] | None = None) -> None:
    """Write draws, or results by draw, as `draw/name` to one safetensors file."""
    flat = {f"{draw}/{name}": x.detach().contiguous() for draw, columns in found.items() for name, x in columns.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(flat, path, metadata=dict(metadata or {}))


def load(path: Path) -> dict[str, Columns]:
    """Read what `save` wrote."""
    found: dict[str, Columns] = {}
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118  # a handle, not a mapping
            draw_name, name = key.split("/", 1)
            found.setdefault(draw_name, {})[name] = file.get_tensor(key)
    return found


def metadata(path: Path) -> dict[str, str]:
    """What `save` was told about the file."""
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})
