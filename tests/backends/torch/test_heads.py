"""What stands on top of the transformer: nothing, a value head, both, or a reward model's score."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rollstock import Batch, Loss, MicroBatch, ModelSpec, Totals, UserError
from rollstock.backends.torch.backend import TorchBackend
from rollstock.backends.torch.config import LoRAConfig
from rollstock.testing.models import plain_logprobs, plain_model

Make = Callable[..., TorchBackend]


def whole(batch: Batch) -> list[list[int]]:
    return [list(range(len(batch)))]


def update(backend: TorchBackend, batch: Batch, loss: Callable[[MicroBatch], Loss], outputs: list[str]) -> None:
    totals = Totals.of(batch, response_limit=10)
    backend.update(batch, loss, outputs=outputs, temperature=0.7, micro_batches=whole(batch), totals=totals)


def both(micro: MicroBatch) -> Loss:
    """Towards the tokens, and towards values of 1."""
    return micro.loss((micro.values - 1) ** 2 - micro.logprobs)


def towards_the_lengths(micro: MicroBatch) -> Loss:
    lengths = micro.mask.sum(dim=1, keepdim=True).expand(micro.mask.shape)
    return micro.loss((micro.token_scores - lengths) ** 2)


def forward(backend: TorchBackend, batch: Batch, *outputs: str) -> dict[str, Tensor]:
    return backend.forward(batch, outputs, temperature=0.7, micro_batches=whole(batch))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])  # gemma2 caps its logits: they come from the whole model
def test_one_pass_gives_log_probs_and_values_with_gradients_through_both(
    name: str, make_network: Any, make_backend: Make, make_spec: Any, batch: Batch
) -> None:
    shared = make_backend(make_spec(name, head="lm+value"), layers="modules")
    calls: list[int] = []
    shared._network.body.register_forward_pre_hook(lambda *_: calls.append(1))
    for _ in range(3):
        update(shared, batch, both, ["logprobs", "values"])
    assert len(calls) == 3
    policy, critic = make_backend(make_spec(name)), make_backend(make_spec(name, head="value"))
    state = shared.state().tensors["model"]
    plain = {n: t for n, t in state.items() if not n.startswith("value_head.")}
    with torch.no_grad():
        for backend, tensors in ((policy, plain), (critic, state)):
            for n, tensor in backend._named():
                tensor.copy_(tensors[n])
    found = forward(shared, batch, "logprobs", "entropy", "values")
    for n, alone in {**forward(policy, batch, "logprobs", "entropy"), **forward(critic, batch, "values")}.items():
        torch.testing.assert_close(found[n], alone, rtol=0, atol=1e-5)
    assert float(found["values"].abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_gradient_of_a_sum_of_losses_is_the_sum_of_the_gradients(
    name: str, make_backend: Make, make_spec: Any, batch: Batch
) -> None:
    def gradient(outputs: list[str], loss: Callable[[MicroBatch], Loss]) -> dict[str, Tensor]:
        backend = make_backend(make_spec(name, head="lm+value"))
        with torch.no_grad():
            backend._network.value_head.weight.fill_(0.3)
        with backend._pass(batch) as (part, layout, _):
            flat = backend._outputs(part, layout, outputs, 0.7)
        padded = {n: batch.pad(value) for n, value in flat.items()}
        loss(MicroBatch(batch, Totals.of(batch, response_limit=10), padded)).value.backward()
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in backend._trained()}

    policy = gradient(["logprobs"], lambda m: m.loss(-m.logprobs))
    values = gradient(["values"], lambda m: m.loss((m.values - 1) ** 2))
    together = gradient(["logprobs", "values"], both)
    for n, expected in together.items():
        torch.testing.assert_close(policy[n] + values[n], expected, rtol=1e-4, atol=1e-6)
    shared = [n for n in together if n.endswith("q_proj.weight")]
    assert all(float(part[n].abs().max()) > 0 for n in shared for part in (policy, values))


def test_generators_see_nothing_of_a_value_head(make_backend: Make, make_spec: Any, batch: Batch) -> None:
    shared, plain = make_backend(make_spec(head="lm+value")), make_backend(make_spec())
    assert shared.fingerprint() == plain.fingerprint()
    before = shared.fingerprint()
    with torch.no_grad():
        shared._network.value_head.weight.fill_(1.0)
    assert shared.fingerprint() == before
    assert [n for n, _ in shared.weights()] == [n for n, _ in plain.weights()]
    assert {"value_head.weight", "value_head.bias"} <= shared.state().tensors["model"].keys()
    assert "value_head.weight" not in shared.export_weights(shared.state().tensors["model"])


@pytest.mark.parametrize("head", ["lm+value", "score"])
def test_a_restored_head_goes_on_to_the_bit(head: str, make_backend: Make, make_spec: Any, batch: Batch) -> None:
    loss, outputs = (both, ["logprobs", "values"]) if head == "lm+value" else (towards_the_lengths, ["token_scores"])
    through, first, second = (make_backend(make_spec(head=head)) for _ in range(3))
    for _ in range(4):
        update(through, batch, loss, outputs)
    for _ in range(2):
        update(first, batch, loss, outputs)
    second.load_state(first.state())
    for _ in range(2):
        update(second, batch, loss, outputs)
    mine, theirs = second.state().tensors, through.state().tensors
    assert all(torch.equal(mine[part][n], tensor) for part in theirs for n, tensor in theirs[part].items())


def test_adapters_and_a_value_head_are_trained_together(make_backend: Make, make_spec: Any, batch: Batch) -> None:
    backend = make_backend(make_spec(head="lm+value"), lora=LoRAConfig(rank=2))
    before = {n: t.clone() for n, t in backend.state().tensors["model"].items()}
    for _ in range(2):
        update(backend, batch, both, ["logprobs", "values"])
    after = backend.state().tensors["model"]
    changed = {n for n in after if not torch.equal(after[n], before[n])}
    assert changed == {n for n in after if n.startswith(("lora.", "value_head."))}
    merged = plain_model(make_spec(), backend.weights())
    found = forward(backend, batch, "logprobs")["logprobs"][: int(batch.lengths[0])]
    expected = plain_logprobs(merged, batch.prompts[0].tolist(), batch.response(0).tolist(), 0.7)["logprobs"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("share", [True, False])
def test_scores_read_each_token_itself(share: bool, make_backend: Make, make_spec: Any, batch: Batch) -> None:
    backend = make_backend(make_spec(head="score"), share_prompts=share)
    assert torch.equal(forward(backend, batch, "token_scores")["token_scores"], torch.zeros(batch.num_tokens))
    head = backend._network.value_head
    assert head.bias is None
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(0))
    found = forward(backend, batch, "token_scores")["token_scores"].split(batch.lengths.tolist())
    reference = plain_model(make_spec()).model
    masks = batch.flat("action_mask").split(batch.lengths.tolist())
    for i, prompt in enumerate(batch.prompts):
        ids = torch.cat([prompt, batch.response(i)])[None]
        states = reference(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) :]
        expected = torch.where(masks[i], head(states)[:, 0], 0.0)
        torch.testing.assert_close(found[i], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in ("llama", "gpt2", "gemma3_text", "qwen3_moe")]
    + [(name, {"lora": LoRAConfig(rank=2)}) for name in ("llama", "gpt2", "qwen3_moe")],
)
def test_a_reward_model_loads_as_sequence_classification(
    name: str, options: dict[str, Any], make_backend: Make, make_spec: Any, batch: Batch, tmp_path: Path
) -> None:
    spec = make_spec(name, head="score", pad_token_id=0)
    backend = make_backend(spec, **options)
    for _ in range(2):
        update(backend, batch, towards_the_lengths, ["token_scores"])
    loaded, report = export(backend, tmp_path)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.config.num_labels == 1
    ours = forward(backend, batch, "token_scores")["token_scores"].split(batch.lengths.tolist())
    rows = [torch.cat([batch.prompts[i], batch.response(i)]) for i in range(len(batch)) if i not in (2, 3)]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
    with torch.no_grad():
        theirs = loaded(input_ids=padded, attention_mask=padded != 0).logits[:, 0]
    expected = torch.stack([ours[i][-1] for i in range(len(batch)) if i not in (2, 3)])
    torch.testing.assert_close(theirs, expected, rtol=0, atol=1e-4)
    assert float(expected.std()) > 1e-3


def export(backend: TorchBackend, path: Path) -> tuple[Any, dict[str, Any]]:
    """A directory as `rollstock export` makes it, and what transformers loads from it."""
    from transformers import AutoModelForSequenceClassification

    backend.save_config(path)
    tensors = backend.export_weights(backend.state().tensors["model"])
    save_file({n: t.contiguous().clone() for n, t in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    loaded = AutoModelForSequenceClassification.from_pretrained(
        path, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    return loaded[0].eval(), loaded[1]


def test_a_padding_token_that_also_ends_responses_is_left_out_of_an_export(
    make_backend: Make, make_spec: Any, batch: Batch, tmp_path: Path
) -> None:
    backend = make_backend(make_spec(head="score", pad_token_id=3, eos_token_ids=(3,)))
    update(backend, batch, towards_the_lengths, ["token_scores"])
    loaded, _ = export(backend, tmp_path)
    assert loaded.config.pad_token_id is None
    ids = torch.cat([batch.prompts[0], batch.response(0)])
    with torch.no_grad():
        single = float(loaded(input_ids=ids[None]).logits)
    assert single == pytest.approx(float(forward(backend, batch.select([0]), "token_scores")["token_scores"][-1]), 1e-4)
    with pytest.raises(ValueError, match="no padding token"):
        loaded(input_ids=torch.stack([ids, ids]))


def test_a_reward_model_goes_on_from_an_exported_one(
    make_backend: Make, make_spec: Any, batch: Batch, tmp_path: Path
) -> None:
    first = make_backend(make_spec(head="score"))
    update(first, batch, towards_the_lengths, ["token_scores"])
    export(first, tmp_path)
    again = make_backend(ModelSpec(path=str(tmp_path), head="score"))
    mine, theirs = (forward(b, batch, "token_scores")["token_scores"] for b in (again, first))
    assert torch.equal(mine, theirs)
    assert float(mine.abs().max()) > 1e-3


def test_an_architecture_without_a_classifier_is_refused_before_it_is_trained(
    make_backend: Make, make_spec: Any
) -> None:
    with pytest.raises(UserError, match="no sequence classification for cohere"):
        make_backend(make_spec("cohere", head="score"))


def test_a_classifier_into_several_labels_is_no_reward_model(
    make_backend: Make, make_spec: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    backend = make_backend(make_spec(head="score"))
    export(backend, tmp_path)
    other = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=3, ignore_mismatched_sizes=True, local_files_only=True
    )
    other.save_pretrained(tmp_path / "three")
    with pytest.raises(UserError, match="classifies into 3 labels; a reward model has one"):
        make_backend(ModelSpec(path=str(tmp_path / "three"), head="score"))
