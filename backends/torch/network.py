"""A transformers model as a backend uses it: packed streams in, log-probs, entropies and values of response tokens out.

For the torch backend, and for whichever shards the same model over processes. Gradients, optimizers and batches that
are cut into slices are left to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rollstock import HEAD_OUTPUTS, Head, UserError
from rollstock.algorithms.functional import logprobs_and_entropy
from rollstock.backends.models import named_weights
from rollstock.backends.torch import attention
from rollstock.backends.torch.layout import Layout
from rollstock.backends.torch.lean import LeanLayers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VALUE_HEAD = "value_head."
_KINDS: dict[Head, str] = {
    "lm": "a language model",
    "value": "a value model",
    "lm+value": "a language model with a value head",
    "score": "a reward model",
}


class Network(nn.Module):
    """A causal language model over packed streams, with the head that it is told.

    Raises UserError if the model's layers do not ask transformers' attention interface for their attention.
    """

    def __init__(self, model: PreTrainedModel, *, head: Head, logits_bytes: int) -> None:
        """`logits_bytes`: more logits than that at once are computed in parts, each again in the backward pass."""
        super().__init__()
        attention.register()
        if not model._can_set_attn_implementation():
            raise UserError(
                f"model: {type(model).__name__} has an attention of its own, not transformers' attention interface, so "
                "its sequences cannot be packed; choose another architecture"
            )
        model.set_attn_implementation(attention.NAME)
        self.model = model
        self.head: Head = head
        self.value_head = None if head == "lm" else _scalar_head(model, bias=head != "score")
        if "logprobs" not in HEAD_OUTPUTS[head]:
            _drop_lm_head(model)
        self.logits_bytes = logits_bytes
        self.plain_head = False
        """Whether logits are the output embedding of the hidden states and no more, so that parts can be computed."""
        self.lean: LeanLayers | None = None
        """What runs the layers in place of the modules."""

    def forward(
        self, layout: Layout, outputs: Sequence[str], index: Tensor, targets: Tensor, temperature: float
    ) -> dict[str, Tensor]:
        """`outputs` at the stream positions `index` [N], each [N] float32, from one pass through the transformer.

        targets [N]: the tokens whose log-probs are asked for. Raises ValueError for an output that this model has no
        head for.
        """
        self._check(outputs)
        found: dict[str, Tensor] = {}
        wants_logprobs = "logprobs" in outputs or "entropy" in outputs
        if wants_logprobs and not self.plain_head:
            logits, hidden = self._logits(layout, index)
            found["logprobs"], found["entropy"] = logprobs_and_entropy(logits, targets, temperature=temperature)
        else:
            hidden = (
                self.hidden(layout).index_select(0, index) if self.lean is None else self.lean.hidden(layout, index)
            )
            if wants_logprobs:
                found["logprobs"], found["entropy"] = self._score(hidden, targets, temperature)
        for name in {"values", "token_scores"}.intersection(outputs):
            found[name] = self._scalar(hidden)
        return {name: found[name] for name in outputs}

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows."""
        embedding = self.model.get_input_embeddings()
        assert isinstance(embedding, nn.Embedding)
        return embedding.num_embeddings

    @property
    def body(self) -> nn.Module:
        """The transformer without its head."""
        decoder: nn.Module = self.model.get_decoder()
        # Some classes (Llama 4) declare no prefix for it, and then give themselves.
        return self.model.model if decoder is self.model else decoder

    def hidden(self, layout: Layout) -> Tensor:
        """[L, hidden]: the last hidden states of the stream."""
        states: Tensor = self.body(**self.inputs(layout)).last_hidden_state[0]
        return states

    def inputs(self, layout: Layout) -> dict[str, Any]:
        """The keyword arguments of the transformers model for a stream."""
        # The mask's length tells `position_mask` how long the longest sequence is. Without use_cache=False,
        # transformers takes the stream for one long sequence, in silence.
        return {
            "input_ids": layout.tokens[None],
            "position_ids": layout.positions[None],
            "attention_mask": torch.ones((1, layout.longest), dtype=torch.bool, device=layout.tokens.device),
            "use_cache": False,
            attention.LAYOUT: layout,
        }

    @torch.no_grad()
    def start_head(self, weight: Tensor | None) -> None:
        """Let the scalar head start from `weight` [1, hidden]; None leaves it at 0."""
        if weight is not None:
            assert self.value_head is not None
            self.value_head.weight.copy_(weight)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight, tied ones once: the model's by their transformers names, those of a scalar head as
        `value_head.*`."""
        yield from named_weights(self.model)
        if self.value_head is not None:
            for name, tensor in self.value_head.state_dict(keep_vars=True).items():
                yield VALUE_HEAD + name, tensor

    def _check(self, outputs: Sequence[str]) -> None:
        known = {name: None for given in HEAD_OUTPUTS.values() for name in sorted(given)}
        for name in outputs:
            if name not in known:
                raise ValueError(f"unknown output {name!r}; a model gives {', '.join(known)}")
            if name not in HEAD_OUTPUTS[self.head]:
                raise ValueError(f"this is {_KINDS[self.head]}, which gives no {name!r}")

    def _logits(self, layout: Layout, index: Tensor) -> tuple[Tensor, Tensor]:
        """[N, V] and [N, hidden]: what the whole model says at `index`, and the last hidden states that it says it
        from."""
        kept: list[Tensor] = []
        handle = self.body.register_forward_hook(lambda _module, _inputs, output: kept.append(output.last_hidden_state))
        try:
            logits: Tensor = self.model(**self.inputs(layout), logits_to_keep=index).logits[0]
        finally:
            handle.remove()
        return logits, kept[0][0].index_select(0, index)

    def _score(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        head: Callable[[Tensor], Tensor] = self.model.get_output_embeddings() if self.lean is None else self.lean.head

        def score(states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            return logprobs_and_entropy(head(states), ids, temperature=temperature)

        rows = max(1, self.logits_bytes // (4 * self.vocabulary))
        if len(hidden) <= rows:
            return score(hidden, targets)
        parts = [
            checkpoint(score, states, ids, use_reentrant=False, preserve_rng_state=False)
            for states, ids in zip(hidden.split(rows), targets.split(rows), strict=True)
        ]
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _scalar(self, hidden: Tensor) -> Tensor:
        # Spelled out, because a linear layer would run in the lower precision that the transformer may run in.
        assert self.value_head is not None
        scalars = (hidden.float() * self.value_head.weight[0]).sum(dim=-1)
        return scalars if self.value_head.bias is None else scalars + self.value_head.bias


def _scalar_head(model: PreTrainedModel, *, bias: bool) -> nn.Linear:
    """A scalar of the hidden state. It starts at 0: a critic that knows nothing had better say nothing."""
    head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=bias)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return head


def _drop_lm_head(model: PreTrainedModel) -> None:
    """Let go of an output embedding that is never used, unless it is the input embedding."""
    output = model.get_output_embeddings()
    if output is not None and output.weight is not model.get_input_embeddings().weight:
        model.set_output_embeddings(nn.Identity())
