"""The conformance kit of algorithms: what it declares, that it is repeatable, and its state.

For authors of algorithms, who call `check_algorithm(MyAlgorithm)` in a test. The mathematics, which have to hold
however a batch is cut and padded, are in `rollstock.testing.algorithm_math`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from rollstock.batch import Batch
from rollstock.columns import PLAYED, SOURCES
from rollstock.config.file import ConfigFile
from rollstock.config.load import config_from_values
from rollstock.interfaces.algorithm import Algorithm
from rollstock.interfaces.model import HEAD_OUTPUTS
from rollstock.metrics import Metric, Metrics
from rollstock.schema import RunConfig
from rollstock.testing.algorithm_columns import COLUMNS
from rollstock.testing.algorithm_math import MATHEMATICS
from rollstock.testing.case import AlgorithmCase
from rollstock.testing.kit import NotApplicable, Report, expect, fail, run_checks
from rollstock.testing.subject import Subject, check_json
from rollstock.testing.subject import check_options as check_plugin_options
from rollstock.testing.trial import (
    Columns,
    RecordingBatch,
    drifted,
    give_advantages,
    gradients,
    model_outputs,
    prepare,
    step,
)


def check_algorithm(
    algorithm: type[Algorithm[Any]] | Algorithm[Any] | str,
    *,
    options: Mapping[str, Any] | None = None,
    columns: Columns | None = None,
    skip: Mapping[str, str] | None = None,
) -> Report:
    """Check an algorithm, given as a class, an instance or an installed plugin's name.

    options: of the plugin, where its defaults are not what is to be checked; columns: made-up values of columns that
    no role provides, `{"name": lambda batch: tensor}`, flat `[N, ...]` for tokens or `[B, ...]` for sequences; skip:
    checks that do not hold on purpose, each with the reason. Raises ConformanceError for the first promise that is
    broken.
    """
    case = AlgorithmCase(Subject(Algorithm, algorithm, options), columns or {})
    return run_checks(case.subject.label, CHECKS, case, skip=skip)


def check_options(case: AlgorithmCase) -> None:
    """Every option has a help text, and the defaults fit their own types and bounds; making a plugin leaves its
    config alone."""
    check_plugin_options(case.subject)


def check_declarations(case: AlgorithmCase) -> None:
    """Needed and early columns, model outputs, samples per prompt, refill rounds and what is offline are of the right
    type and fit together."""
    algorithm = case.make()
    for name in ("needs", "early", "trains_with"):
        _names(getattr(algorithm, name), name)
    needed = _names(algorithm.needed_columns(), "needed_columns()")
    early = _names(algorithm.early_columns(), "early_columns()")
    outputs = _names(algorithm.training_outputs(), "training_outputs()")
    head = algorithm.actor_head()
    expect(head in ("lm", "lm+value", "score"), f"actor_head() is {head!r}", mend="'lm', 'lm+value' or 'score'")
    main = "token_scores" if head == "score" else "logprobs"
    expect(
        early <= needed,
        f"{sorted(early - needed)} are early columns without being needed",
        mend="name them in `needs` as well: `early` is a part of it",
    )
    expect(
        outputs <= HEAD_OUTPUTS[head] and main in outputs,
        f"the loss asks a model with the head {head!r} for {sorted(outputs)}",
        mend=f"it gives {', '.join(sorted(HEAD_OUTPUTS[head]))}; the loss of a policy needs `logprobs`, that of a "
        "reward model `token_scores`, and a critic's `values` are a column",
    )
    for name, least in (("samples_per_prompt", 1), ("refill_rounds", 0)):
        value = getattr(algorithm, name)
        expect(
            isinstance(value, int) and value >= least, f"{name} is {value!r}", mend=f"a whole number, at least {least}"
        )
    for name in ("offline", "whole_groups"):
        expect(
            isinstance(getattr(algorithm, name), bool), f"{name} is {getattr(algorithm, name)!r}", mend="True or False"
        )
    if algorithm.offline:
        played = sorted(needed & PLAYED)
        expect(
            not algorithm.refill_rounds and not played,
            "it is offline, so nothing is played, and asks for "
            + (f"the columns {', '.join(played)}" if played else f"{algorithm.refill_rounds} refill rounds"),
            mend="leave `refill_rounds` at 0, and the columns of greedy playing to algorithms that sample",
        )


def check_columns(case: AlgorithmCase) -> None:
    """An algorithm reads the columns that it declares, and no others: a run provides those, and starts a role for
    each."""
    algorithm = case.make()
    batch = RecordingBatch.of(case.batch())
    prepare(algorithm, batch, case.columns)
    try:
        batch.read.clear()
        give_advantages(algorithm, batch)
        algorithm.select(batch)
        own = set(batch.read)
        outputs = model_outputs(algorithm, batch, drifted(batch))
        batch.read.clear()  # of what the kit itself reads
        loss = gradients(algorithm.loss, batch, outputs)
        if "values" in algorithm.needed_columns():
            gradients(algorithm.critic_loss, batch, {"values": batch.flat("values")})
        algorithm.after_update(batch, loss.metrics)
    except (AttributeError, KeyError) as error:
        _undeclared(algorithm, error)
    read = own | batch.read
    unused = sorted(set(algorithm.needed_columns()) - read - {"old_logprobs"})
    expect(
        not unused,
        f"it declares that it needs {', '.join(map(repr, unused))}, and never reads it",
        mend="take it out of `needs`, or override `needed_columns` so that it depends on the option that matters: a "
        "role may be "
        "started for nothing",
    )
    unknown = sorted(read & {"rollout_logprobs", "versions"})
    expect(
        not (algorithm.offline and unknown),
        f"it is offline and reads {', '.join(map(repr, unknown))}, of responses that no policy of the run sampled",
        mend="compare with `ref_logprobs`, or with `old_logprobs`",
    )


def _undeclared(algorithm: Algorithm[Any], error: Exception) -> None:
    """Say which declaration is missing; an error about anything else goes on."""
    for name in sorted({*SOURCES, *PLAYED, "entropy", "old_logprobs"}, key=len, reverse=True):
        if repr(name) not in str(error):
            continue
        if name == "entropy":
            fail("the loss reads `micro.entropy`, which it did not ask for", mend="add 'entropy' to `trains_with`")
        if name == "old_logprobs" and name in algorithm.needed_columns():
            fail(
                "it reads `old_logprobs` of the batch before the update, where a run of one update a step has none",
                mend="add 'old_logprobs' to `early`; in `loss`, read `micro.old_logprobs`",
            )
        fail(f"it reads the column {name!r} and does not declare it", mend=f"add {name!r} to `needs`")
    raise error


def _names(value: object, what: str) -> set[str]:
    is_set = isinstance(value, Set) and all(isinstance(name, str) and name for name in value)
    if not is_set:
        fail(f"{what} is {value!r}", mend="return a set of column names, such as frozenset({'old_logprobs'})")
    assert isinstance(value, Set)
    return set(value)


def check_results(case: AlgorithmCase) -> None:
    """Advantages are finite floats [B, T]; a loss is a finite scalar that depends on the log-probs, with metrics that
    carry reducers."""
    algorithm = case.make()
    batch = step(algorithm, case.batch(), case.columns)
    for name in ("advantages", "returns"):
        if name in batch:
            value = batch[name]
            expect(
                value.is_floating_point() and bool(torch.isfinite(value).all()),
                f"the {name} are {value.dtype} and not all finite",
                mend="multiply float scores by `batch.mask`, and mind divisions by 0",
            )
            expect(
                not value.requires_grad,
                f"the {name} carry a gradient",
                mend="detach them: they are constants to the loss",
            )
    found = gradients(algorithm.loss, batch, model_outputs(algorithm, batch, drifted(batch)))
    expect(
        math.isfinite(found.loss),
        f"the loss is {found.loss}",
        mend="mind exponentials of large differences, and divisions by 0",
    )
    expect(
        bool((found.main != 0).any()),
        "the loss does not depend on what the model says: its gradient is 0 everywhere",
        mend="compute it from `micro.logprobs` (a reward model's from `micro.token_scores`), without detaching them",
    )
    _check_metrics(found.metrics, "loss")
    _check_metrics(algorithm.after_update(batch, found.metrics), "after_update")


def _check_metrics(metrics: object, what: str) -> None:
    mend = "metrics are a dict of text names, such as 'actor/pg_clipfrac', and `Metric`s, such as `micro.mean(values)`"
    expect(isinstance(metrics, Mapping), f"{what} gives metrics of type {type(metrics).__name__}", mend=mend)
    assert isinstance(metrics, Mapping)
    for name, metric in metrics.items():
        expect(
            isinstance(name, str) and isinstance(metric, Metric),
            f"{what} has the metric {name!r}: {metric!r}",
            mend=mend,
        )


def check_determinism(case: AlgorithmCase) -> None:
    """The same batch gives the same advantages and loss to the bit, whatever torch's global generator, and stays as
    it was."""
    results = []
    for seed in (1, 2):
        algorithm = case.make()
        batch = case.batch()
        prepare(algorithm, batch, case.columns)
        before = _snapshot(batch)
        torch.manual_seed(seed)
        give_advantages(algorithm, batch)
        advantages = batch.advantages
        _compare_columns(before, batch, "advantages")
        torch.manual_seed(seed)
        again = algorithm.advantages(case.prepared(algorithm))
        twice = again["advantages"] if isinstance(again, Mapping) else again
        expect(
            torch.equal(twice, advantages),
            "asked twice for the same advantages, it gives others",
            mend="keep no state in `advantages`; what must adapt belongs in `after_update`",
        )
        before = _snapshot(batch)
        loss = gradients(algorithm.loss, batch, model_outputs(algorithm, batch, drifted(batch)))
        _compare_columns(before, batch, "loss")
        results.append((advantages, loss))
    (first, one), (second, other) = results
    expect(
        torch.equal(first, second) and torch.equal(one.main, other.main),
        "two instances give different results for one batch",
        mend="draw random numbers from a generator of your own, seeded by `rollstock.derive_seed`, never from "
        "torch's global one",
    )


def _snapshot(batch: Batch) -> dict[str, Tensor]:
    return {name: batch[name].clone() for name in batch.columns}


def _compare_columns(before: Mapping[str, Tensor], batch: Batch, what: str) -> None:
    changed = [name for name, value in before.items() if not torch.equal(batch[name], value)]
    expect(
        not changed,
        f"`{what}` changes the batch's {', '.join(changed)}",
        mend="return new columns from `advantages`; operations that end in `_` write into their argument",
    )


def check_state(case: AlgorithmCase) -> None:
    """State is JSON, and an instance that takes it back goes on exactly as the one that gave it."""
    algorithm = case.make()
    _advance(algorithm, case, seed=0)
    state = algorithm.state()
    expect(isinstance(state, dict), f"the state is {type(state).__name__}", mend="`state` returns a dict")
    saved = check_json(state, "the state")
    other = case.make()
    other.load_state(saved)
    expect(
        other.state() == state,
        f"after load_state({saved}), the state is {other.state()}",
        mend="`load_state` must take back everything that `state` gives",
    )
    results = [_advance(one, case, seed=1) for one in (algorithm, other)]
    same = torch.equal(results[0][0], results[1][0]) and algorithm.state() == other.state()
    expect(
        same and results[0][1] == results[1][1],
        "an instance that took the state back goes on differently from the one that gave it",
        mend="put all that `after_update` changes into `state`",
    )


def _advance(algorithm: Algorithm[Any], case: AlgorithmCase, *, seed: int) -> tuple[Tensor, Metrics]:
    """A whole step, `after_update` included; returns the loss's gradient and the metrics."""
    batch = step(algorithm, case.batch(), case.columns, seed=seed)
    found = gradients(algorithm.loss, batch, model_outputs(algorithm, batch, drifted(batch)))
    return found.main, {**found.metrics, **algorithm.after_update(batch, found.metrics)}


def check_selection(case: AlgorithmCase) -> None:
    """`select` gives None, or indices of the batch, each once."""
    batch = case.batch()
    chosen = case.make().select(batch)
    if chosen is None:
        return
    indices = [int(index) for index in chosen]
    expect(
        len(set(indices)) == len(indices) and all(0 <= index < len(batch) for index in indices),
        f"`select` chose {indices} of {len(batch)} trajectories",
        mend="return each index from 0 to len(batch) - 1 at most once, or None for all",
    )


def check_validation(case: AlgorithmCase) -> None:
    """`validate` takes any run config and gives a list of sentences."""
    algorithm = case.make()
    for temperature in (1.0, 0.0):
        problems: Sequence[object] = algorithm.validate(_run_config(case, temperature))
        is_list = not isinstance(problems, str) and all(isinstance(problem, str) for problem in problems)
        expect(is_list, f"`validate` gives {problems!r}", mend="return a list of sentences, empty when all is well")


def _run_config(case: AlgorithmCase, temperature: float) -> RunConfig:
    """A config as `validate` sees it; what its plugins are called does not matter."""
    config = config_from_values(
        ConfigFile(
            "made up",
            {"model": {"config": {"model_type": "llama"}}, "algorithm": case.subject.label, "environment": "made_up"},
        )
    )
    config.sampling.temperature = temperature
    return config


def check_critic(case: AlgorithmCase) -> None:
    """An algorithm that needs values has a critic's loss, which moves them towards the returns."""
    algorithm = case.make()
    if "values" not in algorithm.needed_columns():
        raise NotApplicable("it needs no values, so it has no critic")
    batch = step(algorithm, case.batch(), case.columns)
    expect(
        "returns" in batch,
        "`advantages` gives the critic no `returns` to learn",
        mend="return {'advantages': ..., 'returns': ...} from `advantages`",
    )
    values = batch.flat("values")
    found = gradients(algorithm.critic_loss, batch, {"values": values})
    pull = (found.by["values"] * (values - batch.flat("returns")))[batch.flat("action_mask")]
    expect(
        float(pull.sum()) > 0 and not bool((pull < 0).any()),
        "a step against the gradient of critic_loss moves values away from the returns",
        mend="the loss must grow with the distance of `micro.values` from `micro.returns`",
    )
    slices = [[i] for i in range(len(batch))]
    apart = gradients(algorithm.critic_loss, batch, {"values": values}, slices=slices)
    expect(
        torch.allclose(apart.by["values"], found.by["values"], rtol=1e-4, atol=1e-6),
        "slices of a batch give the critic another gradient than the whole",
        mend="reduce through `micro.loss(losses, name='critic/vf_loss')`, which divides by the counts of the whole "
        "batch",
    )


CHECKS = (
    check_options,
    check_declarations,
    check_columns,
    check_results,
    check_determinism,
    *MATHEMATICS,
    *COLUMNS,
    check_critic,
    check_state,
    check_selection,
    check_validation,
)
