"""Every check of the rollout kit can fail."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rollstock import Completion, GenerationRequest, GenerationResult, Rollout, RunError, Sampling, UserError
from rollstock.backends.native import Native
from rollstock.testing import ConformanceError, check_rollout
from rollstock.testing.rollout import CHECKS


class Changed(Native):
    """What the wrong engines below have in common: they change what goes in or comes out of the right one."""

    def asked(self, requests: Sequence[GenerationRequest]) -> Sequence[GenerationRequest]:
        return requests

    def sampled(self, sampling: Sampling) -> Sampling:
        return sampling

    def given(self, completion: Completion) -> Completion:
        return completion

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> GenerationResult:
        found = super().generate(self.asked(requests), self.sampled(sampling))
        return GenerationResult([self.given(completion) for completion in found.completions], found.metrics)


class LosesACompletion(Native):
    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> GenerationResult:
        return super().generate(requests[:-1], sampling)


class NoLogprobOfTheLast(Changed):
    def given(self, completion: Completion) -> Completion:
        return dataclasses.replace(completion, logprobs=completion.logprobs[:-1])


class TokensAreTensors(Changed):
    def given(self, completion: Completion) -> Completion:
        tokens: Any = list(torch.tensor(completion.tokens))
        return dataclasses.replace(completion, tokens=tokens)


class IgnoresLimits(Changed):
    def asked(self, requests: Sequence[GenerationRequest]) -> Sequence[GenerationRequest]:
        return [dataclasses.replace(request, max_new_tokens=None) for request in requests]


class AlwaysStops(Changed):
    def given(self, completion: Completion) -> Completion:
        return dataclasses.replace(completion, finish_reason="stop")


class MetricsAreFloats(Native):
    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> GenerationResult:
        metrics: Any = {"rollout/tokens": 3.0}
        return GenerationResult(super().generate(requests, sampling).completions, metrics)


class LogprobsAtTemperatureOne(Changed):
    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> GenerationResult:
        self.temperature = sampling.temperature or 1.0
        return super().generate(requests, sampling)

    def given(self, completion: Completion) -> Completion:
        scaled = [logprob * self.temperature for logprob in completion.logprobs]
        return dataclasses.replace(completion, logprobs=scaled)


class GreedyIsWarm(Changed):
    def sampled(self, sampling: Sampling) -> Sampling:
        return dataclasses.replace(sampling, temperature=sampling.temperature or 1.0)


class SeedsByPlace(Changed):
    def asked(self, requests: Sequence[GenerationRequest]) -> Sequence[GenerationRequest]:
        return [dataclasses.replace(request, seed=place) for place, request in enumerate(requests)]


class SeedsOfThePrompt(Changed):
    def asked(self, requests: Sequence[GenerationRequest]) -> Sequence[GenerationRequest]:
        return [dataclasses.replace(request, seed=len(request.prompt)) for request in requests]


class IgnoresTopK(Changed):
    def sampled(self, sampling: Sampling) -> Sampling:
        return dataclasses.replace(sampling, top_k=0)


class IgnoresTopP(Changed):
    def sampled(self, sampling: Sampling) -> Sampling:
        return dataclasses.replace(sampling, top_p=1.0)


class FewSeeds(Changed):
    def asked(self, requests: Sequence[GenerationRequest]) -> Sequence[GenerationRequest]:
        return [dataclasses.replace(request, seed=request.seed % 7) for request in requests]


class IgnoresStopIds(Changed):
    def sampled(self, sampling: Sampling) -> Sampling:
        return dataclasses.replace(sampling, stop_token_ids=())


class StopsEarly(Changed):
    def sampled(self, sampling: Sampling) -> Sampling:
        return dataclasses.replace(sampling, min_new_tokens=0)


class IgnoresStopStrings(Changed):
    def sampled(self, sampling: Sampling) -> Sampling:
        return dataclasses.replace(sampling, stop=())


class Loads(Native):
    """What the wrong loaders below have in common."""

    def taken(self, weights: list[tuple[str, Tensor]], version: int, alias: bool) -> None:
        super().load_weights(weights, version, alias=alias)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, *, alias: bool = False) -> None:
        self.taken(list(weights), version, alias)


class ForgetsTheVersion(Loads):
    def taken(self, weights: list[tuple[str, Tensor]], version: int, alias: bool) -> None:
        super().taken(weights, 3, alias)


class FingerprintOfTheFirst(Loads):
    first = ""

    def taken(self, weights: list[tuple[str, Tensor]], version: int, alias: bool) -> None:
        super().taken(weights, version, alias)
        self.first = self.first or super().fingerprint()

    def fingerprint(self) -> str:
        return self.first


class KeepsCaches(Changed):
    """Answers a prompt that it has seen from memory, whatever the weights."""

    def setup(self, *arguments: Any) -> None:
        super().setup(*arguments)
        self.seen: dict[Any, Completion] = {}

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> GenerationResult:
        found = super().generate(requests, sampling)
        for request, completion in zip(requests, found.completions, strict=True):
            old = self.seen.setdefault((request, sampling), completion)
            completion.tokens, completion.logprobs = old.tokens, old.logprobs
        return found


class AlwaysAliases(Loads):
    def taken(self, weights: list[tuple[str, Tensor]], version: int, alias: bool) -> None:
        super().taken(weights, version, True)


class AliasHalves(Loads):
    def taken(self, weights: list[tuple[str, Tensor]], version: int, alias: bool) -> None:
        super().taken([(name, t * 0.5 if alias else t) for name, t in weights], version, alias)


class WritesIntoAliases(Loads):
    aliased: list[tuple[str, Tensor]] | None = None

    def taken(self, weights: list[tuple[str, Tensor]], version: int, alias: bool) -> None:
        for (_, old), (_, new) in zip(sorted(self.aliased or []), sorted(weights), strict=False):
            old.copy_(new)
        super().taken(weights, version, alias)
        self.aliased = weights if alias else None


class TakesWhatFits(Loads):
    def taken(self, weights: list[tuple[str, Tensor]], version: int, alias: bool) -> None:
        try:
            super().taken(weights, version, alias)
        except RunError:
            return


class AnswersToNothing(Native):
    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> GenerationResult:
        try:
            return super().generate(requests, sampling)
        except UserError:
            return GenerationResult([Completion(tokens=[], logprobs=[], finish_reason="length", versions=[])])


class FailsOnClose(Native):
    def close(self) -> None:
        raise RuntimeError("nothing to close")


WRONG: list[tuple[type[Rollout[Any]], str, str]] = [
    (LosesACompletion, "completions", "one completion for each request"),
    (NoLogprobOfTheLast, "completions", "log-probs"),
    (TokensAreTensors, "completions", "ints"),
    (IgnoresLimits, "completions", "limit"),
    (AlwaysStops, "completions", "finish_reason"),
    (MetricsAreFloats, "completions", "Metric"),
    (LogprobsAtTemperatureOne, "logprobs", "temperature 0.5"),
    (GreedyIsWarm, "greedy", "argmax"),
    (SeedsByPlace, "seeds", "in the reverse order"),
    (SeedsOfThePrompt, "seeds", "one and the same response"),
    (IgnoresTopK, "distribution", "top_k 3"),
    (IgnoresTopP, "distribution", "top_p 0.7"),
    (FewSeeds, "distribution", "total variation"),
    (IgnoresStopIds, "stop_ids", "stop id"),
    (StopsEarly, "min_new_tokens", "stop ids"),
    (IgnoresStopStrings, "stop_strings", "stop string"),
    (ForgetsTheVersion, "fingerprint", "version 4"),
    (FingerprintOfTheFirst, "fingerprint", "second load"),
    (KeepsCaches, "freshness", "caches"),
    (AlwaysAliases, "copies", "`alias` is False"),
    (AliasHalves, "alias", "with `alias`"),
    (WritesIntoAliases, "alias", "aliased before"),
    (TakesWhatFits, "wrong_weights", "without a word"),
    (AnswersToNothing, "refusals", "empty prompt"),
    (FailsOnClose, "close", "nothing to close"),
]


@pytest.mark.parametrize(("wrong", "check", "said"), WRONG, ids=[wrong.__name__ for wrong, _, _ in WRONG])
def test_a_wrong_rollout_is_caught_by_its_check(
    wrong: type[Rollout[Any]], check: str, said: str, all_but: Callable[..., Any]
) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_rollout(wrong, skip=all_but(CHECKS, check))
    assert caught.value.check == check
    assert said in str(caught.value)
