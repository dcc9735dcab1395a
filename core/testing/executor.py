"""The conformance kit of executors: workers started, called as their markers say, and ended.

For authors of executors, who call `check_executor(MyExecutor)` in a test. What happens when a worker dies is left to
their own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rollstock.errors import RunError
from rollstock.interfaces.executor import Executor, WorkerGroup, WorkerSpec
from rollstock.interfaces.rollout import GenerationRequest
from rollstock.metrics import metric_values
from rollstock.testing.batches import make_batch
from rollstock.testing.kit import NotApplicable, Report, expect, fail, run_checks
from rollstock.testing.probe import Probe
from rollstock.testing.subject import Subject
from rollstock.testing.subject import check_options as check_plugin_options

NUM_WORKERS = 2
_END_S = 10.0  # how long processes may take to end


@dataclass(frozen=True)
class ExecutorCase:
    """The executor under test."""

    subject: Subject[Executor[Any]]

    @contextmanager
    def running(self) -> Iterator[Executor[Any]]:
        """An executor, shut down afterwards."""
        executor = self.subject.make()
        try:
            yield executor
        finally:
            executor.shutdown()

    @contextmanager
    def group(self, count: int = NUM_WORKERS) -> Iterator[WorkerGroup]:
        """A group of probes."""
        with self.running() as executor:
            yield executor.start(spec(count=count))


def spec(role: str = "probe", *, count: int = NUM_WORKERS, **kwargs: Any) -> WorkerSpec:
    """What starts probes."""
    return WorkerSpec(role=role, factory=Probe, kwargs={"label": role, **kwargs}, count=count, cpus=0.1)


def check_executor(
    executor: type[Executor[Any]] | Executor[Any] | str,
    *,
    options: Mapping[str, Any] | None = None,
    skip: Mapping[str, str] | None = None,
) -> Report:
    """Check an executor, given as a class, an instance or an installed plugin's name.

    options: of the plugin; skip: checks that do not hold on purpose, each with the reason. Raises ConformanceError.
    """
    case = ExecutorCase(Subject(Executor, executor, options))
    return run_checks(case.subject.label, CHECKS, case, skip=skip)


def check_options(case: ExecutorCase) -> None:
    """Every option has a help text, and the defaults fit their own types and bounds; making a plugin leaves its
    config alone."""
    check_plugin_options(case.subject)


def check_start(case: ExecutorCase) -> None:
    """`start` builds `count` workers with the spec's arguments, rank and world size; groups stand side by side."""
    with case.running() as executor:
        specs = [spec("one", count=1), spec("other", count=3)]
        problems = executor.validate(specs)
        expect(
            isinstance(problems, list | tuple) and not problems,
            f"`validate` says {problems!r} of workers that ask for nothing out of the ordinary",
            mend="return a list of sentences, empty when all is well",
        )
        one, other = (executor.start(each) for each in specs)
        for group, role, count in ((one, "one", 1), (other, "other", 3)):
            expect(
                group.role == role and group.size == count,
                f"a group of {count} workers of {role!r} says role {group.role!r}, size {group.size}",
                mend="give the group its role, and count its workers",
            )
            found = group.call("who", "I am ", ending="!")
            expect(
                found == {"label": f"I am {role}!", "rank": 0, "world_size": count},
                f"rank 0 says it is {found}",
                mend="build workers by `spec.factory(**spec.kwargs, rank=rank, world_size=spec.count)`; pass "
                "arguments on",
            )
            ranks = metric_values(group.call("add", 0))["rank"]
            expect(ranks == count - 1, f"the highest rank of {count} workers is {ranks}", mend="ranks count from 0")


def check_dispatch(case: ExecutorCase) -> None:
    """A call reaches the workers that its marker says, and results are gathered in the order of the whole."""
    mend = "use `split_call` and `gather` of rollstock.dispatch, with `registration(worker class, method)`"
    with case.group() as group:
        found = metric_values(group.call("add", 2))
        expect(
            found == {"count": 2.0 * NUM_WORKERS, "rank": NUM_WORKERS - 1.0},
            f"a broadcast to {NUM_WORKERS} workers gives the metrics {found}",
            mend=mend,
        )
        expect(group.call("first") == 0, "a rank-zero call was answered by another rank", mend=mend)
        requests = [GenerationRequest(prompt=(1,) * (1 + i % 3), seed=i) for i in range(7)]
        result = group.call("generate", requests, 2)
        seeds = [completion.tokens[0] for completion in result.completions]
        expect(seeds == list(range(7)), f"scattered requests come back in the order {seeds}", mend=mend)
        expect(
            {completion.tokens[1] for completion in result.completions} == set(range(NUM_WORKERS)),
            "scattered requests went to a part of the workers",
            mend=mend,
        )
        expect(metric_values(result.metrics) == {"requests": 7.0}, f"metrics are {result.metrics}", mend=mend)
        batch = make_batch(2)
        doubled = group.call("double", batch)["doubled"]
        expect(
            torch.equal(doubled, 2 * batch.flat("response")),
            "a scattered batch comes back in another order",
            mend=mend,
        )
        ranks = group.call("ranks")
        expect(ranks == list(range(NUM_WORKERS)), f"an all-gather of {NUM_WORKERS} ranks gives {ranks}", mend=mend)
    with case.group(4) as group:
        tags = group.call("tag", ["a", "b", "c", "d"])
        expect(
            tags == ["a0.0", "b1.0", "c2.2", "d3.2"],
            f"4 workers in 2 data-parallel groups answer {tags}",
            mend="give `split_call` the `data_parallel_rank` of each worker, and the worker `shares.keywords(rank)`",
        )


def check_submission(case: ExecutorCase) -> None:
    """`submit` returns a future of what `call` returns, exceptions included; so does `call` where the marker says
    `sync=False`."""
    with case.group() as group:
        futures = [group.submit("add", 1) for _ in range(3)]
        counts = sorted(metric_values(future.result(timeout=60))["count"] for future in futures)
        expect(
            counts == [NUM_WORKERS * k for k in (1, 2, 3)],
            f"three submitted calls that add 1 give the counts {counts}",
            mend="run the calls of one group one after the other",
        )
        later = group.call("later")
        expect(
            isinstance(later, Future) and later.result(timeout=60) == "later",
            f"a call of a method that is marked sync=False gives {later!r}",
            mend="return the future of `submit` where the marker says `sync=False`",
        )
        error = group.submit("fail", 0).exception(timeout=60)
        expect(
            error is not None and "told to fail" in str(error),
            f"a submitted call that fails has the exception {error!r}",
            mend="put the worker's exception into the future",
        )


def check_future_arguments(case: ExecutorCase) -> None:
    """A call may be given the future of another group's `submit`: the workers get what it holds."""
    with case.running() as executor:
        one, other = executor.start(spec("one")), executor.start(spec("other", count=1))
        found = other.call("add", one.submit("first"))
        expect(
            metric_values(found)["count"] == 0,
            f"a call with the future of 0 as its argument added {metric_values(found)['count']}",
            mend="replace each positional argument that is a future by what it holds, before the call is split",
        )


def check_errors(case: ExecutorCase) -> None:
    """What a worker raises reaches the caller with its type, and a note that names role and rank; the group goes on."""
    with case.group() as group:
        _check_error(group)
        expect(group.call("first") == 0, "after an exception the group answers no more", mend="keep the workers")
        try:
            group.call("secret")
        except RunError as error:
            expect(
                "who" in str(error),
                f"the error does not name the methods there are: {error}",
                mend="use `registration`",
            )
        else:
            fail(
                "a method without @register was called",
                mend="ask `rollstock.dispatch.registration` first, which raises RunError",
            )
    with case.running() as executor:
        try:
            executor.start(spec(refuse=True))
        except Exception as error:
            expect(
                "cannot be built" in _text(error),
                f"a worker that could not be built ends in {error!r}",
                mend="raise what the factory raised",
            )
        else:
            fail("`start` returned a group whose workers could not be built", mend="wait until all are built")


def _check_error(group: WorkerGroup) -> None:
    rank = NUM_WORKERS - 1
    try:
        group.call("fail", rank)
    except Exception as error:
        text = _text(error)
        expect(
            type(error).__name__ == "ProbeError" or "ProbeError" in text,
            f"a worker's ProbeError arrives as {error!r}",
            mend="raise the worker's own exception",
        )
        expect(
            "told to fail" in text and "probe" in text and str(rank) in text,
            f"the exception says {text!r}",
            mend="add a note: error.add_note(f'in {method!r} of {role} worker {rank}')",
        )
    else:
        fail("an exception of one rank does not reach the caller", mend="look at the results of every rank")


def _text(error: BaseException) -> str:
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def check_memory(case: ExecutorCase) -> None:
    """`shares_memory` is True exactly if workers live in this process."""
    with case.running() as executor:
        place = executor.start(spec(count=1)).call("process")
        expect(
            executor.shares_memory == (place == os.getpid()),
            f"shares_memory is {executor.shares_memory}, workers live in process {place}, this is {os.getpid()}",
            mend="say True only if the controller's tensors are the workers' tensors",
        )


def check_shutdown(case: ExecutorCase) -> None:
    """`shutdown` ends every worker's process, may be called twice, and with nothing started."""
    executor = case.subject.make()
    executor.shutdown()
    executor.start(spec("one", count=1))
    process = executor.start(spec("two")).call("process")
    executor.shutdown()
    executor.shutdown()
    if process == os.getpid():
        return
    ended = _wait(lambda: not _alive(process))
    expect(ended, f"the worker's process {process} lives on after `shutdown`", mend="end and join every process")


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True


def _wait(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + _END_S
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def check_placement(case: ExecutorCase) -> None:
    """Workers of other processes live there, each in one of its own, unless they are colocated."""
    with case.running() as executor:
        if executor.shares_memory:
            raise NotApplicable("its workers live in this process")
        groups = [executor.start(spec(role, count=1)) for role in ("one", "two")]
        found = {group.call("process") for group in groups}
        expect(
            os.getpid() not in found and len(found) == 2,
            f"two workers live in the processes {found}, this is {os.getpid()}",
            mend="start a process for each worker",
        )


CHECKS = (
    check_options,
    check_start,
    check_dispatch,
    check_submission,
    check_future_arguments,
    check_errors,
    check_memory,
    check_placement,
    check_shutdown,
)
