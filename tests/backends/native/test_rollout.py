"""The engine against the model's own forward and against transformers' generation."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstock import (
    Completion,
    GenerationRequest,
    Memory,
    ModelSpec,
    NoOptions,
    RunError,
    Sampling,
    Scheduler,
    UserError,
)
from rollstock.backends.native import Native
from rollstock.backends.native.decoder import PlainDecoder, SharedDecoder
from rollstock.hardware.cpu import CPU

SHARED = ["llama", "qwen3", "gpt2", "mistral", "gemma3_text", "qwen3_moe"]
PLAIN = ["gemma2", "bloom", "mamba2"]
Requests = Callable[[int], list[GenerationRequest]]


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


def recomputed(model: Any, request: GenerationRequest, completion: Completion, temperature: float) -> torch.Tensor:
    """The log-probs of a completion by a plain forward of the whole sequence."""
    sequence = torch.tensor([[*request.prompt, *completion.tokens]])
    with torch.no_grad():
        logits = model(sequence, use_cache=False).logits[0, len(request.prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]


@pytest.mark.parametrize("name", SHARED + PLAIN)
def test_greedy_equals_the_models_own_most_probable_tokens(
    name: str, make_engine: Callable[..., Native], make_model: Any, requests_of: Requests
) -> None:
    requests, model = requests_of(3), make_model(name)
    completions = make_engine(name).generate(requests, Sampling(temperature=0, max_new_tokens=14)).completions
    for request, completion in zip(requests, completions, strict=True):
        sequence = list(request.prompt)
        with torch.no_grad():
            for _ in range(14):
                sequence.append(int(model(torch.tensor([sequence]), use_cache=False).logits[0, -1].argmax()))
        assert completion.tokens == sequence[len(request.prompt) :]
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), recomputed(model, request, completion, 1.0), atol=2e-5, rtol=0
        )


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_greedy_equals_transformers_generate(
    name: str, make_engine: Callable[..., Native], make_model: Any, requests_of: Requests
) -> None:
    requests, model = requests_of(1), make_model(name)
    model.generation_config.eos_token_id = None  # the argument below alone would fall back to it
    completions = make_engine(name).generate(requests, Sampling(temperature=0, max_new_tokens=14)).completions
    for request, completion in zip(requests, completions, strict=True):
        prompt = torch.tensor([request.prompt])
        theirs = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=14,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert completion.tokens == theirs[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "mistral", "mamba2"])
def test_logprobs_are_those_of_a_plain_forward_at_the_sampling_temperature(
    name: str, temperature: float, make_engine: Callable[..., Native], make_model: Any, requests_of: Requests
) -> None:
    requests, model = requests_of(2), make_model(name)
    sampling = Sampling(temperature=temperature, top_k=20, top_p=0.9, max_new_tokens=14)
    for request, completion in zip(requests, make_engine(name).generate(requests, sampling).completions, strict=True):
        expected = recomputed(model, request, completion, temperature)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=2e-5, rtol=0)


def test_each_model_is_run_the_fast_way_where_that_is_right(make_engine: Callable[..., Native]) -> None:
    assert all(isinstance(make_engine(name).decoder, SharedDecoder) for name in SHARED)
    assert all(isinstance(make_engine(name).decoder, PlainDecoder) for name in PLAIN)


def test_both_ways_of_running_a_model_give_the_same_tokens(
    make_engine: Callable[..., Native], requests_of: Requests
) -> None:
    results = [
        make_engine("llama", decoder=decoder).generate(requests_of(3), Sampling(max_new_tokens=12)).completions
        for decoder in ("shared", "plain")
    ]
    assert tokens_of(results[0]) == tokens_of(results[1])


def test_positions_that_depend_on_the_longest_sequence_are_not_mixed(
    make_engine: Callable[..., Native], make_spec: Callable[..., ModelSpec]
) -> None:
    moving = make_spec("llama")
    moving.config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}  # type: ignore[index]
    assert isinstance(make_engine(model=moving).decoder, PlainDecoder)


def test_insisting_on_shared_prompts_where_they_would_be_wrong_is_refused(make_engine: Callable[..., Native]) -> None:
    with pytest.raises(UserError, match="softcap"):
        make_engine("gemma2", decoder="shared")


@pytest.mark.parametrize("name", ["llama", "mistral", "bloom"])
def test_a_sample_depends_on_its_own_seed_alone(
    name: str, make_engine: Callable[..., Native], requests_of: Requests
) -> None:
    engine, requests, sampling = make_engine(name), requests_of(4), Sampling(top_p=0.95, max_new_tokens=12)
    together = engine.generate(requests, sampling).completions
    alone = [engine.generate([request], sampling).completions[0] for request in requests]
    backwards = engine.generate(requests[::-1], sampling).completions[::-1]
    small = make_engine(name, max_batch=3, min_batch=1).generate(requests, sampling).completions
    assert tokens_of(together) == tokens_of(alone) == tokens_of(backwards) == tokens_of(small)
    assert len({tuple(tokens) for tokens in tokens_of(together[:4])}) > 1  # samples of one prompt do differ
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=2e-5, rtol=0)


def test_a_response_continued_with_its_seed_is_the_response_of_one_request(
    make_engine: Callable[..., Native], requests_of: Requests
) -> None:
    engine, requests = make_engine(), requests_of(2)
    whole = engine.generate(requests, Sampling(max_new_tokens=12)).completions
    firsts = engine.generate(requests, Sampling(max_new_tokens=5)).completions
    continued = [
        replace(request, prompt=(*request.prompt, *first.tokens))
        for request, first in zip(requests, firsts, strict=True)
    ]
    lasts = engine.generate(continued, Sampling(max_new_tokens=7)).completions
    assert [a + b for a, b in zip(tokens_of(firsts), tokens_of(lasts), strict=True)] == tokens_of(whole)


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_the_prompt_of_a_group_is_prefilled_once(
    name: str, make_engine: Callable[..., Native], requests_of: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(name)
    read: list[tuple[int, ...]] = []
    start = engine.decoder.start
    monkeypatch.setattr(engine.decoder, "start", lambda p, c, n: read.extend(p) or start(p, c, n))
    requests = requests_of(8)
    metrics = engine.generate(requests, Sampling(max_new_tokens=2)).metrics
    assert sorted(read) == sorted({request.prompt for request in requests})
    assert metrics["rollout/prefill_tokens"].value == sum(map(len, read))
    assert metrics["rollout/shared_prompt_tokens"].value == 7 * sum(map(len, read))


def test_finished_rows_leave_the_batch(
    make_engine: Callable[..., Native], prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    widths: list[int] = []
    step = engine.decoder.step
    monkeypatch.setattr(engine.decoder, "step", lambda tokens: widths.append(len(tokens)) or step(tokens))
    limits = [1, 6, 2, 4, 6, 3]
    requests = [
        GenerationRequest(prompt=prompts[i % 2], seed=i, max_new_tokens=limit) for i, limit in enumerate(limits)
    ]
    completions = engine.generate(requests, Sampling(max_new_tokens=20)).completions
    assert [len(completion.tokens) for completion in completions] == limits
    assert widths == [5, 4, 3, 2, 2]
    engine = make_engine()
    full = engine.generate([replace(r, max_new_tokens=6) for r in requests], Sampling(max_new_tokens=20)).completions
    assert [c.tokens for c in completions] == [c.tokens[:limit] for c, limit in zip(full, limits, strict=True)]


def test_a_response_longer_than_the_first_allocation_is_right(
    make_engine: Callable[..., Native], make_model: Any
) -> None:
    request = GenerationRequest(prompt=(5, 6, 7), seed=1)
    (completion,) = make_engine().generate([request], Sampling(max_new_tokens=110)).completions
    assert len(completion.tokens) == 110
    expected = recomputed(make_model("llama"), request, completion, 1.0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=5e-5, rtol=0)


def test_a_stop_id_ends_a_response_and_stays_in_it(make_engine: Callable[..., Native], requests_of: Requests) -> None:
    engine, requests = make_engine(), requests_of(4)
    free = engine.generate(requests, Sampling(max_new_tokens=12)).completions
    stop = free[0].tokens[4]
    stopped = engine.generate(requests, Sampling(max_new_tokens=12, stop_token_ids=(stop,))).completions
    for before, after in zip(free, stopped, strict=True):
        if stop in before.tokens:
            assert after.tokens == before.tokens[: before.tokens.index(stop) + 1]
            assert (after.finish_reason, after.metadata["stop"]) == ("stop", stop)
        else:
            assert (after.tokens, after.finish_reason, after.metadata) == (before.tokens, "length", {})
    assert any(completion.finish_reason == "stop" for completion in stopped)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_is_chosen_before_a_response_has_the_tokens_asked_for(
    make_engine: Callable[..., Native], requests_of: Requests, temperature: float
) -> None:
    engine = make_engine()
    free = engine.generate(requests_of(4), Sampling(max_new_tokens=30, temperature=temperature)).completions
    stops = tuple({done.tokens[0] for done in free})  # each would end a response at once
    done = engine.generate(
        requests_of(4),
        Sampling(max_new_tokens=30, min_new_tokens=3, temperature=temperature, stop_token_ids=stops),
    ).completions
    assert all(not set(found.tokens[:3]) & set(stops) for found in done)
    assert all(len(found.tokens) >= 4 or found.finish_reason == "length" for found in done)
    assert temperature == 0 or "stop" in {found.finish_reason for found in done}


def test_the_end_of_sequence_id_ends_a_response_even_if_it_pads_and_comes_first(
    make_engine: Callable[..., Native], make_spec: Callable[..., ModelSpec], requests_of: Requests
) -> None:
    requests = requests_of(4)
    first = make_engine().generate(requests, Sampling(max_new_tokens=8)).completions[5].tokens[0]
    model = make_spec("llama", eos_token_ids=(first,), pad_token_id=first)
    completions = make_engine(model=model).generate(requests, Sampling(max_new_tokens=8)).completions
    assert completions[5].tokens == [first]
    assert completions[5].metadata == {"stop": first}
    for completion in completions:
        assert first not in completion.tokens[:-1]
        assert (completion.tokens[-1] == first) == (completion.finish_reason == "stop")


def test_only_end_ids_that_somebody_stated_end_a_response(
    make_engine: Callable[..., Native], make_spec: Callable[..., ModelSpec], make_model: Any, tmp_path: Path
) -> None:
    assert make_engine(model=make_spec("llama"))._ends == ()  # not the 2 of the config class
    stated = make_spec("llama", eos_token_ids=(7, 9))
    assert make_engine(model=stated)._ends == (7, 9)
    stated.config["eos_token_id"] = 5  # type: ignore[index]
    assert make_engine(model=stated)._ends == (5, 7, 9)
    model = make_model("llama")
    model.generation_config.eos_token_id = [11, 12]
    model.config.eos_token_id = 11
    model.save_pretrained(tmp_path)
    assert make_engine(model=ModelSpec(path=str(tmp_path), eos_token_ids=(3,)))._ends == (3, 11, 12)


def test_no_tokens_left_is_an_empty_completion(
    make_engine: Callable[..., Native], prompts: list[tuple[int, ...]]
) -> None:
    requests = [
        GenerationRequest(prompt=prompts[0], seed=0, max_new_tokens=0),
        GenerationRequest(prompt=prompts[0], seed=1),
    ]
    empty, other = make_engine().generate(requests, Sampling(max_new_tokens=3)).completions
    assert (empty.tokens, empty.logprobs, empty.versions, empty.finish_reason) == ([], [], [], "length")
    assert len(other.tokens) == 3
    assert make_engine().generate([], Sampling()).completions == []


def test_a_response_ends_where_the_models_context_does(make_engine: Callable[..., Native]) -> None:
    request = GenerationRequest(prompt=(1,) * 60, seed=0)
    engine = make_engine("gpt2")
    result = engine.generate([request, replace(request, max_new_tokens=4)], Sampling(max_new_tokens=30))
    assert [(len(c.tokens), c.finish_reason) for c in result.completions] == [(4, "length")] * 2
    assert result.metrics["rollout/context_limited"].value == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [((), "empty"), ((1,) * 64, "at most 64"), ((3, 97), "token id 97"), ((-1,), "token id -1")],
)
def test_a_prompt_that_cannot_be_continued_is_refused(
    prompt: tuple[int, ...], message: str, make_engine: Callable[..., Native]
) -> None:
    with pytest.raises(UserError, match=message):
        make_engine("gpt2").generate([GenerationRequest(prompt=prompt, seed=0)], Sampling())


def test_versions_and_metrics_say_what_was_done(make_engine: Callable[..., Native], requests_of: Requests) -> None:
    engine = make_engine()
    engine.load_weights(list(engine._model.named_parameters()), 7)
    result = engine.generate(requests_of(2), Sampling(max_new_tokens=3))
    assert all(completion.versions == [7, 7, 7] for completion in result.completions)
    values = {name: metric.value for name, metric in result.metrics.items()}
    assert values["rollout/generated_tokens"] == 24
    assert values["rollout/batches"] == 1
    assert values["rollout/batch_size"] == 8
    assert values["rollout/halved_batches"] == 0
    assert values["rollout/tokens_per_second"] > 0


class Small(CPU):
    """A CPU with that many bytes free."""

    free = 0

    def memory(self, index: int = 0) -> Memory:
        return Memory(total=10**9, free=self.free, allocated=0, peak=0)


@pytest.mark.parametrize(("responses", "batches"), [(1000, 1), (20, 3), (10, 4), (4, 10), (0, 48)])
def test_the_batch_is_as_large_as_the_free_memory_allows(
    responses: int, batches: int, make_engine: Callable[..., Native], prompts: list[tuple[int, ...]]
) -> None:
    device = Small()
    engine = make_engine(device=device, min_batch=16)
    # room for so many in 80% of the free memory; fewer than min_batch may have the rest too, which is a quarter more
    device.free = responses * engine._footprint.row(0, 10) * 5 // 4 + engine._footprint.prompt(12) * 2
    requests = [GenerationRequest(prompt=prompts[0], seed=seed) for seed in range(48)]
    assert engine.generate(requests, Sampling(max_new_tokens=10)).metrics["rollout/batches"].value == batches


class Sized(Scheduler[NoOptions]):
    """A scheduler that wants so many rows at once, and remembers what it was asked."""

    size: int | None = None

    def generation_batch_size(
        self, prompt_lengths: Sequence[int], max_new_tokens: int, *, bytes_per_token: int, memory: Memory
    ) -> int | None:
        self.asked = list(prompt_lengths), max_new_tokens, bytes_per_token, memory
        return self.size


@pytest.mark.parametrize(("size", "batches"), [(None, 1), (500, 1), (20, 2), (8, 4)])
def test_the_scheduler_decides_how_many_are_generated_at_once(
    size: int | None, batches: int, make_engine: Callable[..., Native], requests_of: Requests
) -> None:
    engine, scheduler, requests = make_engine(), Sized(), requests_of(6)
    scheduler.size = size
    engine.use_scheduler(scheduler)
    result = engine.generate(requests, Sampling(max_new_tokens=5))
    assert result.metrics["rollout/batches"].value == batches
    assert tokens_of(result.completions) == tokens_of(
        make_engine().generate(requests, Sampling(max_new_tokens=5)).completions
    )
    lengths, limit, cost, memory = scheduler.asked
    assert (limit, cost, memory.total > 0) == (5, engine._footprint.cached_token, True)
    assert sum(lengths) <= sum(len(prompt) for prompt in {request.prompt for request in requests})


class Full(CPU):
    """A CPU on which an allocation for more than `room` rows fails."""

    room = 4

    def is_out_of_memory(self, error: BaseException) -> bool:
        return str(error) == "no room"

    def refuse(self, engine: Native, monkeypatch: pytest.MonkeyPatch) -> None:
        start = engine.decoder.start

        def limited(prompts: Any, counts: Any, limit: int) -> Any:
            if sum(counts) > self.room:
                raise RuntimeError("no room")
            return start(prompts, counts, limit)

        monkeypatch.setattr(engine.decoder, "start", limited)


def test_a_failed_allocation_halves_the_batch_and_goes_on(
    make_engine: Callable[..., Native], requests_of: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, requests, sampling = Full(), requests_of(6), Sampling(max_new_tokens=6)
    expected = make_engine().generate(requests, sampling)
    engine = make_engine(device=device)
    device.refuse(engine, monkeypatch)
    result = engine.generate(requests, sampling)
    assert tokens_of(result.completions) == tokens_of(expected.completions)
    assert result.metrics["rollout/halved_batches"].value == 3  # 24, 12, 6, and then batches of 3
    assert result.metrics["rollout/batches"].value == 8
    assert engine.generate(requests, sampling).metrics["rollout/halved_batches"].value == 0  # it is remembered


SHORT_OF_MEMORY = """
import resource
import torch
from rollstock import GenerationRequest, Memory, ModelSpec, Sampling
from rollstock.backends.native import Native
from rollstock.hardware.cpu import CPU

class Boasting(CPU):
    def memory(self, index=0):
        return Memory(1 << 40, 1 << 40, 0, 0)

sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
engine = Native()
engine.setup(ModelSpec(config=dict(model_type="llama", vocab_size=100_000, **sizes)), Boasting(), None)
requests = [GenerationRequest(prompt=(1, 2, 3), seed=seed) for seed in range(256)]
engine.generate(requests[:2], Sampling(max_new_tokens=2))  # whatever is only loaded once
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (200 << 20),) * 2)
result = engine.generate(requests, Sampling(max_new_tokens=2, temperature=0.9))
assert all(len(completion.tokens) == 2 for completion in result.completions)
print(len(result.completions), result.metrics["rollout/halved_batches"].value)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs a Linux process's limits")
def test_a_process_that_really_runs_out_of_memory_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHORT_OF_MEMORY],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    completions, halved = done.stdout.split()
    assert int(completions) == 256
    assert float(halved) >= 1


def test_one_row_without_room_fails_the_run_and_other_errors_are_not_swallowed(
    make_engine: Callable[..., Native], requests_of: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Full()
    device.room = 0
    engine = make_engine(device=device)
    device.refuse(engine, monkeypatch)
    with pytest.raises(RunError, match="lacks memory for one response"):
        engine.generate(requests_of(2), Sampling())

    def broken(*_: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(engine.decoder, "start", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        engine.generate(requests_of(2), Sampling())


def test_stop_strings_end_responses_across_token_boundaries(
    make_engine: Callable[..., Native], make_spec: Callable[..., ModelSpec], words: Any
) -> None:
    model = make_spec("llama", vocab_size=len(words))
    requests = [GenerationRequest(prompt=(65, 66), seed=seed) for seed in range(40)]
    engine = make_engine(model=model, tokenizer=words)
    free = engine.generate(requests, Sampling(max_new_tokens=30)).completions
    text = [words.decode(c.tokens, clean_up_tokenization_spaces=False) for c in free]
    stop = next(
        t[i : i + 2]
        for t in text
        for i in range(3, len(t) - 4)
        if t[i : i + 2].isascii() and t[i : i + 2].isprintable()
    )
    stopped = engine.generate(requests, Sampling(max_new_tokens=30, stop=("no such text", stop))).completions
    hits = 0
    for before, after in zip(free, stopped, strict=True):
        whole = [words.decode(before.tokens[:n], clean_up_tokenization_spaces=False) for n in range(1, 31)]
        ends = [n for n, t in enumerate(whole, start=1) if stop in t]
        assert after.tokens == before.tokens[: ends[0] if ends else 30]
        assert after.finish_reason == ("stop" if ends else "length")
        assert after.metadata.get("stop") == (stop if ends else None)
        hits += bool(ends)
    assert hits > 0


def test_options_that_contradict_each_other_are_refused(make_engine: Callable[..., Native]) -> None:
    with pytest.raises(UserError, match="min_batch 9 is more than max_batch 8"):
        make_engine(min_batch=9, max_batch=8)


def test_lower_precision_runs_and_stays_near(
    make_engine: Callable[..., Native], make_model: Any, requests_of: Requests
) -> None:
    requests = requests_of(2)
    engine = make_engine("llama", dtype="bfloat16")
    model = make_model("llama")
    completions = engine.generate(requests, Sampling(max_new_tokens=6)).completions
    for request, completion in zip(requests, completions, strict=True):
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), recomputed(model, request, completion, 1.0), atol=0.5, rtol=0
        )


def test_closing_lets_go_of_the_model(make_engine: Callable[..., Native]) -> None:
    engine = make_engine()
    engine.close()
    assert not hasattr(engine, "_model")
