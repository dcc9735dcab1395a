"""The part of the rollout kit that is about weights: taking the trainer's, knowing which they are, and forgetting old
ones."""

from __future__ import annotations

from typing import Any

import torch

from rollstock.errors import RunError
from rollstock.interfaces.rollout import Rollout, Sampling
from rollstock.testing import models
from rollstock.testing.engine import MAX_NEW_TOKENS, VERSION, RolloutCase, requests
from rollstock.testing.kit import expect, fail
from rollstock.weights import fingerprint

GREEDY = Sampling(max_new_tokens=MAX_NEW_TOKENS, temperature=0.0)


def check_fingerprint(case: RolloutCase) -> None:
    """After a load, the fingerprint is that of the weights that came, and each token has their version."""
    engine = case.make()
    mend = "return `rollstock.fingerprint` of the weights that the engine generates with, under the names that they "
    "came with"
    expect(
        engine.fingerprint() == fingerprint(case.weights()),
        "the fingerprint is not that of the weights loaded",
        mend=mend,
    )
    moved = models.changed(dict(case.weights()))
    engine.load_weights(iter(moved), VERSION + 1)
    expect(
        engine.fingerprint() == fingerprint(moved),
        "after a second load, the fingerprint is not that of its weights",
        mend=mend,
    )
    versions = {v for found in engine.generate(requests(), GREEDY).completions for v in found.versions}
    expect(
        versions == {VERSION + 1},
        f"tokens have the versions {sorted(versions)}, made with weights of version {VERSION + 1}",
        mend="remember the `version` of `load_weights`, and give it with every token",
    )


def check_freshness(case: RolloutCase) -> None:
    """After a load, everything is computed with the new weights: caches of prompts made with older ones are gone."""
    engine = case.make()
    asked = requests(samples=1)
    engine.generate(asked, GREEDY)
    moved = models.changed(dict(case.weights()), by=0.3)
    engine.load_weights(moved, VERSION + 1)
    plain = models.plain_model(case.model, [(name, tensor.cpu()) for name, tensor in moved])
    for request, found in zip(asked, engine.generate(asked, GREEDY).completions, strict=True):
        right = models.plain_logprobs(plain, request.prompt, found.tokens, 1.0)["logprobs"]
        gap = float((torch.tensor(found.logprobs) - right).abs().max())
        expect(
            gap <= case.tolerance,
            f"after new weights, log-probs of a prompt seen before differ by up to {gap:.3g} nats from plain "
            "transformers",
            mend="throw prefix and KV caches away in `load_weights`, or key them by the version",
        )


def check_copies(case: RolloutCase) -> None:
    """Without `alias`, the engine keeps a copy: what the trainer does to its tensors afterwards does not reach it."""
    engine = case.bare()
    weights = case.weights()
    engine.load_weights(weights, VERSION)
    before = _answers(engine)
    for _, tensor in weights:
        tensor.add_(0.5)
    expect(
        _answers(engine) == before and engine.fingerprint() == fingerprint(case.weights()),
        "the engine's weights change with the trainer's tensors, although `alias` is False",
        mend="copy each tensor, unless `alias` allows to keep it",
    )


def check_alias(case: RolloutCase) -> None:
    """With `alias`, the engine answers the same; a copy after an alias leaves the trainer's tensors alone."""
    engine = case.make()
    before = _answers(engine)
    weights = case.weights()
    engine.load_weights(weights, VERSION, alias=True)
    mend = "`alias` may save a copy, and changes nothing else; never write into a tensor that was aliased"
    expect(
        _answers(engine) == before and engine.fingerprint() == fingerprint(weights),
        "with `alias`, the same weights give other responses or another fingerprint",
        mend=mend,
    )
    kept = fingerprint(weights)
    engine.load_weights(models.changed(dict(weights)), VERSION + 1)
    expect(fingerprint(weights) == kept, "loading a copy writes into the tensors that were aliased before", mend=mend)


def check_wrong_weights(case: RolloutCase) -> None:
    """A weight that is missing, unknown or of another shape is refused with a RunError that names it."""
    weights = case.weights()
    name, tensor = weights[1]
    for what, wrong, named in (
        ("missing", [pair for pair in weights if pair[0] != name], name),
        ("unknown", [*weights, ("no.such.weight", tensor)], "no.such.weight"),
        ("of another shape", [(n, t if n != name else t.reshape(-1)[:1]) for n, t in weights], name),
    ):
        mend = "compare names and shapes with the model's, and raise rollstock.RunError naming the weight"
        try:
            case.bare().load_weights(wrong, VERSION)
        except RunError as error:
            expect(named in str(error), f"the error about {named!r}, {what}, does not name it: {error}", mend=mend)
        else:
            fail(f"a weight that is {what} is taken without a word", mend=mend)


def _answers(engine: Rollout[Any]) -> list[tuple[list[int], list[float]]]:
    return [(found.tokens, found.logprobs) for found in engine.generate(requests(), GREEDY).completions]


WEIGHTS = (check_fingerprint, check_freshness, check_copies, check_alias, check_wrong_weights)
