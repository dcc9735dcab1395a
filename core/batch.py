"""Trajectories in columns: what travels through a step.

For algorithm authors, who see response-only, right-padded `[B, T]` views with a boolean mask, and for backends, which
see packed token streams. Nothing is padded inside: a column of tokens is stored flat, one value after the other, so
that padding can neither cost memory nor be mistaken for data. What a column means is left to whoever declared it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

_LONG = 64
"""Tokens of a response, on average, from which on responses are padded one by one."""
_LONG_TO_TAKE = 1024
"""The same for taking some out of a batch: a call for each of them costs more than the places of their tokens do."""


@dataclass(kw_only=True)
class Trajectory:
    """One episode: what was given, what was sampled, and what it was worth.

    Shapes: P prompt tokens; T tokens after the prompt, observations of later turns included. Token ids stay as sampled.
    """

    prompt: Tensor  # [P] int64
    response: Tensor  # [T] int64
    action_mask: Tensor  # [T] bool; False where the environment wrote the token
    rollout_logprobs: Tensor  # [T] float32, at the sampling temperature; 0 where action_mask is False
    versions: Tensor  # [T] int64, the policy version that made each token; -1 where action_mask is False
    group: int  # trajectories of one prompt share it
    task_id: str = ""
    finish_reason: str = "stop"
    reward: float | None = None  # None: nobody could say
    step_rewards: Tensor | None = None  # [T] float32, for environments that reward single steps
    observations: Tensor | None = None  # [T, ...], for control policies
    actions: Tensor | None = None  # [T, ...], for control policies
    routed_experts: Tensor | None = None  # [P + T, layers, k], the experts of each token in generation (see `Router`)
    metadata: dict[str, Any] = field(default_factory=dict)


class Batch:
    """B trajectories in columns.

    A token column has one row for each of the N response tokens of all trajectories together and is read as a padded
    `[B, T, ...]` view (`batch.advantages`, `batch["advantages"]`); a sequence column has one row a trajectory and is
    read as it is, `[B, ...]`. Reading a column that is not there raises AttributeError or KeyError with what is there.
    """

    TOKEN_COLUMNS: ClassVar[Mapping[str, torch.dtype]] = {
        "response": torch.int64,
        "action_mask": torch.bool,
        "rollout_logprobs": torch.float32,
        "versions": torch.int64,
    }

    def __init__(
        self,
        *,
        prompts: Sequence[Tensor],
        lengths: Tensor,
        token_columns: Mapping[str, Tensor],
        sequence_columns: Mapping[str, Tensor],
        task_ids: Sequence[str],
        finish_reasons: Sequence[str],
        metadata: Sequence[dict[str, Any]],
        whole_groups: bool = False,
        prompt_columns: Mapping[str, Sequence[Tensor]] | None = None,
    ) -> None:
        """Take the columns as they are; `Batch.from_trajectories` is what most callers want.

        whole_groups: whoever cuts this batch, over workers or into micro-batches, must keep each group in one part.
        prompt_columns: the part before the response, [P, ...] a trajectory, of token columns that have one.
        """
        self.whole_groups = whole_groups
        self.prompts = list(prompts)
        self._prompt_columns = {name: list(parts) for name, parts in (prompt_columns or {}).items()}
        self.lengths = lengths
        self.task_ids = list(task_ids)
        self.finish_reasons = list(finish_reasons)
        self.metadata = list(metadata)
        self._tokens = dict(token_columns)
        self._sequences = dict(sequence_columns)

    def _has_long_rows(self, column: Tensor) -> bool:
        """Whether rows are copied one by one: for long ones a processor is several times as fast with that as by the
        places of their tokens. On other devices each copy is a kernel of its own."""
        return column.device.type == "cpu" and len(self) > 0 and self.num_tokens >= _LONG * len(self)

    @functools.cached_property
    def _rows(self) -> Tensor:
        """[N]: the trajectory of each flat token."""
        return torch.repeat_interleave(torch.arange(len(self), device=self.lengths.device), self.lengths)

    @functools.cached_property
    def _columns(self) -> Tensor:
        """[N]: the place of each flat token in its response."""
        starts = torch.cumsum(self.lengths, 0) - self.lengths
        return torch.arange(len(self._rows), device=self.lengths.device) - starts[self._rows]

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: what is not derived from the rest, and many small tensors as one each."""
        derived = ("_rows", "_columns", "prompts", "_prompt_columns")
        kept = {name: value for name, value in self.__dict__.items() if name not in derived}
        joined = {name: _join(parts) for name, parts in self._prompt_columns.items()}
        return {**kept, "prompts": _join(self.prompts), "_prompt_columns": joined}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take back what `__getstate__` gave; prompts are views of one tensor then."""
        parts = {name: _cut(*joined) for name, joined in state["_prompt_columns"].items()}
        self.__dict__.update({**state, "prompts": _cut(*state["prompts"]), "_prompt_columns": parts})

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory]) -> Batch:
        """Put trajectories in columns; `scores` is the reward, 0 where it is None, and `scored` says where there is
        one."""
        lengths = torch.tensor([len(t.response) for t in trajectories], dtype=torch.int64)
        tokens = {
            name: torch.cat([getattr(t, name) for t in trajectories] or [torch.zeros(0, dtype=kind)])
            for name, kind in cls.TOKEN_COLUMNS.items()
        }
        for name in ("step_rewards", "observations", "actions"):
            if trajectories and all(getattr(t, name) is not None for t in trajectories):
                tokens[name] = torch.cat([getattr(t, name) for t in trajectories])
        prompt_columns: dict[str, list[Tensor]] = {}
        routed = [t.routed_experts for t in trajectories if t.routed_experts is not None]
        if routed and len(routed) == len(trajectories):
            sizes = [len(t.prompt) for t in trajectories]
            prompt_columns["routed_experts"] = [part[:size] for part, size in zip(routed, sizes, strict=True)]
            tokens["routed_experts"] = torch.cat([part[size:] for part, size in zip(routed, sizes, strict=True)])
        rewards = [t.reward for t in trajectories]
        sequences = {
            "groups": torch.tensor([t.group for t in trajectories], dtype=torch.int64),
            "scores": torch.tensor([0.0 if r is None else r for r in rewards], dtype=torch.float32),
            "scored": torch.tensor([r is not None for r in rewards], dtype=torch.bool),
        }
        return cls(
            prompts=[t.prompt for t in trajectories],
            lengths=lengths,
            token_columns=tokens,
            sequence_columns=sequences,
            task_ids=[t.task_id for t in trajectories],
            finish_reasons=[t.finish_reason for t in trajectories],
            metadata=[t.metadata for t in trajectories],
            prompt_columns=prompt_columns,
        )

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def num_tokens(self) -> int:
        """How many response tokens there are, observations included (N)."""
        return int(self.lengths.sum())

    @property
    def mask(self) -> Tensor:
        """[B, T] bool: the tokens that the policy chose. Padding and observations are False."""
        return self.pad(self._tokens["action_mask"])

    @property
    def columns(self) -> list[str]:
        """The names of all columns, sorted."""
        return sorted([*self._tokens, *self._sequences])

    def __contains__(self, name: str) -> bool:
        return name in self._tokens or name in self._sequences

    def __getitem__(self, name: str) -> Tensor:
        if name in self._tokens:
            return self.pad(self._tokens[name])
        if name in self._sequences:
            return self._sequences[name]
        raise KeyError(f"no column {name!r} in this batch; it has: {', '.join(self.columns)}")

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(
                f"{error.args[0]}. An algorithm that reads {name!r} declares it in its `needs`"
            ) from None

    def __setitem__(self, name: str, value: Tensor) -> None:
        """Set a column: `[B, T, ...]` with T the longest response is one of tokens, `[B, ...]` one of sequences.

        A `[B]` tensor is a sequence column; anything whose second dimension is T is a token column. Raises ValueError
        if the first dimension is not B, or if the name belongs to a column of the other sort.
        """
        if value.dim() == 0 or len(value) != len(self):
            raise ValueError(f"column {name!r} must have {len(self)} rows, not shape {tuple(value.shape)}")
        if value.dim() >= 2 and value.shape[1] == self.max_length:
            self.set_flat(name, self.unpad(value))
        else:
            self.set_sequence(name, value)

    @property
    def max_length(self) -> int:
        """T, the length of the longest response."""
        return int(self.lengths.max()) if len(self) else 0

    def flat(self, name: str) -> Tensor:
        """[N, ...]: a token column without padding, trajectory after trajectory. Raises KeyError if it is not one."""
        if name not in self._tokens:
            raise KeyError(f"no token column {name!r} in this batch; it has: {', '.join(sorted(self._tokens))}")
        return self._tokens[name]

    def set_flat(self, name: str, value: Tensor) -> None:
        """Set a token column from its flat form `[N, ...]`; raises ValueError if it has another number of rows."""
        if len(value) != self.num_tokens:
            raise ValueError(f"token column {name!r} must have {self.num_tokens} rows, not {len(value)}")
        if name in self._sequences:
            raise ValueError(f"{name!r} is a sequence column of this batch already")
        self._tokens[name] = value

    def set_sequence(self, name: str, value: Tensor) -> None:
        """Set a sequence column `[B, ...]`; raises ValueError if it has another number of rows."""
        if len(value) != len(self):
            raise ValueError(f"sequence column {name!r} must have {len(self)} rows, not {len(value)}")
        if name in self._tokens:
            raise ValueError(f"{name!r} is a token column of this batch already")
        self._sequences[name] = value

    def pad(self, flat: Tensor) -> Tensor:
        """[N, ...] to the right-padded view [B, T, ...]; padding is 0 (False). Differentiable."""
        if self._has_long_rows(flat):
            return pad_sequence(list(flat.split(self.lengths.tolist())), batch_first=True)
        padded = flat.new_zeros((len(self), self.max_length, *flat.shape[1:]))
        return padded.index_put((self._rows, self._columns), flat)

    def unpad(self, padded: Tensor) -> Tensor:
        """[B, T, ...] to the flat form [N, ...]."""
        if self._has_long_rows(padded):
            return torch.cat([row[:length] for row, length in zip(padded, self.lengths.tolist(), strict=True)])
        return padded[self._rows, self._columns]

    def rows(self) -> Tensor:
        """[N]: the trajectory that each flat token belongs to."""
        return self._rows

    def select(self, indices: Sequence[int] | Tensor) -> Batch:
        """The trajectories at `indices`, in that order, with all their columns."""
        order = indices.tolist() if isinstance(indices, Tensor) else [int(i) for i in indices]
        device = self.lengths.device
        where = torch.tensor(order, dtype=torch.int64)
        take = self._taker(where)
        return Batch(
            prompts=[self.prompts[i] for i in order],
            lengths=self.lengths[where.to(device)],
            token_columns={name: take(value) for name, value in self._tokens.items()},
            sequence_columns={name: value[where.to(value.device)] for name, value in self._sequences.items()},
            task_ids=[self.task_ids[i] for i in order],
            finish_reasons=[self.finish_reasons[i] for i in order],
            metadata=[self.metadata[i] for i in order],
            whole_groups=self.whole_groups,
            prompt_columns={name: [parts[i] for i in order] for name, parts in self._prompt_columns.items()},
        )

    def _taker(self, where: Tensor) -> Callable[[Tensor], Tensor]:
        """What takes the tokens of the trajectories `where` out of a flat column: by stretches or by places, whichever
        is faster."""
        lengths = self.lengths.cpu()
        picked = lengths[where]
        starts = (torch.cumsum(lengths, 0) - lengths)[where]
        if len(where) and self.lengths.device.type == "cpu" and int(picked.sum()) >= _LONG_TO_TAKE * len(where):
            stretches = list(zip(starts.tolist(), picked.tolist(), strict=True))
            return lambda value: torch.cat([value.narrow(0, start, size) for start, size in stretches])
        # Each token's place: that of its trajectory's first one before, moved by how far it is from the first one now.
        moved = starts - (torch.cumsum(picked, 0) - picked)
        index = torch.repeat_interleave(moved, picked) + torch.arange(int(picked.sum()))
        return lambda value: value.index_select(0, index.to(value.device))

    def without(self, name: str) -> Batch:
        """The same batch, its other columns not copied, without one column, if it has it."""
        if name not in self:
            return self
        less = object.__new__(Batch)
        less.__dict__.update(self.__dict__)
        for kind in ("_tokens", "_sequences", "_prompt_columns"):
            setattr(less, kind, {key: column for key, column in getattr(self, kind).items() if key != name})
        return less

    @staticmethod
    def concat(batches: Iterable[Batch]) -> Batch:
        """Join batches with the same columns, in order. Raises ValueError if the columns differ or there is no
        batch."""
        parts = list(batches)
        if not parts:
            raise ValueError("there is no batch to join")
        if any(part.columns != parts[0].columns for part in parts):
            raise ValueError(f"batches with different columns cannot be joined: {[part.columns for part in parts]}")
        return Batch(
            prompts=[p for part in parts for p in part.prompts],
            lengths=torch.cat([part.lengths for part in parts]),
            token_columns={name: torch.cat([p._tokens[name] for p in parts]) for name in parts[0]._tokens},
            sequence_columns={name: torch.cat([p._sequences[name] for p in parts]) for name in parts[0]._sequences},
            task_ids=[x for part in parts for x in part.task_ids],
            finish_reasons=[x for part in parts for x in part.finish_reasons],
            metadata=[x for part in parts for x in part.metadata],
            whole_groups=any(part.whole_groups for part in parts),
            prompt_columns={
                name: [column for part in parts for column in part._prompt_columns[name]]
                for name in parts[0]._prompt_columns
            },
        )

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its columns on `device`."""
        return Batch(
            prompts=[p.to(device) for p in self.prompts],
            lengths=self.lengths.to(device),
            token_columns={name: value.to(device) for name, value in self._tokens.items()},
            sequence_columns={name: value.to(device) for name, value in self._sequences.items()},
            task_ids=self.task_ids,
            finish_reasons=self.finish_reasons,
            metadata=self.metadata,
            whole_groups=self.whole_groups,
            prompt_columns={name: [p.to(device) for p in parts] for name, parts in self._prompt_columns.items()},
        )

    def response(self, index: int) -> Tensor:
        """[T_index] int64: the tokens after the prompt of one trajectory."""
        start = int(self.lengths[:index].sum())
        return self._tokens["response"][start : start + int(self.lengths[index])]

    def packed(self) -> PackedTokens:
        """Prompt and response of every trajectory as one stream, as models read it."""
        return PackedTokens.from_batch(self)

    def packed_column(self, name: str) -> Tensor:
        """[L, ...]: a token column that has values for prompts too, in the order of `packed`. Raises KeyError for
        another."""
        if name not in self._prompt_columns:
            raise KeyError(f"no column {name!r} with values for prompts in this batch")
        responses = self.flat(name).split(self.lengths.tolist())
        return torch.cat([p for pair in zip(self._prompt_columns[name], responses, strict=True) for p in pair])

    def prompt_column(self, name: str) -> list[Tensor]:
        """What a column has for the prompt of each trajectory, [P, ...] each. Raises KeyError where it has nothing."""
        return self._prompt_columns[name]

    def members(self) -> list[list[int]]:
        """The indices of each group's trajectories, groups in the order of their first one."""
        found: dict[int, list[int]] = {}
        for index, group in enumerate(self.groups.tolist()):
            found.setdefault(group, []).append(index)
        return list(found.values())

    def total_lengths(self) -> list[int]:
        """Prompt plus response length of each trajectory, in tokens."""
        return [len(p) + n for p, n in zip(self.prompts, self.lengths.tolist(), strict=True)]

    def __iter__(self) -> Iterator[Batch]:
        return (self.select([i]) for i in range(len(self)))


def _join(parts: Sequence[Tensor]) -> tuple[Tensor | None, list[int]]:
    """Tensors end to end, and their lengths; None for no tensors."""
    return (torch.cat(list(parts)) if parts else None), [len(part) for part in parts]


def _cut(whole: Tensor | None, lengths: list[int]) -> list[Tensor]:
    return [] if whole is None else list(whole.split(lengths))


@dataclass(frozen=True)
class PackedTokens:
    """All sequences of a batch, end to end, with no padding between them.

    `tokens` [L] int64; `lengths` [B], the tokens of each sequence; `positions` [L], each token's place in its sequence;
    `predicts` [N] int64, for each response token the index in the stream of the token *before* it, whose logits predict
    it; `targets` [N] int64, the response tokens. A response that has no token before it (an empty prompt) cannot be
    predicted: building one raises ValueError.
    """

    tokens: Tensor
    lengths: Tensor
    positions: Tensor
    predicts: Tensor
    targets: Tensor

    @staticmethod
    def from_batch(batch: Batch) -> PackedTokens:
        """See `Batch.packed`."""
        device = batch.lengths.device
        prompt_lengths = torch.tensor([len(p) for p in batch.prompts], dtype=torch.int64, device=device)
        if bool((prompt_lengths == 0).any()):
            raise ValueError("a trajectory with an empty prompt has no token that predicts its first one")
        response = batch.flat("response")
        lengths = prompt_lengths + batch.lengths
        starts = torch.cumsum(lengths, 0) - lengths
        rows = torch.repeat_interleave(torch.arange(len(batch), device=device), lengths)
        positions = torch.arange(int(lengths.sum()), device=device) - starts[rows]
        inner = torch.cumsum(batch.lengths, 0) - batch.lengths
        place = torch.arange(len(response), device=device) - inner[batch.rows()]
        where = starts[batch.rows()] + prompt_lengths[batch.rows()] + place
        tokens = torch.empty(len(positions), dtype=torch.int64, device=device)
        tokens[where] = response
        is_prompt = positions < prompt_lengths[rows]
        if len(batch):
            tokens[is_prompt] = torch.cat(batch.prompts)
        return PackedTokens(tokens, lengths, positions, where - 1, response)
