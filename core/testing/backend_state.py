"""The part of the backend kit that is about what lasts: state, exports, and models that are not trained or have a
value head."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch

from rollstock.errors import UserError
from rollstock.interfaces.backend import BackendState
from rollstock.metrics import metric_values
from rollstock.micro import Loss, MicroBatch
from rollstock.testing import models
from rollstock.testing.backend_case import (
    TEMPERATURE,
    BackendCase,
    forward,
    frozen,
    other_seed,
    same_tensors,
    small_batch,
    update,
    whole,
)
from rollstock.testing.kit import expect, fail
from rollstock.testing.subject import check_json


def check_state(case: BackendCase) -> None:
    """State comes back to the bit: a fresh backend that loads it goes on exactly as the one that gave it."""
    backend, batch = case.make(), small_batch()
    for _ in range(2):
        update(backend, batch, whole(batch))
    state = frozen(backend.state())
    expect(
        "model" in state.tensors,
        f"the state has the parts {sorted(state.tensors)}",
        mend="the part `model` holds the weights",
    )
    state.values = check_json(state.values, "`values` of the state")
    restored = case.make(model=other_seed(case.model))
    restored.load_state(copy.deepcopy(state))
    expect(
        restored.fingerprint() == backend.fingerprint() and same_tensors(state, restored.state()),
        "after load_state, weights or optimizer are not those of the state",
        mend="restore every tensor of `state()`; the part `model` has all weights, the part `optimizer` all moments",
    )
    for _ in range(2):
        results = [update(each, batch, whole(batch)) for each in (backend, restored)]
    expect(
        backend.fingerprint() == restored.fingerprint() and metric_values(results[0]) == metric_values(results[1]),
        "two updates later, the restored backend has other weights or metrics than the one that was never stopped",
        mend="put step counts and the learning-rate schedule into `values`, and moments into `tensors`",
    )


def check_misfit(case: BackendCase) -> None:
    """A state of another model is refused with a UserError that names the first tensor that does not fit."""
    backend = case.make()
    state = frozen(backend.state())
    name = sorted(state.tensors["model"])[0]
    mend = "compare names and shapes before anything is copied, and raise rollstock.UserError naming the tensor"
    for what, spoil in {"of another shape": lambda t: t.reshape(-1)[:1], "missing": None}.items():
        wrong = BackendState({**state.tensors, "model": dict(state.tensors["model"])}, state.values)
        if spoil is None:
            del wrong.tensors["model"][name]
        else:
            wrong.tensors["model"][name] = spoil(wrong.tensors["model"][name])
        try:
            backend.load_state(wrong)
        except UserError as error:
            expect(name in str(error), f"the error about {name!r} ({what}) does not name it: {error}", mend=mend)
        else:
            fail(f"a state whose {name!r} is {what} is taken without a word", mend=mend)


def check_values(case: BackendCase) -> None:
    """A model with a value head says `values` [N], and learns them."""
    backend, batch = case.make(model=models.value_model(case.model)), small_batch()
    target = 1.0
    mask = batch.flat("action_mask")

    def distance(micro: MicroBatch) -> Loss:
        return micro.loss((micro.values - target) ** 2, name="critic/vf_loss")

    errors = []
    for _ in range(6):
        found = backend.forward(batch, ["values"], temperature=1.0, micro_batches=whole(batch))["values"]
        expect(
            found.shape == (batch.num_tokens,),
            f"values have shape {list(found.shape)}",
            mend="one for each response token",
        )
        errors.append(float(((found - target) ** 2)[mask].mean()))
        update(backend, batch, whole(batch), loss=distance, outputs=["values"])
    expect(
        errors[-1] < errors[0],
        f"after 5 updates on the squared error of the values, it went from {errors[0]:.4g} to {errors[-1]:.4g}",
        mend="give `micro.values` its gradient, and put the head among the weights in training",
    )


def check_shared(case: BackendCase) -> None:
    """A policy with a value head gives log-probs and values from one pass, learns both, and keeps its value head from
    generators."""
    backend, batch = case.make(model=models.shared_model(case.model)), small_batch()
    mask = batch.flat("action_mask")

    def both(micro: MicroBatch) -> Loss:
        return micro.loss((micro.values - 1) ** 2 - micro.logprobs)

    expect(
        backend.fingerprint() == case.make().fingerprint(),
        "a value head changes the fingerprint of the weights that a generator gets",
        mend="leave the value head out of `weights`; it belongs to `state`",
    )
    found = []
    for _ in range(4):
        outputs = ["logprobs", "values"]
        found.append(backend.forward(batch, outputs, temperature=TEMPERATURE, micro_batches=whole(batch)))
        update(backend, batch, whole(batch), loss=both, outputs=outputs)
    likelier = float((found[-1]["logprobs"] - found[0]["logprobs"])[mask].mean()) > 0
    nearer = float(((found[-1]["values"] - 1).abs() - (found[0]["values"] - 1).abs())[mask].mean()) < 0
    expect(
        likelier and nearer,
        "after 3 updates on a loss of both, the tokens are "
        f"{'' if likelier else 'not '}likelier and the values {'' if nearer else 'not '}nearer to their target",
        mend="give `micro.logprobs` and `micro.values` their gradients in the same update",
    )


def check_score(case: BackendCase) -> None:
    """A reward model says `token_scores` [N], learns them, and is exported as a classifier that reads the same at the
    end of a response."""
    from safetensors.torch import save_file
    from transformers import AutoModelForSequenceClassification

    backend, batch = case.make(model=models.scoring_model(case.model)), small_batch()
    sign = torch.where(batch.scores > 0, 1.0, -1.0)[:, None]

    def distance(micro: MicroBatch) -> Loss:
        return micro.loss((micro.token_scores - torch.where(micro.scores > 0, 1.0, -1.0)[:, None]) ** 2)

    def say() -> torch.Tensor:
        return backend.forward(batch, ["token_scores"], temperature=1.0, micro_batches=whole(batch))["token_scores"]

    start = say()
    for _ in range(4):
        update(backend, batch, whole(batch), loss=distance, outputs=["token_scores"])
    ours = say()
    gap = [float(((batch.pad(said) - sign) ** 2)[batch.mask].mean()) for said in (start, ours)]
    expect(
        gap[1] < gap[0],
        f"after 4 updates on the squared error of the scores, it went from {gap[0]:.4g} to {gap[1]:.4g}",
        mend="read each score from the state after its token, and train the head",
    )
    with tempfile.TemporaryDirectory() as folder:
        backend.save_config(Path(folder))
        exported = backend.export_weights(frozen(backend.state()).tensors["model"])
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in exported.items()}
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        loaded = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    for i, said in enumerate(ours.split(batch.lengths.tolist())):
        tokens = torch.cat([batch.prompts[i], batch.response(i)])[None]
        with torch.no_grad():
            theirs = float(loaded.eval()(input_ids=tokens).logits)
        expect(
            abs(theirs - float(said[-1])) <= case.tolerance,
            f"the exported classifier says {theirs:.6g} of a response, and the backend {float(said[-1]):.6g}",
            mend="export the score head under the name that it has in sequence classification, and no padding token "
            "that also ends responses",
        )


def check_reference(case: BackendCase) -> None:
    """A model that is not trainable answers as the trainable one does, and its state has no optimizer."""
    batch = small_batch()
    trained, fixed = case.make(), case.make(trainable=False)
    ours, theirs = (forward(each, batch, whole(batch))["logprobs"] for each in (trained, fixed))
    expect(
        torch.allclose(ours, theirs, atol=case.tolerance),
        "the same model gives other log-probs when it is not trainable",
        mend="dropout must be off in training too, or the ratio to the sampler's log-probs is not 1",
    )
    expect(
        "optimizer" not in fixed.state().tensors,
        "a model that is not trainable keeps an optimizer",
        mend="make an optimizer only if `trainable`: it costs memory",
    )
    fixed.load_state(frozen(fixed.state()))


def check_export(case: BackendCase) -> None:
    """`save_config` and `export_weights` make a directory that plain transformers loads as the same model."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    backend, batch = case.make(), small_batch()
    update(backend, batch, whole(batch))
    ours = forward(backend, batch, whole(batch))["logprobs"]
    exported = backend.export_weights(frozen(backend.state()).tensors["model"])
    with tempfile.TemporaryDirectory() as folder:
        backend.save_config(Path(folder))
        expect(
            (Path(folder) / "config.json").is_file(),
            "`save_config` wrote no config.json",
            mend="model.config.save_pretrained(path)",
        )
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in exported.items()}
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    theirs = torch.cat(
        [
            models.plain_logprobs(loaded, batch.prompts[i].tolist(), batch.response(i).tolist(), TEMPERATURE)[
                "logprobs"
            ]
            for i in range(len(batch))
        ]
    )
    mask = batch.flat("action_mask")
    gap = float((ours - theirs)[mask].abs().max())
    expect(
        gap <= case.tolerance,
        f"the exported model's log-probs differ by up to {gap:.3g} from the backend's",
        mend="merge adapters in `export_weights`, and give Hugging Face names",
    )


def check_close(case: BackendCase) -> None:
    """`close` lets go, and may be called on a backend that did nothing."""
    backend = case.make()
    backend.close()


LASTING = (
    check_state,
    check_misfit,
    check_values,
    check_shared,
    check_score,
    check_reference,
    check_export,
    check_close,
)
