"""A packed stream computes what each sequence computes alone: outputs and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rollstock import Batch, UserError
from rollstock.backends.models import build_model
from rollstock.backends.torch.check import check_network
from rollstock.backends.torch.layout import make_layout
from rollstock.backends.torch.network import Network
from rollstock.testing.models import plain_model

Run = Callable[..., dict[str, Tensor]]
ARCHITECTURES = ["llama", "qwen3", "gpt2", "mistral", "gemma2", "gemma3_text", "cohere", "gpt_oss", "qwen3_moe"]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], *, tolerance: float = 2e-5) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(1.0, float(value.detach().abs().max()))
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=tolerance * scale, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("share_prompts", [False, True], ids=["whole", "shared"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_outputs_and_gradients_are_those_of_plain_transformers(
    name: str,
    share_prompts: bool,
    make_network: Any,
    make_spec: Any,
    batch: Batch,
    packed: Run,
    plain: Run,
    gradients: Run,
) -> None:
    network = make_network(name)
    reference = plain_model(make_spec(name))
    found, expected = packed(network, batch, share_prompts=share_prompts), plain(reference, batch)
    assert_same(found, expected)
    assert_same(gradients(network.model.named_parameters(), found), gradients(reference.named_parameters(), expected))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sequences_that_begin_alike_share_it_and_nothing_changes(
    name: str, make_network: Any, make_spec: Any, alike: Batch, packed: Run, plain: Run, gradients: Run
) -> None:
    network = make_network(name)
    reference = plain_model(make_spec(name))
    assert len(make_layout(alike, share_prompts=True).tokens) < 0.7 * sum(alike.total_lengths())
    found, expected = packed(network, alike), plain(reference, alike)
    assert_same(found, expected)
    assert_same(gradients(network.model.named_parameters(), found), gradients(reference.named_parameters(), expected))


def test_the_prompt_of_a_group_is_computed_once(batch: Batch) -> None:
    shared, whole = (make_layout(batch, share_prompts=share) for share in (True, False))
    assert len(whole.tokens) == sum(batch.total_lengths())
    assert len(shared.tokens) == 9 + 4 + 6 + batch.num_tokens


def test_other_trajectories_beside_it_change_nothing(make_network: Any, batch: Batch, packed: Run) -> None:
    network = make_network()
    together = packed(network, batch)["logprobs"].split(batch.lengths.tolist())
    for i, part in enumerate(together):
        torch.testing.assert_close(part, packed(network, batch.select([i]))["logprobs"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "cuts",
    [
        [[0, 1, 2, 3, 4, 5, 6]],
        [[6], [5], [4], [3], [2], [1], [0]],
        [[0, 4, 2], [6, 1], [3, 5]],
        [[0, 1, 3, 5], [2], [4, 6]],
    ],
)
def test_any_slicing_gives_the_same_gradient(
    cuts: list[list[int]], make_network: Any, batch: Batch, packed: Run, plain: Run, gradients: Run, make_spec: Any
) -> None:
    network = make_network()
    weights = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(2))
    reference = plain_model(make_spec())

    def loss(found: dict[str, Tensor], part: Tensor) -> Tensor:
        return (found["logprobs"] * part + found["entropy"] * part.square()).sum()

    loss(plain(reference, batch), weights).backward()
    parts = weights.split(batch.lengths.tolist())
    for cut in cuts:
        loss(packed(network, batch.select(cut)), torch.cat([parts[i] for i in cut])).backward()
    found = {name: parameter.grad for name, parameter in network.model.named_parameters()}
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert_same(found, expected)


def test_a_token_that_is_also_the_padding_token_gets_its_gradient(
    make_spec: Any, batch: Batch, packed: Run, plain: Run, gradients: Run
) -> None:
    pad = int(batch.prompts[0][0])
    spec = make_spec(pad_token_id=pad, eos_token_ids=(pad,))
    network = Network(build_model(spec), head="lm", logits_bytes=1 << 30)
    check_network(network, share_prompts=True)
    reference = plain_model(make_spec())  # without a padding token, so that no row of its embedding is special
    reference.load_state_dict(network.model.state_dict())
    assert_same(
        gradients(network.model.named_parameters(), packed(network, batch)),
        gradients(reference.named_parameters(), plain(reference, batch)),
    )


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_logits_in_parts_are_the_same_logits(
    name: str, make_network: Any, batch: Batch, packed: Run, gradients: Run
) -> None:
    at_once, in_parts = make_network(name), make_network(name, logits_bytes=4 * 31 * 5)  # five rows of 31 tokens
    one, two = packed(at_once, batch), packed(in_parts, batch)
    assert_same(two, one)
    assert_same(gradients(in_parts.model.named_parameters(), two), gradients(at_once.model.named_parameters(), one))


def test_only_an_untouched_output_embedding_counts_as_a_plain_head(make_network: Any) -> None:
    plain_heads = {name: make_network(name).plain_head for name in ("llama", "gpt2", "gemma2", "cohere")}
    assert plain_heads == {"llama": True, "gpt2": True, "gemma2": False, "cohere": False}


@pytest.mark.parametrize("name", ["bloom", "mamba", "recurrent_gemma"])
def test_a_model_that_cannot_be_packed_is_refused(name: str, make_network: Any) -> None:
    with pytest.raises(UserError, match=r"model: \w+ForCausalLM .*attention interface"):
        make_network(name)


def test_values_are_the_head_on_the_state_before_each_token(make_network: Any, make_spec: Any, batch: Batch) -> None:
    network = make_network(head="value")
    assert network.value_head is not None
    layout = make_layout(batch, share_prompts=True)

    def values() -> Tensor:
        found: Tensor = network(layout, ["values"], layout.predicts, batch.flat("response"), 1.0)["values"]
        return found

    assert torch.equal(values(), torch.zeros(batch.num_tokens))  # a fresh critic has no opinion
    with torch.no_grad():
        network.value_head.weight.normal_(generator=torch.Generator().manual_seed(0))
        network.value_head.bias.fill_(0.25)
    reference = plain_model(make_spec()).model
    expected = []
    for i, prompt in enumerate(batch.prompts):
        ids = torch.cat([prompt, batch.response(i)])[None]
        states = reference(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
        expected.append(network.value_head(states)[:, 0])
    torch.testing.assert_close(values(), torch.cat(expected), rtol=0, atol=1e-4)


def test_a_value_model_keeps_no_language_model_head(make_network: Any) -> None:
    names = [name for name, _ in make_network(head="value").weights()]
    assert "lm_head.weight" not in names
    assert names[-2:] == ["value_head.weight", "value_head.bias"]


def test_an_output_that_the_model_has_no_head_for_is_refused(make_network: Any, batch: Batch) -> None:
    layout = make_layout(batch, share_prompts=True)
    targets = batch.flat("response")
    with pytest.raises(ValueError, match="a language model, which gives no 'values'"):
        make_network()(layout, ["values"], layout.predicts, targets, 1.0)
    with pytest.raises(ValueError, match="a value model, which gives no 'logprobs'"):
        make_network(head="value")(layout, ["logprobs"], layout.predicts, targets, 1.0)
    with pytest.raises(ValueError, match="unknown output 'loss'"):
        make_network()(layout, ["loss"], layout.predicts, targets, 1.0)
