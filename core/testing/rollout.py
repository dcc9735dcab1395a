"""The conformance kit of rollouts: what an engine samples, against plain transformers with the same weights.

For authors of engines, who call `check_rollout(MyRollout)` in a test. Speed, and what an engine does on several
devices, are left to its own tests. What the weights do is in `rollstock.testing.rollout_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rollstock.errors import UserError
from rollstock.interfaces.device import Device
from rollstock.interfaces.model import ModelSpec
from rollstock.interfaces.rollout import Completion, GenerationResult, Rollout, Sampling
from rollstock.metrics import Metric
from rollstock.testing import models
from rollstock.testing.engine import MAX_NEW_TOKENS, PROMPTS, RolloutCase, requests
from rollstock.testing.kit import NotApplicable, Report, expect, fail, run_checks
from rollstock.testing.rollout_weights import WEIGHTS
from rollstock.testing.routed import check_steering
from rollstock.testing.subject import Subject
from rollstock.testing.subject import check_options as check_plugin_options

NUM_DRAWS = 256


def check_rollout(
    rollout: type[Rollout[Any]] | Rollout[Any] | str,
    *,
    options: Mapping[str, Any] | None = None,
    model: ModelSpec | None = None,
    tokenizer: Any = None,
    device: Device[Any] | str | None = None,
    tolerance: float = 1e-3,
    skip: Mapping[str, str] | None = None,
) -> Report:
    """Check an engine, given as a class, an instance or an installed plugin's name.

    options: of the plugin; model and tokenizer: a tiny random model over digits by default, whose token ids 1 to 12
    are used in prompts; device: a device plugin, or its name; tolerance: of log-probs, in nats, against transformers
    in float32; skip: checks that do not hold on purpose, each with the reason. Raises ConformanceError.
    """
    case = RolloutCase(
        Subject(Rollout, rollout, options),
        model or models.tiny_model(),
        models.tiny_tokenizer() if tokenizer is None else tokenizer,
        models.get_device(device),
        tolerance,
    )
    return run_checks(case.subject.label, CHECKS, case, skip=skip)


def check_options(case: RolloutCase) -> None:
    """Every option has a help text, and the defaults fit their own types and bounds; making a plugin leaves its
    config alone."""
    check_plugin_options(case.subject)


def check_completions(case: RolloutCase) -> None:
    """Each request gets one completion, in order: ids as sampled, a log-prob and a version each, within its limits."""
    engine = case.make()
    asked = requests(limits=[None, 3, 1])
    result = engine.generate(asked, Sampling(max_new_tokens=MAX_NEW_TOKENS))
    expect(
        isinstance(result, GenerationResult) and len(result.completions) == len(asked),
        f"{len(asked)} requests got {result!r:.200}",
        mend="return a GenerationResult with one completion for each request, in their order",
    )
    size = len(case.tokenizer)
    for request, found in zip(asked, result.completions, strict=True):
        _check_completion(found, min(request.max_new_tokens or MAX_NEW_TOKENS, MAX_NEW_TOKENS), size, case.model)
    expect(
        all(isinstance(metric, Metric) for metric in result.metrics.values()),
        f"the metrics are {result.metrics!r:.200}",
        mend="metrics are `Metric`s, which carry their reducer",
    )
    expect(
        engine.generate([], Sampling()).completions == [], "no request got completions", mend="return an empty result"
    )


def _check_completion(found: Completion, limit: int, vocabulary: int, model: ModelSpec) -> None:
    count = len(found.tokens)
    expect(
        count == len(found.logprobs) == len(found.versions),
        f"{count} tokens, {len(found.logprobs)} log-probs and {len(found.versions)} versions",
        mend="give each sampled token, the one that ended the response included, a log-prob and a version",
    )
    expect(
        all(isinstance(token, int) and 0 <= token < vocabulary for token in found.tokens),
        f"the tokens {found.tokens} are not ids of the vocabulary",
        mend="tokens are ints below the model's vocabulary, the prompt's not among them",
    )
    expect(
        1 <= count <= limit,
        f"a response has {count} tokens under a limit of {limit}",
        mend="`max_new_tokens` of the request, where it has one, and of the sampling bound what is sampled; at least "
        "one is",
    )
    ended = found.tokens[-1] in model.eos_token_ids
    expect(
        found.finish_reason == ("stop" if ended else "length") and (ended or count == limit),
        f"a response of {count} tokens (limit {limit}) that ends in {found.tokens[-1]} has finish_reason "
        f"{found.finish_reason!r}",
        mend="`stop` if the last token is a stop id, else `length`, and nothing is sampled after a stop",
    )
    expect(
        not any(token in model.eos_token_ids for token in found.tokens[:-1]),
        f"sampling went on after a stop id: {found.tokens}",
        mend="a stop id ends the response; it is its last token",
    )


def check_logprobs(case: RolloutCase) -> None:
    """Log-probs are those of the whole distribution at the sampling temperature, cut or not, as plain transformers
    has them."""
    engine, plain = case.make(), case.plain()
    for what, sampling in {
        "temperature 1": Sampling(max_new_tokens=MAX_NEW_TOKENS),
        "temperature 0.5": Sampling(max_new_tokens=MAX_NEW_TOKENS, temperature=0.5),
        "top_k 3": Sampling(max_new_tokens=MAX_NEW_TOKENS, top_k=3),
        "top_p 0.6": Sampling(max_new_tokens=MAX_NEW_TOKENS, temperature=1.3, top_p=0.6),
        "greedy": Sampling(max_new_tokens=MAX_NEW_TOKENS, temperature=0.0),
        "min_new_tokens 3": Sampling(max_new_tokens=MAX_NEW_TOKENS, min_new_tokens=3, stop_token_ids=(1, 2, 3)),
    }.items():
        asked = requests()
        for request, found in zip(asked, engine.generate(asked, sampling).completions, strict=True):
            right = models.plain_logprobs(plain, request.prompt, found.tokens, sampling.temperature or 1.0)["logprobs"]
            gap = float((torch.tensor(found.logprobs) - right).abs().max())
            expect(
                gap <= case.tolerance,
                f"with {what}, log-probs of a response differ by up to {gap:.3g} nats from plain transformers",
                mend="take log-softmax of the logits over the temperature (1 for greedy) before top-k and top-p cut "
                "them; "
                "mind position ids and the cache of prompts of different lengths",
            )


def check_greedy(case: RolloutCase) -> None:
    """Temperature 0 takes the likeliest token each time, whatever the seed."""
    engine, plain = case.make(), case.plain()
    asked = requests()
    for request, found in zip(
        asked, engine.generate(asked, Sampling(max_new_tokens=MAX_NEW_TOKENS, temperature=0.0)).completions, strict=True
    ):
        logits = models.plain_logits(plain, request.prompt, found.tokens)
        missed = logits.max(dim=-1).values - logits.gather(1, torch.tensor(found.tokens)[:, None])[:, 0]
        expect(
            float(missed.max()) <= case.tolerance,
            f"a greedy response has a token whose logit is {float(missed.max()):.3g} below the largest",
            mend="with temperature 0, take the argmax and draw nothing",
        )


def check_seeds(case: RolloutCase) -> None:
    """A response is a function of its prompt and seed: neighbours, order, batch and global generators do not matter."""
    engine = case.make()
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS)
    asked = requests()
    torch.manual_seed(1)
    together = [found.tokens for found in engine.generate(asked, sampling).completions]
    torch.manual_seed(2)
    reverse = [found.tokens for found in engine.generate(asked[::-1], sampling).completions][::-1]
    alone = [engine.generate([request], sampling).completions[0].tokens for request in asked]
    for what, other in {"in the reverse order": reverse, "one at a time": alone}.items():
        wrong = [i for i in range(len(asked)) if other[i] != together[i]]
        if wrong:
            fail(
                f"{what}, request {wrong[0]} gets {other[wrong[0]]}, and {together[wrong[0]]} in its batch",
                mend="draw each token from random numbers that `request.seed` and the token's place alone decide",
            )
    seeds = {
        tuple(engine.generate(requests(seed=seed)[:1], sampling).completions[0].tokens) for seed in range(0, 800, 100)
    }
    expect(len(seeds) > 1, "eight seeds give one and the same response", mend="use `request.seed` of each request")


def check_distribution(case: RolloutCase) -> None:
    """Tokens come as often as their probabilities say, and never from what top_k and top_p cut off."""
    engine, plain = case.make(), case.plain()
    prompt = PROMPTS[0]
    for what, sampling in {
        "temperature 0.8": Sampling(max_new_tokens=1, temperature=0.8),
        "top_k 3": Sampling(max_new_tokens=1, top_k=3),
        "top_p 0.7": Sampling(max_new_tokens=1, top_p=0.7),
    }.items():
        logits = models.plain_logits(plain, prompt, [0])[0] / sampling.temperature
        right = kept_probabilities(torch.softmax(logits, dim=-1), sampling)
        asked = requests(prompts=[prompt], samples=NUM_DRAWS)
        drawn = [found.tokens[0] for found in engine.generate(asked, sampling).completions]
        counts = torch.bincount(torch.tensor(drawn), minlength=len(right)).float() / NUM_DRAWS
        expect(
            not bool(counts[right == 0].any()),
            f"with {what}, tokens come that are cut off: "
            f"{sorted(set(drawn) & set((right == 0).nonzero()[:, 0].tolist()))}",
            mend="top_k keeps the k likeliest tokens; top_p the fewest likeliest ones that reach that probability "
            "together",
        )
        distance = float((counts - right).abs().sum()) / 2
        expect(
            distance < 0.2,
            f"with {what}, frequencies of {NUM_DRAWS} draws are {distance:.2f} from the probabilities (total "
            "variation)",
            mend="divide the logits by the temperature, cut, scale what is kept to 1, and draw with independent seeds",
        )


def kept_probabilities(probabilities: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """What top-k and then top-p leave of a distribution [V], scaled to 1."""
    order = probabilities.argsort(descending=True)
    ranked = probabilities[order]
    if sampling.top_k:
        ranked = torch.where(torch.arange(len(ranked)) < sampling.top_k, ranked, 0.0)
        ranked = ranked / ranked.sum()
    before = ranked.cumsum(0) - ranked
    ranked = torch.where(before < sampling.top_p, ranked, 0.0)
    kept = torch.zeros_like(probabilities).index_put((order,), ranked / ranked.sum())
    assert abs(float(kept.sum()) - 1) < 1e-4
    return kept


def check_stop_ids(case: RolloutCase) -> None:
    """A stop id ends a response and is its last token; what comes before is as without it."""
    engine = case.make()
    asked = requests()
    free = [found.tokens for found in engine.generate(asked, Sampling(max_new_tokens=MAX_NEW_TOKENS)).completions]
    index, place = next((i, 2) for i, tokens in enumerate(free) if len(tokens) > 3)
    stop = free[index][place]
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=(stop,))
    mend = (
        "look for `sampling.stop_token_ids` besides the model's own end ids; keep the id as the last token, with "
        "reason `stop`"
    )
    for before, found in zip(free, engine.generate(asked, sampling).completions, strict=True):
        end = before.index(stop) + 1 if stop in before else len(before)
        expect(
            found.tokens == before[:end],
            f"with the stop id {stop}, a response is {found.tokens}, and {before} without",
            mend=mend,
        )
        if stop in before:
            expect(found.finish_reason == "stop", f"it ends with reason {found.finish_reason!r}", mend=mend)


def check_min_new_tokens(case: RolloutCase) -> None:
    """Until a response has `min_new_tokens`, no stop id is chosen."""
    engine = case.make()
    asked = requests()
    free = [found.tokens for found in engine.generate(asked, Sampling(max_new_tokens=MAX_NEW_TOKENS)).completions]
    stops = tuple({tokens[0] for tokens in free if tokens})
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS, min_new_tokens=2, stop_token_ids=stops)
    for found in engine.generate(asked, sampling).completions:
        expect(
            not set(found.tokens[:2]) & set(stops),
            f"with min_new_tokens 2, a response began with {found.tokens[:2]}, of which some are the stop ids {stops}",
            mend="give stop ids a weight of 0 while a response has fewer than `sampling.min_new_tokens` tokens",
        )


def check_stop_strings(case: RolloutCase) -> None:
    """A stop string ends a response where it first appears in the decoded text, and stays in it."""
    if not callable(getattr(case.tokenizer, "decode", None)):
        raise NotApplicable("the tokenizer cannot decode, so there is no text to look for a string in")
    engine = case.make()
    asked = requests()
    free = [found.tokens for found in engine.generate(asked, Sampling(max_new_tokens=MAX_NEW_TOKENS)).completions]
    texts = [case.tokenizer.decode(tokens) for tokens in free]
    stop = next(
        case.tokenizer.decode(tokens[1:3]) for tokens in free if len(tokens) > 3 and case.tokenizer.decode(tokens[1:3])
    )
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS, stop=(stop,))
    for tokens, text, found in zip(free, texts, engine.generate(asked, sampling).completions, strict=True):
        end = next((n for n in range(1, len(tokens) + 1) if stop in case.tokenizer.decode(tokens[:n])), len(tokens))
        expect(
            found.tokens == tokens[:end],
            f"with the stop string {stop!r}, a response is {case.tokenizer.decode(found.tokens)!r}, and {text!r} "
            "without",
            mend="decode the response so far after each token, and end where the string is in it, across token "
            "borders too",
        )
        if stop in text:
            expect(
                found.finish_reason == "stop",
                f"it ends with reason {found.finish_reason!r}",
                mend="a stop string ends with reason `stop`",
            )


def check_refusals(case: RolloutCase) -> None:
    """An empty prompt, and one longer than the model can read, are refused with a UserError."""
    engine = case.make()
    limit = case.context_length()
    prompts: dict[str, tuple[int, ...]] = {"an empty prompt": ()}
    if limit is not None:
        prompts["a prompt longer than the model can read"] = tuple([1] * (limit + 5))
    for what, prompt in prompts.items():
        try:
            engine.generate(requests(prompts=[prompt]), Sampling(max_new_tokens=2))
        except UserError:
            continue
        fail(f"{what} is generated from without a word", mend="raise rollstock.UserError that says what to change")


def check_close(case: RolloutCase) -> None:
    """`close` lets go of the device."""
    engine = case.make()
    engine.generate(requests()[:1], Sampling(max_new_tokens=2))
    engine.close()


CHECKS = (
    check_options,
    check_completions,
    check_logprobs,
    check_greedy,
    check_seeds,
    check_distribution,
    check_stop_ids,
    check_min_new_tokens,
    check_stop_strings,
    check_steering,
    *WEIGHTS,
    check_refusals,
    check_close,
)
