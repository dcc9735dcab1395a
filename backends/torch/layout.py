"""How a batch becomes one stream of tokens without padding, and which attention calls cover it.

For the network, which reads the stream, and the attention function, which reads the plan. A trajectory is one segment
of the stream, or, where prompts are shared, its response is: the prompt of a group then stands in the stream once,
and every response of the group attends to it and to itself. Where segments of other kinds begin alike, as prompts with
one system message do and responses with the same first words, attention has a row for each, and everything else one
token for all. Which tensor operations run is left to `attention`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollstock import Batch
from rollstock.backends.prefix_tree import first_places, tree_nodes

_FILL = 0.75
"""The share of a call's width that each segment in it fills; the rest of its row is computed for nothing."""

_MERGED = 0.02
"""The share of a stream that must be spared before segments are merged, which costs attention copies of its input."""


@dataclass(frozen=True)
class Prefix:
    """Keys that every query of a call may see: the first `length` rows of segment `row` in an earlier call."""

    call: int
    row: int
    length: int


@dataclass(frozen=True)
class Call:
    """One attention call: `size` segments padded to `width` on the right, each over itself and what they share.

    visible [width, prefix + width] bool: the causal rule with a prefix; None without one, where kernels know the rule.
    """

    size: int
    width: int
    prefix: Prefix | None
    visible: Tensor | None


@dataclass(frozen=True)
class Layout:
    """L tokens of one stream, and where things are in it.

    tokens, positions [L] int64: ids, and each token's place in its own sequence. source [L]: each token's index in the
    packed batch, in which every trajectory stands alone (`Batch.packed`). longest: tokens of the longest
    sequence. predicts [N]: for each flat response token of the batch, the stream index of the token before it, which
    predicts it. responses [N]: the stream index of each response token itself; empty where last tokens are left
    out. rows [R]: the stream index of each row
    of the calls, one call after the other; None: the rows are the stream. places [L]: for each stream token its row,
    the inverse of `rows` (padding aside); None with it. again [2, M]: rows that are no token's place, though not
    padding, and the stream index of their tokens: those of segments that begin as another one does.
    """

    tokens: Tensor
    source: Tensor
    positions: Tensor
    predicts: Tensor
    responses: Tensor
    longest: int
    calls: tuple[Call, ...]
    rows: Tensor | None
    places: Tensor | None
    again: Tensor | None = None

    def to(self, device: torch.device | str) -> Layout:
        """The same layout with its tensors on `device`."""
        return Layout(
            tokens=self.tokens.to(device),
            source=self.source.to(device),
            positions=self.positions.to(device),
            predicts=self.predicts.to(device),
            responses=self.responses.to(device),
            longest=self.longest,
            calls=tuple(
                call if call.visible is None else replace(call, visible=call.visible.to(device)) for call in self.calls
            ),
            rows=None if self.rows is None else self.rows.to(device),
            places=None if self.places is None else self.places.to(device),
            again=None if self.again is None else self.again.to(device),
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


def make_layout(
    batch: Batch, *, share_prompts: bool, marks: Sequence[Hashable] | None = None, keep_last: bool = True
) -> Layout:
    """Lay out prompt and response of every trajectory. Raises ValueError for an empty prompt: nothing predicts its
    first token.

    share_prompts: trajectories with equal prompt tokens share them, and whatever else they begin with alike; the
    outputs are the same to rounding. marks: those with different ones do not, even so, and others only their prompts.
    keep_last: whether the stream has the last token of each response, which predicts nothing.
    """
    if any(len(prompt) == 0 for prompt in batch.prompts):
        raise ValueError("a trajectory with an empty prompt has no token that predicts its first one")
    lengths = batch.lengths.tolist()
    kept = lengths if keep_last else [max(0, n - 1) for n in lengths]
    families = _families(batch, kept, share_prompts, marks)
    source = _source(batch, kept, families)
    segments, own = _place(batch, kept, families)
    calls, rows, places = _gather(segments)
    before = [_before(own[i], len(batch.prompts[i]), n) for i, n in enumerate(lengths)]
    layout = Layout(
        tokens=batch.packed().tokens[source],
        source=source,
        positions=_cat(torch.arange(s.offset, s.offset + s.length) for s in segments),
        predicts=_cat(before),
        responses=_cat(_own(own[i], len(batch.prompts[i]), n) for i, n in enumerate(lengths) if keep_last),
        longest=max((len(p) + n for p, n in zip(batch.prompts, kept, strict=True)), default=0),
        calls=calls,
        rows=rows,
        places=places,
    )
    return _merged(layout, batch) if share_prompts and marks is None else layout


def _merged(layout: Layout, batch: Batch) -> Layout:
    """The layout with every token of the stream once whose past is the same, if that spares enough of them."""
    packed = batch.packed()
    nodes = torch.cat(tree_nodes(packed.tokens.split(packed.lengths.tolist())))[layout.source]
    first, index = first_places(nodes)
    size = len(nodes)
    if len(first) > (1 - _MERGED) * size:
        return layout
    rows, places = (torch.arange(size) if part is None else part for part in (layout.rows, layout.places))
    others = torch.ones(size, dtype=torch.bool)
    others[first] = False
    return replace(
        layout,
        tokens=layout.tokens[first],
        source=layout.source[first],
        positions=layout.positions[first],
        predicts=index[layout.predicts],
        responses=index[layout.responses],
        rows=index[rows],
        places=places[first],
        again=torch.stack([places[others], index[others]]),
    )


def _families(
    batch: Batch, lengths: Sequence[int], share_prompts: bool, marks: Sequence[Hashable] | None
) -> list[list[int]]:
    """Trajectories that share a prompt, shortest response first; families in ascending length of their first member.

    That is the order in which calls take them, so that with equal lengths the stream need not be rearranged.
    """
    if not share_prompts:
        return [[i] for i in sorted(range(len(batch)), key=lambda i: len(batch.prompts[i]) + lengths[i])]
    found: dict[Hashable, list[int]] = {}
    for i, prompt in enumerate(batch.prompts):
        found.setdefault((tuple(prompt.tolist()), marks[i] if marks else None), []).append(i)
    members = [sorted(family, key=lambda i: lengths[i]) for family in found.values()]
    return sorted(members, key=lambda family: len(batch.prompts[family[0]]) + (len(family) == 1) * lengths[family[0]])


def _place(
    batch: Batch, lengths: Sequence[int], families: list[list[int]]
) -> tuple[list[_Segment], dict[int, _Segment]]:
    """The segments in stream order, and for each trajectory the one that holds its response."""
    segments: list[_Segment] = []
    own: dict[int, _Segment] = {}
    end = 0

    def add(length: int, parent: _Segment | None = None) -> _Segment:
        nonlocal end
        segment = _Segment(end, length, parent)
        end += length
        segments.append(segment)
        return segment

    parents: list[tuple[list[int], _Segment]] = []
    for members in families:
        prompt = len(batch.prompts[members[0]])
        if len(members) == 1:
            own[members[0]] = add(prompt + lengths[members[0]])
        else:
            parents.append((members, add(prompt)))
    for members, parent in parents:
        own.update((i, add(lengths[i], parent)) for i in members)
    return segments, own


def _before(own: _Segment, prompt: int, length: int) -> Tensor:
    """[T]: the stream index of the token before each response token."""
    if own.parent is None:
        return torch.arange(own.start + prompt - 1, own.start + prompt - 1 + length)
    index = torch.arange(own.start - 1, own.start - 1 + length)
    index[:1] = own.parent.start + own.parent.length - 1
    return index


def _own(own: _Segment, prompt: int, length: int) -> Tensor:
    """[T]: the stream index of each response token."""
    start = own.start + (prompt if own.parent is None else 0)
    return torch.arange(start, start + length)


def _source(batch: Batch, kept: Sequence[int], families: list[list[int]]) -> Tensor:
    """For each token of the stream, its index in the packed batch; the order is that of `_place`."""
    first: list[Tensor] = []
    second: list[Tensor] = []
    prompts: list[Tensor] = []
    responses: list[Tensor] = []
    end = 0
    for prompt, length, whole in zip(batch.prompts, kept, batch.lengths.tolist(), strict=True):
        prompts.append(torch.arange(end, end + len(prompt)))
        responses.append(torch.arange(end + len(prompt), end + len(prompt) + length))
        end += len(prompt) + whole
    for members in families:
        first.append(prompts[members[0]])
        (first if len(members) == 1 else second).extend(responses[i] for i in members)
    return _cat([*first, *second])


def _cat(parts: Iterable[Tensor]) -> Tensor:
    listed = list(parts)
    return torch.cat(listed) if listed else torch.zeros(0, dtype=torch.int64)


def _gather(segments: Sequence[_Segment]) -> tuple[tuple[Call, ...], Tensor | None, Tensor | None]:
    """Put segments of similar length into calls; returns these, and `rows` and `places` of the layout."""
    calls: list[Call] = []
    rows: list[Tensor] = []
    places = torch.empty(sum(s.length for s in segments), dtype=torch.int64)
    found: dict[int, tuple[int, int]] = {}  # start of a segment: its call, and its row there
    row = 0
    for members in _similar(segments):
        width = max(s.length for s in members)
        for i, segment in enumerate(members):
            found[segment.start] = (len(calls), i)
            places[segment.start : segment.start + segment.length] = torch.arange(row, row + segment.length)
            row += width
            # Padded rows read the segment's last token: any would do, since no real query sees them.
            rows.append(segment.start + torch.arange(width).clamp(max=segment.length - 1))
        calls.append(_call(members, width, found))
    index = _cat(rows)
    if len(index) == len(places) and torch.equal(index, torch.arange(len(index))):
        return tuple(calls), None, None
    return tuple(calls), index, places


def _call(members: Sequence[_Segment], width: int, found: dict[int, tuple[int, int]]) -> Call:
    parent = members[0].parent
    if parent is None:
        return Call(len(members), width, None, None)
    call, row = found[parent.start]
    visible = torch.ones(width, parent.length + width, dtype=torch.bool).tril(parent.length)
    return Call(len(members), width, Prefix(call, row, parent.length), visible)


def _similar(segments: Sequence[_Segment]) -> list[list[_Segment]]:
    """Segments of one parent by length, cut where one would leave too much of its row empty; parents come first."""
    groups: dict[int, list[_Segment]] = {-1: []}
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
        if current:
            cut.append(current)
    return cut
