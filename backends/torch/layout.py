"""How a batch becomes one stream of tokens without padding, and which attention calls cover it.

For the network, which reads the stream, and the attention function, which reads the plan. A trajectory is one segment of the
stream, or, where prompts are shared, its response is: the prompt of a group then stands in the stream once, and every response
of the group attends to it and to itself. Which tensor operations run is left to `attention`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollstock import Batch

_FILL = 0.75
"""A segment joins a call only if it fills this share of the call's width; the rest of its row is computed for nothing."""


@dataclass(frozen=True)
class Call:
    """One attention call: n query segments padded to `width`, each over `prefix` shared tokens and itself."""

    size: int
    width: int
    prefix: int


@dataclass(frozen=True)
class Layout:
    """L tokens of one stream, and where things are in it.

    tokens, positions [L] int64: ids, and each token's place in its own sequence. longest: tokens of the longest sequence.
    predicts [N]: for each flat response token of the batch, the stream index of the token before it, whose output predicts it.
    queries, keys: for all calls together, the stream index of each (padded) row; None: the stream as it is.
    restore [L]: for each stream token its row among the calls' outputs; None: they are in stream order.
    """

    tokens: Tensor
    positions: Tensor
    predicts: Tensor
    longest: int
    calls: tuple[Call, ...]
    queries: Tensor | None
    keys: Tensor | None
    restore: Tensor | None

    def to(self, device: torch.device | str) -> Layout:
        """The same layout with its tensors on `device`."""
        moved = (None if t is None else t.to(device) for t in (self.queries, self.keys, self.restore))
        return Layout(
            self.tokens.to(device), self.positions.to(device), self.predicts.to(device), self.longest, self.calls, *moved
        )


@dataclass(frozen=True)
class _Segment:
    """Consecutive tokens of the stream: its start, its length, and the segment that it continues."""

    start: int
    length: int
    parent: _Segment | None = None

    @property
    def offset(self) -> int:
        """The position of the first token in its sequence."""
        return self.parent.length if self.parent else 0


def make_layout(batch: Batch, *, share_prompts: bool) -> Layout:
    """Lay out prompt and response of every trajectory. Raises ValueError for an empty prompt: nothing predicts its first token.

    share_prompts: trajectories with equal prompt tokens share them; the outputs are the same to rounding.
    """
    if any(len(prompt) == 0 for prompt in batch.prompts):
        raise ValueError("a trajectory with an empty prompt has no token that predicts its first one")
    families = _families(batch, share_prompts)
    segments, own = _place(batch, families)
    rows = _Rows(segments)
    lengths = batch.lengths.tolist()
    before = [_before(own[i], len(batch.prompts[i]), n) for i, n in enumerate(lengths)]
    return Layout(
        tokens=_tokens(batch, families),
        positions=_cat(torch.arange(s.offset, s.offset + s.length) for s in segments),
        predicts=_cat(before),
        longest=max((len(p) + n for p, n in zip(batch.prompts, lengths, strict=True)), default=0),
        calls=rows.calls,
        queries=rows.queries,
        keys=rows.keys,
        restore=rows.restore,
    )


def _families(batch: Batch, share_prompts: bool) -> list[list[int]]:
    """Trajectories that share a prompt, shortest response first; families in the order of their first member."""
    if not share_prompts:
        return [[i] for i in range(len(batch))]
    lengths = batch.lengths.tolist()
    found: dict[tuple[int, ...], list[int]] = {}
    for i, prompt in enumerate(batch.prompts):
        found.setdefault(tuple(prompt.tolist()), []).append(i)
    return [sorted(members, key=lambda i: lengths[i]) for members in found.values()]


def _place(batch: Batch, families: list[list[int]]) -> tuple[list[_Segment], dict[int, _Segment]]:
    """The segments in stream order, and for each trajectory the one that holds its response."""
    lengths = batch.lengths.tolist()
    segments: list[_Segment] = []
    own: dict[int, _Segment] = {}
    end = 0

    def add(length: int, parent: _Segment | None = None) -> _Segment:
        nonlocal end
        segment = _Segment(end, length, parent)
        end += length
        segments.append(segment)
        return segment

    for members in families:
        prompt = len(batch.prompts[members[0]])
        if len(members) == 1:
            own[members[0]] = add(prompt + lengths[members[0]])
            continue
        parent = add(prompt)
        own.update((i, add(lengths[i], parent)) for i in members)
    return segments, own


def _before(own: _Segment, prompt: int, length: int) -> Tensor:
    """[T]: the stream index of the token before each response token."""
    if own.parent is None:
        return torch.arange(own.start + prompt - 1, own.start + prompt - 1 + length)
    index = torch.arange(own.start - 1, own.start - 1 + length)
    index[:1] = own.parent.start + own.parent.length - 1
    return index


def _tokens(batch: Batch, families: list[list[int]]) -> Tensor:
    responses = batch.flat("response").split(batch.lengths.tolist())
    return _cat(part for members in families for part in (batch.prompts[members[0]], *(responses[i] for i in members)))


def _cat(parts: Iterable[Tensor]) -> Tensor:
    listed = list(parts)
    return torch.cat(listed) if listed else torch.zeros(0, dtype=torch.int64)


class _Rows:
    """Segments gathered into calls of similar length: those with a prefix per parent, the others all together."""

    def __init__(self, segments: Sequence[_Segment]) -> None:
        calls: list[Call] = []
        queries: list[Tensor] = []
        keys: list[Tensor] = []
        restore = torch.empty(sum(s.length for s in segments), dtype=torch.int64)
        row = 0
        for members in self._gather(segments):
            width = max(s.length for s in members)
            parent = members[0].parent
            prefix = torch.arange(parent.start, parent.start + parent.length) if parent else None
            for segment in members:
                restore[segment.start : segment.start + segment.length] = torch.arange(row, row + segment.length)
                row += width
                # Padded rows read the segment's last token: any would do, their outputs are dropped and no real query sees them.
                index = segment.start + torch.arange(width).clamp(max=segment.length - 1)
                queries.append(index)
                keys.append(index if prefix is None else torch.cat([prefix, index]))
            calls.append(Call(len(members), width, parent.length if parent else 0))
        self.calls = tuple(calls)
        self.queries = _unless_identity(_cat(queries), len(restore))
        self.keys = _unless_identity(_cat(keys), len(restore))
        self.restore = _unless_identity(restore, row)

    @staticmethod
    def _gather(segments: Sequence[_Segment]) -> list[list[_Segment]]:
        """Sorted by parent and length, cut where a segment would leave too much of its row empty."""
        groups: dict[int, list[_Segment]] = {}
        for segment in segments:
            if segment.length:
                groups.setdefault(segment.parent.start if segment.parent else -1, []).append(segment)
        cut: list[list[_Segment]] = []
        for group in groups.values():
            current: list[_Segment] = []
            for segment in sorted(group, key=lambda s: s.length):
                if current and current[0].length < _FILL * segment.length:
                    cut.append(current)
                    current = []
                current.append(segment)
            cut.append(current)
        return cut


def _unless_identity(index: Tensor, size: int) -> Tensor | None:
    return None if len(index) == size and torch.equal(index, torch.arange(size)) else index
