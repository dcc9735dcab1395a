"""The torch backend as a whole: options that must not change results, exact state, exports."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rollstock import Batch, Loss, MicroBatch, PluginError, Totals, UserError
from rollstock.backends.torch.backend import TorchBackend
from rollstock.testing import check_backend
from rollstock.testing.models import plain_logprobs, plain_model

Make = Callable[..., TorchBackend]


def likelihood(micro: MicroBatch) -> Loss:
    return micro.loss(-micro.logprobs)


def update(backend: TorchBackend, batch: Batch, cuts: list[list[int]] | None = None, **others: Any) -> dict[str, float]:
    given: dict[str, Any] = {"outputs": ["logprobs"], "temperature": 0.7, "loss": likelihood, **others}
    metrics = backend.update(
        batch,
        micro_batches=cuts or [list(range(len(batch)))],
        totals=Totals.of(batch, response_limit=10),
        **given,
    )
    return {name: metric.value for name, metric in metrics.items()}


def weights_of(backend: TorchBackend) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in backend.weights()}


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"share_prompts": False}, 1e-4),
        ({"activation_checkpointing": True, "logits_memory_mib": 1}, 1e-4),
        ({"lora": {"rank": 4, "alpha": 8}}, 1e-4),
        ({"compute_dtype": "bfloat16"}, 0.25),
    ],
    ids=["whole-prompts", "checkpointing", "lora", "bfloat16"],
)
def test_the_conformance_kit_passes_with_other_options(options: dict[str, Any], tolerance: float) -> None:
    check_backend("torch", options={"learning_rate": 1e-2, **options}, tolerance=tolerance)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_activation_checkpointing_changes_no_weight(
    name: str, make_backend: Make, make_spec: Any, batch: Batch
) -> None:
    kept, again = (
        make_backend(make_spec(name), activation_checkpointing=flag, layers="modules") for flag in (False, True)
    )
    calls = {id(kept): 0, id(again): 0}
    for backend in (kept, again):

        def count(*_: Any, key: int = id(backend)) -> None:
            calls[key] += 1

        next(m for n, m in backend._network.named_modules() if n.endswith(".mlp")).register_forward_pre_hook(count)
    assert update(kept, batch) == update(again, batch)
    assert kept.fingerprint() == again.fingerprint()
    assert list(calls.values()) == [1, 2]


@pytest.mark.parametrize("layers", ["lean", "modules"])
@pytest.mark.parametrize("rows", ["batch", "alike"])
def test_sharing_prompts_changes_an_update_by_rounding_only(
    rows: str, layers: str, make_backend: Make, request: pytest.FixtureRequest
) -> None:
    batch = request.getfixturevalue(rows)
    shared, whole = (make_backend(share_prompts=flag, layers=layers) for flag in (True, False))
    assert update(shared, batch)["grad_norm"] == pytest.approx(update(whole, batch)["grad_norm"], rel=1e-5)
    for (name, one), (_, two) in zip(shared.weights(), whole.weights(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")
    cuts = [list(range(len(batch)))]
    columns = [b.forward(batch, ["logprobs", "entropy"], temperature=0.8, micro_batches=cuts) for b in (shared, whole)]
    for name, found in columns[0].items():
        torch.testing.assert_close(found, columns[1][name], rtol=0, atol=1e-4)


def test_lower_precision_computes_but_does_not_store(make_backend: Make, batch: Batch) -> None:
    exact, coarse = make_backend(), make_backend(compute_dtype="bfloat16")
    update(coarse, batch)
    assert {tensor.dtype for tensors in coarse.state().tensors.values() for tensor in tensors.values()} == {
        torch.float32
    }
    coarse.load_state(exact.state())
    cuts = [list(range(len(batch)))]
    one, two = (
        b.forward(batch, ["logprobs"], temperature=1.0, micro_batches=cuts)["logprobs"] for b in (exact, coarse)
    )
    assert 0 < float((one - two).abs().max()) < 0.3


def test_a_value_model_learns_in_lower_precision_with_an_exact_head(
    make_backend: Make, make_spec: Any, batch: Batch
) -> None:
    backend = make_backend(make_spec(head="value"), compute_dtype="bfloat16")
    cuts = [list(range(len(batch)))]
    for _ in range(12):
        update(backend, batch, loss=lambda m: m.loss((m.values - 1) ** 2, name="critic/vf_loss"), outputs=["values"])
    values = backend.forward(batch, ["values"], temperature=1.0, micro_batches=cuts)["values"]
    chosen = batch.flat("action_mask")
    assert float((values[chosen] - 1).abs().mean()) < 0.5
    assert torch.equal(values[~chosen], torch.zeros(int((~chosen).sum())))


def test_temperature_zero_scores_at_temperature_one(make_backend: Make, batch: Batch) -> None:
    backend = make_backend(trainable=False)
    cuts = [list(range(len(batch)))]
    greedy, plain = (
        backend.forward(batch, ["logprobs"], temperature=t, micro_batches=cuts)["logprobs"] for t in (0.0, 1.0)
    )
    assert torch.equal(greedy, plain)


def test_a_resumed_backend_equals_one_that_never_stopped(make_backend: Make, make_spec: Any, batch: Batch) -> None:
    options = {"schedule": "cosine", "warmup_updates": 2, "total_updates": 6}
    through = make_backend(**options)
    expected = [update(through, batch) for _ in range(6)]
    first = make_backend(**options)
    for _ in range(3):
        update(first, batch)
    second = make_backend(**options)
    second.load_state(first.state())
    assert [update(second, batch) for _ in range(3)] == expected[3:]
    assert second.fingerprint() == through.fingerprint()


def test_tied_embeddings_come_once_and_stay_tied(make_backend: Make, make_spec: Any, batch: Batch) -> None:
    spec = make_spec()
    spec.config["tie_word_embeddings"] = True
    backend = make_backend(spec)
    names = [name for name, _ in backend.weights()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    update(backend, batch)
    model = backend._network.model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_adapters_alone_are_trained_and_merge_into_plain_weights(
    name: str, make_backend: Make, make_spec: Any, batch: Batch
) -> None:
    backend = make_backend(make_spec(name), lora=_lora(rank=3, alpha=6.0))
    before = weights_of(backend)
    state = {n: t.clone() for n, t in backend.state().tensors["model"].items()}
    for _ in range(3):
        update(backend, batch)
    after = backend.state().tensors["model"]
    changed = {n for n in after if not torch.equal(after[n], state[n])}
    assert changed == {n for n in after if n.startswith("lora.")}
    assert set(before) == {n for n, _ in plain_model(make_spec(name)).named_parameters()} - (
        {"lm_head.weight"} if name == "gpt2" else set()
    )
    merged = plain_model(make_spec(name), backend.weights())
    cuts = [list(range(len(batch)))]
    found = backend.forward(batch, ["logprobs"], temperature=0.7, micro_batches=cuts)["logprobs"]
    for i, part in enumerate(found.split(batch.lengths.tolist())):
        if not bool(batch.select([i]).flat("action_mask").all()):
            continue  # observations count 0 here
        expected = plain_logprobs(merged, batch.prompts[i].tolist(), batch.response(i).tolist(), 0.7)["logprobs"]
        torch.testing.assert_close(part, expected.detach(), rtol=0, atol=1e-4)
    exported = backend.export_weights(after)
    if name != "qwen3_moe":  # whose experts have other names on disk
        assert all(torch.allclose(exported[n], w, atol=1e-6) for n, w in backend.weights())
    assert not any(n.startswith("lora.") for n in exported)


def test_adapters_go_where_they_are_told(make_backend: Make) -> None:
    backend = make_backend(lora=_lora(rank=2, targets=["q_proj"]))
    adapters = {n for n in backend.state().tensors["model"] if n.startswith("lora.")}
    assert adapters == {f"lora.model.layers.{i}.self_attn.q_proj.{part}" for i in (0, 1) for part in "AB"}


@pytest.mark.parametrize(
    ("saved", "made", "message"),
    [
        (
            {"rank": 2},
            {"rank": 0},
            r"has \d+ adapters of rank 2, and backend\.lora gives this model no adapters",
        ),
        ({"rank": 0}, {"rank": 2}, r"has no adapters, and backend\.lora gives this model \d+ adapters of rank 2"),
        ({"rank": 2}, {"rank": 3}, r"adapters of rank 2, and backend\.lora gives this model \d+ adapters of rank 3"),
        ({"rank": 2}, {"rank": 2, "targets": ["q_proj"]}, r"gives this model 2 adapters of rank 2, which differ in"),
    ],
)
def test_other_adapters_than_a_checkpoints_are_neither_loaded_nor_left_out_of_an_export(
    make_backend: Make, saved: dict[str, Any], made: dict[str, Any], message: str
) -> None:
    state = make_backend(lora=_lora(**saved)).state()
    backend = make_backend(lora=_lora(**made))
    with pytest.raises(UserError, match=message):
        backend.load_state(state)
    with pytest.raises(UserError, match=message):
        backend.export_weights(state.tensors["model"])


def test_adapters_are_made_without_a_word(make_backend: Make, recwarn: pytest.WarningsRecorder) -> None:
    make_backend(lora=_lora(rank=2))
    assert [str(warning.message) for warning in recwarn] == []


def test_adapters_on_layers_that_do_not_exist_are_refused(make_backend: Make) -> None:
    with pytest.raises(UserError, match=r"backend\.lora\.targets: .*no_proj"):
        make_backend(lora=_lora(rank=2, targets=["no_proj"]))


def test_adapters_without_peft_say_what_to_install(make_backend: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(PluginError, match=r"backend:torch .*rollstock\[lora\]"):
        make_backend(lora=_lora(rank=2))


@pytest.mark.parametrize(
    ("name", "rank"), [("llama", 0), ("gemma3_text", 0), ("qwen3_moe", 0), ("llama", 2), ("qwen3_moe", 2)]
)
def test_an_export_loads_in_plain_transformers(
    name: str, rank: int, make_backend: Make, make_spec: Any, batch: Batch, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    backend = make_backend(make_spec(name), lora=_lora(rank=rank))
    before = weights_of(backend)
    update(backend, batch)
    update(backend, batch)  # only then do both halves of an adapter move
    backend.save_config(tmp_path)
    tensors = backend.export_weights(backend.state().tensors["model"])
    save_file({n: t.contiguous().clone() for n, t in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ours = weights_of(backend)
    assert all(torch.equal(tensor, ours[n]) for n, tensor in loaded.named_parameters())
    assert all(not torch.equal(ours[n], before[n]) for n in ours if n.endswith(("q_proj.weight", "experts.down_proj")))


def test_a_reference_is_not_trained(make_backend: Make, batch: Batch) -> None:
    with pytest.raises(UserError, match="without an optimizer"):
        update(make_backend(trainable=False), batch)


def test_a_batch_without_a_chosen_token_is_no_work_and_no_change(make_backend: Make, batch: Batch) -> None:
    backend = make_backend()
    start = backend.fingerprint()
    empty = batch.select([3])
    assert update(backend, empty)["grad_norm"] == 0.0
    assert backend.fingerprint() == start


def _lora(**options: Any) -> Any:
    from rollstock.backends.torch.config import LoRAConfig

    return LoRAConfig(**options)
