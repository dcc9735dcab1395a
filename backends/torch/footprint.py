"""What a pass through the model keeps for its backward pass, and micro-batches cut so that it is no more than asked.

For the torch backend. A scheduler cuts by tokens and knows no model; here the model's sizes are known. More tokens at
once than fill the processor are no faster, only larger. An estimate: what does not fit all the same is `room`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollstock import HEAD_OUTPUTS, Batch

if TYPE_CHECKING:
    from rollstock.backends.torch.network import Network

_MODULES = 2.0
"""How much more than the lean layers the modules of a layer keep, about."""


@dataclass(frozen=True)
class Footprint:
    """Bytes that are kept: `token` for each of the stream, `output` for each whose logits are needed; `most` in all."""

    token: int
    output: int
    most: int

    def of(self, batch: Batch, indices: Sequence[int], *, share_prompts: bool) -> int:
        """What the trajectories at `indices` keep."""
        lengths = batch.lengths.tolist()
        prompts = [batch.prompts[i] for i in indices]
        if share_prompts:
            prompts = list({tuple(prompt.tolist()): prompt for prompt in prompts}.values())
        responses = sum(int(lengths[i]) for i in indices)
        return self.token * (sum(map(len, prompts)) + responses) + self.output * responses


def footprint_of(network: Network, *, most: int, checkpointed: bool) -> Footprint | None:
    """That of a network in float32; None where the model's config does not say its sizes."""
    config: Any = network.model.config.get_text_config()
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    sizes: list[Any] = [getattr(config, name, None) for name in names]
    if not all(isinstance(size, int) for size in sizes):
        return None
    layers, hidden, inner, heads = (int(size) for size in sizes)
    keys = int(getattr(config, "num_key_value_heads", None) or heads)
    head = int(getattr(config, "head_dim", None) or hidden // heads)
    # The two residual streams and the gated unit's halves; queries, keys and values, as made and as attention reads
    # them; and what it gives.
    layer = 2 * hidden + 2 * inner + (3 * heads + 4 * keys) * head
    if network.lean is None:
        layer = round(_MODULES * layer)
    kept = hidden if checkpointed else layer
    logits = 2 * 4 * network.vocabulary if "logprobs" in HEAD_OUTPUTS[network.head] else 0
    return Footprint(4 * layers * kept, logits, most)


def cut_to_fit(
    batch: Batch, micro_batches: Sequence[Sequence[int]], footprint: Footprint, *, share_prompts: bool
) -> list[list[int]]:
    """The micro-batches; one that keeps more than `footprint.most` is cut into few parts that keep about as much each.

    Groups stay together as far as they fit, because they share a prompt, and in any case where they must.
    """

    def cost(indices: Sequence[int]) -> int:
        return footprint.of(batch, indices, share_prompts=share_prompts)

    cut: list[list[int]] = []
    for indices in micro_batches:
        if cost(indices) <= footprint.most:  # in its order, too: sums in another one round differently
            cut.append(list(indices))
            continue
        units = _units(batch, indices, cost, footprint.most)
        costs = [cost(unit) for unit in units]
        even = sum(costs) / max(1, -(-sum(costs) // footprint.most))
        part: list[int] = []
        size = 0
        for unit, more in zip(units, costs, strict=True):
            if part and (size + more > footprint.most or size + more / 2 > even):
                cut.append(part)
                part, size = [], 0
            part, size = [*part, *unit], size + more
        cut.append(part)
    return cut


def _units(batch: Batch, indices: Sequence[int], cost: Callable[[Sequence[int]], int], most: int) -> list[list[int]]:
    """What stays together: groups, or pieces of those that are too large."""
    members: dict[int, list[int]] = {}
    for i, group in zip(indices, batch.groups[list(indices)].tolist(), strict=True):
        members.setdefault(group, []).append(i)
    units: list[list[int]] = []
    for group in members.values():
        counts = [1] if batch.whole_groups else range(1, len(group) + 1)
        tried = ([group[k * len(group) // n : (k + 1) * len(group) // n] for k in range(n)] for n in counts)
        fitting = (pieces for pieces in tried if max(map(cost, pieces)) <= most)
        units += next(fitting, [group] if batch.whole_groups else [[i] for i in group])
    return units
