"""The conformance kit of backends: forward, update, state and export of one model, against plain transformers.

For authors of backends, who call `check_backend(MyBackend)` in a test. Everything is done on a tiny model; what a
backend does on several devices at once is left to its own tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rollstock.batch import Batch
from rollstock.interfaces.backend import Backend
from rollstock.interfaces.device import Device
from rollstock.interfaces.model import ModelSpec
from rollstock.metrics import Metric, Metrics, metric_values
from rollstock.micro import Loss, MicroBatch
from rollstock.testing import models
from rollstock.testing.backend_case import (
    TEMPERATURE,
    BackendCase,
    forward,
    frozen,
    likelihood,
    same_tensors,
    small_batch,
    update,
    whole,
)
from rollstock.testing.backend_state import LASTING
from rollstock.testing.batches import make_trajectory
from rollstock.testing.kit import Report, expect, fail, run_checks
from rollstock.testing.routed import check_router
from rollstock.testing.subject import Subject
from rollstock.testing.subject import check_options as check_plugin_options
from rollstock.weights import fingerprint


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


def check_share(case: BackendCase) -> None:
    """Of a model, a worker alone keeps all, and one of several no more and never nothing."""
    backend = case.subject.make()
    shares = {count: backend.share_kept(count) for count in (1, 2, 4, 8)}
    expect(
        shares[1] == 1 and all(0 < share <= 1 for share in shares.values()),
        f"by the number of workers, each keeps {shares} of the model",
        mend="`share_kept` gives 1 where workers do not divide a model among them, 1 / world_size where they all do",
    )


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
    batch = small_batch()
    found = forward(backend, batch, whole(batch))
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
    batch = small_batch()
    cuts = [[i] for i in reversed(range(len(batch)))]
    backend = case.make()
    before = forward(backend, batch, whole(batch))["logprobs"]
    apart = forward(backend, batch, cuts)["logprobs"]
    expect(
        torch.allclose(before, apart, atol=case.tolerance),
        f"cut in single trajectories, log-probs differ by up to {float((before - apart).abs().max()):.3g}",
        mend="a trajectory must see nothing of its neighbours, and each result must go to its place in the batch",
    )
    other = case.make()
    one, two = update(backend, batch, whole(batch)), update(other, batch, cuts)
    norms = [metric_values(metrics).get("grad_norm", math.nan) for metrics in (one, two)]
    expect(
        math.isclose(*norms, rel_tol=1e-3),
        f"the gradient's norm is {norms[0]:.6g} for the whole batch, and {norms[1]:.6g} in single trajectories",
        mend="add up the gradients of all micro-batches as they are: the losses are divided by global counts already",
    )
    moved, moved_apart = (forward(each, batch, whole(batch))["logprobs"] for each in (backend, other))
    expect(
        float((moved - moved_apart).abs().max()) <= 0.02 * float((moved - before).abs().max()) + case.tolerance,
        "after an update on single trajectories the model says something else than after one on the whole batch",
        mend="one call of `update` is one optimizer step, whatever the number of micro-batches",
    )


def check_update(case: BackendCase) -> None:
    """An update follows the gradient of the loss, changes the fingerprint, and reports `grad_norm`, `lr`,
    `skipped_updates`."""
    backend, batch = case.make(), small_batch()
    mask = batch.flat("action_mask")
    start, before = backend.fingerprint(), forward(backend, batch, whole(batch))["logprobs"]
    expect(backend.fingerprint() == start, "`forward` changes the weights", mend="only `update` may")
    metrics = update(backend, batch, whole(batch))
    _check_metrics(metrics)
    expect(
        backend.fingerprint() != start,
        "an update with a gradient leaves the fingerprint as it was",
        mend="is the learning rate 0? Pass the kit options with one that shows; `weights` must be what is trained",
    )
    after = forward(backend, batch, whole(batch))["logprobs"]
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
    backend, batch = case.make(), small_batch()
    update(backend, batch, whole(batch))
    before = frozen(backend.state())

    def spoilt(micro: MicroBatch) -> Loss:
        loss = likelihood(micro)
        return Loss(loss.value * math.nan, loss.metrics)

    metrics = update(backend, batch, whole(batch), loss=spoilt)
    expect(
        metric_values(metrics).get("skipped_updates") == 1,
        f"skipped_updates is {metric_values(metrics).get('skipped_updates')} after a gradient of NaN",
        mend="look at the gradient's norm before the optimizer's step, and count what you skip",
    )
    expect(
        same_tensors(before, backend.state()),
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
            all(bool(torch.isfinite(v).all()) for v in forward(backend, batch, whole(batch)).values()),
            "the log-probs of a batch with empty responses are not finite",
            mend="leave out what the policy did not choose; give 0 there",
        )
        metrics = metric_values(update(backend, batch, [[0], [1], *([2] for _ in range(len(batch) - 2))]))
        expect(
            metrics.get("skipped_updates") == 0 or backend.fingerprint() == start,
            "a batch with empty responses leads to an update that is not finite",
            mend="call `backward` only on losses that have a gradient",
        )


CHECKS = (
    check_options,
    check_share,
    check_seed,
    check_weights,
    check_forward,
    check_slicing,
    check_update,
    check_skipping,
    check_empty,
    check_router,
    *LASTING,
)
