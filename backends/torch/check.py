"""Whether a model computes in a packed stream what it computes alone: found out by asking it, when it is built.

For the torch backend. transformers has hundreds of architectures, some of which carry state along the stream
(recurrent and convolutional layers), or scale their logits in ways of their own. Rather than a list of names, one
small forward pass against the model's own attention, one sequence at a time, decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rollstock import HEAD_OUTPUTS, Batch, Trajectory, UserError
from rollstock.backends.llama import OtherPartsError, llama_parts
from rollstock.backends.torch import attention
from rollstock.backends.torch.layout import make_layout
from rollstock.backends.torch.lean import LeanLayers
from rollstock.backends.torch.network import Network

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOLERANCE = 1e-3  # of the largest hidden value; rounding stays far below it, a neighbour's influence far above
_ROUNDING = 1e-4  # the same, between two ways to compute one thing
_PROMPTS = (5, 3, 5)
_RESPONSES = (4, 6, 2)


@torch.no_grad()
def check_network(network: Network, *, share_prompts: bool) -> None:
    """Compare packed with alone, and set `network.plain_head`. Raises UserError if the model cannot be packed."""
    model = network.model
    batch = _probe(network.vocabulary)
    layout = make_layout(batch, share_prompts=share_prompts).to(model.device)
    try:
        packed = network.hidden(layout)[layout.predicts]
    except Exception as error:  # whatever a model trips over that was not written for packed streams
        raise UserError(_refusal(model, f"its forward pass fails there ({type(error).__name__}: {error})")) from error
    if not _close(packed, _alone(network, batch)):
        raise UserError(_refusal(model, "its sequences then influence one another"))
    network.plain_head = "logprobs" in HEAD_OUTPUTS[network.head] and _has_plain_head(network, batch)


@torch.no_grad()
def lean_layers(network: Network, *, share_prompts: bool, checkpointed: bool) -> LeanLayers:
    """What can run the layers of a checked network in place of its modules. Raises OtherPartsError, saying why, where
    nothing can: by the model's parts, or by its numbers."""
    if "logprobs" in HEAD_OUTPUTS[network.head] and not network.plain_head:
        raise OtherPartsError("its logits are not those of its output embedding alone")
    if network.model.dtype != torch.float32:
        raise OtherPartsError(f"its weights are {network.model.dtype}")
    lean = LeanLayers(llama_parts(network.model), network.model.config, checkpointed=checkpointed)
    layout = make_layout(_probe(network.vocabulary), share_prompts=share_prompts).to(network.model.device)
    try:
        found = lean.hidden(layout)
    except RuntimeError as error:  # shapes that do not fit, as where only a part of each head is turned
        raise OtherPartsError(f"its layers fit no others ({error})") from error
    if not _close(found, network.hidden(layout), _ROUNDING):
        raise OtherPartsError("its numbers are others than a Llama's")
    return lean


def _refusal(model: PreTrainedModel, reason: str) -> str:
    return (
        f"model: {type(model).__name__} cannot be trained in packed form: {reason}. Architectures whose attention goes "
        "through transformers' attention interface, without recurrent layers, can"
    )


def _probe(vocabulary: int) -> Batch:
    """Three short trajectories, the first and last with one prompt."""

    def tokens(start: int, count: int) -> Tensor:
        return (torch.arange(start, start + count) * 7 + 3) % vocabulary

    return Batch.from_trajectories(
        [
            Trajectory(
                prompt=tokens(prompt, prompt),
                response=tokens(31 * (i + 1), length),
                action_mask=torch.ones(length, dtype=torch.bool),
                rollout_logprobs=torch.zeros(length),
                versions=torch.zeros(length, dtype=torch.int64),
                group=0,
            )
            for i, (prompt, length) in enumerate(zip(_PROMPTS, _RESPONSES, strict=True))
        ]
    )


def _alone(network: Network, batch: Batch) -> Tensor:
    """Hidden states of the tokens before each response token, by the model's own attention, sequence by sequence."""
    model = network.model
    hidden: list[Tensor] = []
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        for i, prompt in enumerate(batch.prompts):
            ids = torch.cat([prompt, batch.response(i)])[None].to(model.device)
            hidden.append(network.body(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1])
    finally:
        model.set_attn_implementation(attention.NAME)
    return torch.cat(hidden)


def _has_plain_head(network: Network, batch: Batch) -> bool:
    """Whether the model returns what its output embedding gives, unscaled and uncapped.

    The embedding's output is blown up on its way, because a cap on logits near 0 would go unnoticed.
    """
    heads: list[Tensor] = []

    def enlarge(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        heads.append(output * 1e4)
        return heads[0]

    layout = make_layout(batch, share_prompts=False).to(network.model.device)
    handle = network.model.get_output_embeddings().register_forward_hook(enlarge)
    try:
        logits = network.model(**network.inputs(layout)).logits
    finally:
        handle.remove()
    return len(heads) == 1 and torch.equal(heads[0], logits)


def _close(found: Tensor, expected: Tensor, tolerance: float = _TOLERANCE) -> bool:
    if found.shape != expected.shape or not bool(expected.isfinite().all()):
        return False
    return float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())
