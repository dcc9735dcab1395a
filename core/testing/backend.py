"""The conformance kit of backends: forward, update, state and export of one model, against plain transformers.

For authors of backends, who call `check_backend(MyBackend)` in a test. Everything is done on a tiny model; what a
backend does on several devices at once is left to its own tests.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollstock.batch import Batch
from rollstock.errors import UserError
from rollstock.interfaces.backend import Backend, BackendState
from rollstock.interfaces.device import Device
from rollstock.interfaces.model import ModelSpec
from rollstock.metrics import Metric, Metrics, metric_values
from rollstock.micro import Loss, MicroBatch, Totals
from rollstock.testing import models
from rollstock.testing.batches import make_batch, make_trajectory
from rollstock.testing.kit import Report, expect, fail, run_checks
from rollstock.testing.subject import Subject, check_json
from rollstock.testing.subject import check_options as check_plugin_options
from rollstock.weights import fingerprint

TEMPERATURE = 0.7


@dataclass(frozen=True)
class BackendCase:
    """The backend under test, with the model and the device that it is set up with."""

    subject: Subject[Backend[Any]]
    model: ModelSpec
    device: Device[Any]
    tolerance: float

    def make(self, *, trainable: bool = True, model: ModelSpec | None = None) -> Backend[Any]:
        """A backend, set up."""
        backend = self.subject.make()
        backend.setup(model or self.model, self.device, trainable=trainable, total_updates=100)
        return backend


def check_backend(
    backend: type[Backend[Any]] | Backend[Any] | str,
    *,
    options: Mapping[str, Any] | None = None,
    model: ModelSpec | None = None,
    device: Device[Any] | str | None = None,
    tolerance: float = 1e-4,
    skip: Mapping[str, str] | None = None,
) -> Report:
    """Check a backend, given as a class, an instance or an installed plugin's name.

    options: of the plugin; a learning rate that changes a weight within one update is needed. model: a tiny random
    one by default; its tokens 1 to 12 are used. device: a device plugin, or its name. tolerance: of log-probs, in
    nats, against transformers in float32. skip: checks that do not hold on purpose, each with the reason. Raises
    ConformanceError.
    """
    case = BackendCase(
        Subject(Backend, backend, options), model or models.tiny_model(), models.get_device(device), tolerance
    )
    return run_checks(case.subject.label, CHECKS, case, skip=skip)


def check_options(case: BackendCase) -> None:
    """Every option has a help text, and the defaults fit their own types and bounds; making a plugin leaves its
    config alone."""
    check_plugin_options(case.subject)


def check_seed(case: BackendCase) -> None:
    """The weights of a random model are a function of the spec's seed alone, and are what `fingerprint` says."""
    torch.manual_seed(1)
    first = case.make(trainable=False)
    torch.manual_seed(2)
    second = case.make(trainable=False)
    mend = "seed torch with `model.seed` right before the weights are drawn (`rollstock.backends.models.build_model` "
    "shows how)"
    expect(first.fingerprint() == second.fingerprint(), "two models of one spec have other fingerprints", mend=mend)
    expect(
        first.fingerprint() == fingerprint(first.weights()),
        "`fingerprint()` is not that of `weights()`",
        mend="return `rollstock.fingerprint(self.weights())`",
    )
    if case.model.path is None:
        other = case.make(trainable=False, model=models.tiny_model(seed=case.model.seed + 1))
        expect(other.fingerprint() != first.fingerprint(), "models of two seeds are the same", mend=mend)


def check_weights(case: BackendCase) -> None:
    """`weights` are full, under their Hugging Face names, tied ones once: plain transformers can take them."""
    weights = list(case.make().weights())
    names = [name for name, _ in weights]
    expect(
        len(set(names)) == len(names),
        "a weight comes twice",
        mend="give each name once, tied tensors under one of theirs",
    )
    pointers = [tensor.data_ptr() for _, tensor in weights if tensor.numel()]
    expect(
        len(set(pointers)) == len(pointers), "tied weights come twice", mend="give tied tensors once, by the first name"
    )
    try:
        models.plain_model(case.model, [(name, tensor.cpu()) for name, tensor in weights])
    except ValueError as error:
        fail(
            str(error),
            mend="use the names of the transformers model, with adapters merged and wrappers' prefixes taken off",
        )


def check_forward(case: BackendCase) -> None:
    """Log-probs and entropies are plain transformers' at the temperature, flat float32 [N] on the CPU, without a
    gradient."""
    backend = case.make(trainable=False)
    plain = models.plain_model(case.model, [(name, tensor.cpu()) for name, tensor in backend.weights()])
    batch = _batch()
    found = _forward(backend, batch, _whole(batch))
    mask = batch.flat("action_mask")
    for name in ("logprobs", "entropy"):
        expect(
            name in found,
            f"forward gave {sorted(found)}",
            mend=f"give a tensor for each of `columns`, {name!r} among them",
        )
        value = found[name]
        expect(
            value.shape == (batch.num_tokens,) and value.dtype == torch.float32 and value.device.type == "cpu",
            f"{name} is {value.dtype} {list(value.shape)} on {value.device}, for {batch.num_tokens} response tokens",
            mend="one float32 number for each response token, in the order of the batch, on the CPU",
        )
        expect(not value.requires_grad, f"{name} has a gradient", mend="run `forward` under `torch.no_grad()`")
        parts = [
            models.plain_logprobs(plain, batch.prompts[i].tolist(), batch.response(i).tolist(), TEMPERATURE)[name]
            for i in range(len(batch))
        ]
        gap = float((value - torch.cat(parts))[mask].abs().max())
        expect(
            gap <= case.tolerance,
            f"{name} at temperature {TEMPERATURE} differs by up to {gap:.3g} nats from plain transformers",
            mend="divide logits by the temperature; predict each token from the one before it; mind position ids and "
            "attention "
            "across packed sequences",
        )


def check_slicing(case: BackendCase) -> None:
    """How a batch is cut into micro-batches changes neither what `forward` says nor what `update` does."""
    batch = _batch()
    cuts = [[i] for i in reversed(range(len(batch)))]
    backend = case.make()
    before = _forward(backend, batch, _whole(batch))["logprobs"]
    apart = _forward(backend, batch, cuts)["logprobs"]
    expect(
        torch.allclose(before, apart, atol=case.tolerance),
        f"cut in single trajectories, log-probs differ by up to {float((before - apart).abs().max()):.3g}",
        mend="a trajectory must see nothing of its neighbours, and each result must go to its place in the batch",
    )
    other = case.make()
    one, two = _update(backend, batch, _whole(batch)), _update(other, batch, cuts)
    norms = [metric_values(metrics).get("grad_norm", math.nan) for metrics in (one, two)]
    expect(
        math.isclose(*norms, rel_tol=1e-3),
        f"the gradient's norm is {norms[0]:.6g} for the whole batch, and {norms[1]:.6g} in single trajectories",
        mend="add up the gradients of all micro-batches as they are: the losses are divided by global counts already",
    )
    moved, moved_apart = (_forward(each, batch, _whole(batch))["logprobs"] for each in (backend, other))
    expect(
        float((moved - moved_apart).abs().max()) <= 0.02 * float((moved - before).abs().max()) + case.tolerance,
        "after an update on single trajectories the model says something else than after one on the whole batch",
        mend="one call of `update` is one optimizer step, whatever the number of micro-batches",
    )


def check_update(case: BackendCase) -> None:
    """An update follows the gradient of the loss, changes the fingerprint, and reports `grad_norm`, `lr`,
    `skipped_updates`."""
    backend, batch = case.make(), _batch()
    mask = batch.flat("action_mask")
    start, before = backend.fingerprint(), _forward(backend, batch, _whole(batch))["logprobs"]
    expect(backend.fingerprint() == start, "`forward` changes the weights", mend="only `update` may")
    metrics = _update(backend, batch, _whole(batch))
    _check_metrics(metrics)
    expect(
        backend.fingerprint() != start,
        "an update with a gradient leaves the fingerprint as it was",
        mend="is the learning rate 0? Pass the kit options with one that shows; `weights` must be what is trained",
    )
    after = _forward(backend, batch, _whole(batch))["logprobs"]
    expect(
        float((after - before)[mask].mean()) > 0,
        "an update on the loss -logprob makes the tokens less likely",
        mend="step against the gradient; is the learning rate of the options far too high for one step?",
    )


def _check_metrics(metrics: Metrics) -> None:
    for name in ("grad_norm", "lr", "skipped_updates", "actor/pg_loss"):
        expect(
            isinstance(metrics.get(name), Metric),
            f"`update` gives the metrics {sorted(metrics)}, without {name!r}",
            mend="merge the metrics of every micro-batch's Loss, and add `grad_norm`, `lr` and `skipped_updates`",
        )


def check_skipping(case: BackendCase) -> None:
    """A gradient that is not finite changes nothing, and counts as a skipped update."""
    backend, batch = case.make(), _batch()
    _update(backend, batch, _whole(batch))
    before = _frozen(backend.state())

    def spoilt(micro: MicroBatch) -> Loss:
        loss = _likelihood(micro)
        return Loss(loss.value * math.nan, loss.metrics)

    metrics = _update(backend, batch, _whole(batch), loss=spoilt)
    expect(
        metric_values(metrics).get("skipped_updates") == 1,
        f"skipped_updates is {metric_values(metrics).get('skipped_updates')} after a gradient of NaN",
        mend="look at the gradient's norm before the optimizer's step, and count what you skip",
    )
    expect(
        _same_tensors(before, backend.state()),
        "a gradient of NaN changes weights or optimizer",
        mend="skip the optimizer's step, and throw the gradient away",
    )


def check_empty(case: BackendCase) -> None:
    """A batch in which some or all responses are empty or masked is trained on without failing, and without a
    gradient of NaN."""
    backend = case.make()
    rows = [
        make_trajectory(0, group=0, vocab_size=13),
        make_trajectory(3, group=0, observations=[0, 1, 2], seed=1, vocab_size=13),
    ]
    for batch in (Batch.from_trajectories(rows), Batch.from_trajectories([*rows, make_trajectory(3, vocab_size=13)])):
        start = backend.fingerprint()
        expect(
            all(bool(torch.isfinite(v).all()) for v in _forward(backend, batch, _whole(batch)).values()),
            "the log-probs of a batch with empty responses are not finite",
            mend="leave out what the policy did not choose; give 0 there",
        )
        metrics = metric_values(_update(backend, batch, [[0], [1], *([2] for _ in range(len(batch) - 2))]))
        expect(
            metrics.get("skipped_updates") == 0 or backend.fingerprint() == start,
            "a batch with empty responses leads to an update that is not finite",
            mend="call `backward` only on losses that have a gradient",
        )


def check_state(case: BackendCase) -> None:
    """State comes back to the bit: a fresh backend that loads it goes on exactly as the one that gave it."""
    backend, batch = case.make(), _batch()
    for _ in range(2):
        _update(backend, batch, _whole(batch))
    state = _frozen(backend.state())
    expect(
        "model" in state.tensors,
        f"the state has the parts {sorted(state.tensors)}",
        mend="the part `model` holds the weights",
    )
    state.values = check_json(state.values, "`values` of the state")
    restored = case.make(model=_other_seed(case.model))
    restored.load_state(copy.deepcopy(state))
    expect(
        restored.fingerprint() == backend.fingerprint() and _same_tensors(state, restored.state()),
        "after load_state, weights or optimizer are not those of the state",
        mend="restore every tensor of `state()`; the part `model` has all weights, the part `optimizer` all moments",
    )
    for _ in range(2):
        results = [_update(each, batch, _whole(batch)) for each in (backend, restored)]
    expect(
        backend.fingerprint() == restored.fingerprint() and metric_values(results[0]) == metric_values(results[1]),
        "two updates later, the restored backend has other weights or metrics than the one that was never stopped",
        mend="put step counts and the learning-rate schedule into `values`, and moments into `tensors`",
    )


def check_misfit(case: BackendCase) -> None:
    """A state of another model is refused with a UserError that names the first tensor that does not fit."""
    backend = case.make()
    state = _frozen(backend.state())
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
    backend, batch = case.make(model=models.value_model(case.model)), _batch()
    target = 1.0
    mask = batch.flat("action_mask")

    def distance(micro: MicroBatch) -> Loss:
        return micro.loss((micro.values - target) ** 2, name="critic/vf_loss")

    errors = []
    for _ in range(6):
        found = backend.forward(batch, ["values"], temperature=1.0, micro_batches=_whole(batch))["values"]
        expect(
            found.shape == (batch.num_tokens,),
            f"values have shape {list(found.shape)}",
            mend="one for each response token",
        )
        errors.append(float(((found - target) ** 2)[mask].mean()))
        _update(backend, batch, _whole(batch), loss=distance, outputs=["values"])
    expect(
        errors[-1] < errors[0],
        f"after 5 updates on the squared error of the values, it went from {errors[0]:.4g} to {errors[-1]:.4g}",
        mend="give `micro.values` its gradient, and put the head among the weights in training",
    )


def check_reference(case: BackendCase) -> None:
    """A model that is not trainable answers as the trainable one does, and its state has no optimizer."""
    batch = _batch()
    trained, fixed = case.make(), case.make(trainable=False)
    ours, theirs = (_forward(each, batch, _whole(batch))["logprobs"] for each in (trained, fixed))
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
    fixed.load_state(_frozen(fixed.state()))


def check_export(case: BackendCase) -> None:
    """`save_config` and `export_weights` make a directory that plain transformers loads as the same model."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    backend, batch = case.make(), _batch()
    _update(backend, batch, _whole(batch))
    ours = _forward(backend, batch, _whole(batch))["logprobs"]
    exported = backend.export_weights(_frozen(backend.state()).tensors["model"])
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


def _batch() -> Batch:
    return make_batch(4, num_groups=2, vocab_size=13)


def _whole(batch: Batch) -> list[list[int]]:
    return [list(range(len(batch)))]


def _forward(backend: Backend[Any], batch: Batch, cuts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    return backend.forward(batch, ["logprobs", "entropy"], temperature=TEMPERATURE, micro_batches=cuts)


def _likelihood(micro: MicroBatch) -> Loss:
    return micro.loss(-micro.logprobs)


def _update(
    backend: Backend[Any],
    batch: Batch,
    cuts: Sequence[Sequence[int]],
    *,
    loss: Callable[[MicroBatch], Loss] = _likelihood,
    outputs: Sequence[str] = ("logprobs",),
) -> Metrics:
    totals = Totals.of(batch, response_limit=16)
    return backend.update(batch, loss, outputs=outputs, temperature=TEMPERATURE, micro_batches=cuts, totals=totals)


def _frozen(state: BackendState) -> BackendState:
    """A copy of a state, whose tensors may be the live ones."""
    tensors = {part: {n: t.detach().cpu().clone() for n, t in found.items()} for part, found in state.tensors.items()}
    return BackendState(tensors, copy.deepcopy(state.values))


def _same_tensors(saved: BackendState, now: BackendState) -> bool:
    if saved.tensors.keys() != now.tensors.keys():
        return False
    return all(
        saved.tensors[part].keys() == now.tensors[part].keys()
        and all(torch.equal(tensor, now.tensors[part][name].cpu()) for name, tensor in saved.tensors[part].items())
        for part in saved.tensors
    )


def _other_seed(model: ModelSpec) -> ModelSpec:
    return replace(model, seed=model.seed + 1)


CHECKS = (
    check_options,
    check_seed,
    check_weights,
    check_forward,
    check_slicing,
    check_update,
    check_skipping,
    check_empty,
    check_state,
    check_misfit,
    check_values,
    check_reference,
    check_export,
    check_close,
)
