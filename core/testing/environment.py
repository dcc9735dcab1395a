"""The conformance kit of environments: tasks that repeat, splits that do not meet, scores that are numbers.

For authors of environments, who call `check_environment(MyEnvironment)` in a test. Whether the tasks teach anything
is left to them.
"""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollstock.interfaces.environment import Environment, Message, Sample, Split, Task
from rollstock.testing.kit import NotApplicable, Report, expect, fail, run_checks
from rollstock.testing.subject import Subject, check_json
from rollstock.testing.subject import check_options as check_plugin_options

SPLITS: tuple[Split, ...] = ("train", "heldout")
MAX_TURNS = 8


@dataclass(frozen=True)
class EnvironmentCase:
    """The environment under test, how many tasks of each split are looked at, and responses to try on them."""

    subject: Subject[Environment[Any]]
    seed: int
    num_tasks: int
    responses: Sequence[str]

    def make(self, seed: int | None = None) -> Environment[Any]:
        """An environment, set up."""
        environment = self.subject.make()
        environment.setup(self.seed if seed is None else seed)
        return environment

    def tasks(self, environment: Environment[Any], split: Split) -> list[Task]:
        """The first tasks of a split."""
        size = environment.num_tasks(split)
        count = self.num_tasks if size is None else min(size, self.num_tasks)
        return [environment.task(split, index) for index in range(count)]

    def samples(self, environment: Environment[Any]) -> list[Sample]:
        """The training tasks with every kind of response: their own answers, and junk."""
        tasks = self.tasks(environment, "train")
        return [make_sample(task, text) for task in tasks for text in [own_answer(task), *self.responses]]


JUNK = ("", "I do not know.", "42", "9" * 400, "\n\t \u00e9\u4f60\U0001f642", '{"answer": null}', "a" * 5000)


def make_sample(
    task: Task, response: str, turns: Sequence[Message] = (), state: dict[str, Any] | None = None
) -> Sample:
    """A finished trajectory with this response, as rewards see it."""
    return Sample(
        task=task,
        response=response,
        turns=list(turns),
        num_tokens=max(1, len(response) // 4),
        finish_reason="stop",
        state={} if state is None else state,
    )


def own_answer(task: Task) -> str:
    """The answer of a task as a response; empty where it has none."""
    return "" if task.answer is None else str(task.answer)


def check_environment(
    environment: type[Environment[Any]] | Environment[Any] | str,
    *,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    num_tasks: int = 24,
    responses: Sequence[str] = JUNK,
    skip: Mapping[str, str] | None = None,
) -> Report:
    """Check an environment, given as a class, an instance or an installed plugin's name.

    options: of the plugin; num_tasks: how many of each split are looked at; responses: tried on each task, besides
    its own answer; skip: checks that do not hold on purpose, each with the reason. Raises ConformanceError.
    """
    case = EnvironmentCase(Subject(Environment, environment, options), seed, num_tasks, responses)
    return run_checks(case.subject.label, CHECKS, case, skip=skip)


def check_options(case: EnvironmentCase) -> None:
    """Every option has a help text, and the defaults fit their own types and bounds; making a plugin leaves its
    config alone."""
    check_plugin_options(case.subject)


def check_sizes(case: EnvironmentCase) -> None:
    """Each split has a number of tasks that does not change, or no end (None); training has at least one."""
    environment = case.make()
    for split in SPLITS:
        size = environment.num_tasks(split)
        is_size = size is None or (isinstance(size, int) and not isinstance(size, bool) and size >= 0)
        expect(is_size, f"num_tasks({split!r}) is {size!r}", mend="return a count, or None where there is no end")
        expect(
            size == environment.num_tasks(split) == case.make().num_tasks(split),
            f"num_tasks({split!r}) changes from call to call",
            mend="count in `setup`, once",
        )
    expect(
        environment.num_tasks("train") != 0, "there are no training tasks", mend="pass the kit options that give some"
    )


def check_tasks(case: EnvironmentCase) -> None:
    """A task is plain data, with an id of its own, a prompt (chat messages, a text, or token ids), and responses, if it
    has any, that are texts."""
    environment = case.make()
    for split in SPLITS:
        tasks = case.tasks(environment, split)
        for index, task in enumerate(tasks):
            expect(
                isinstance(task, Task),
                f"task({split!r}, {index}) is {type(task).__name__}",
                mend="return a rollstock.Task",
            )
            expect(
                isinstance(task.id, str) and task.id, f"a task has the id {task.id!r}", mend="ids are texts, not empty"
            )
            _check_prompt(task)
            expect(
                isinstance(task.responses, list) and all(isinstance(text, str) for text in task.responses),
                f"the responses of task {task.id!r} are {task.responses!r}",
                mend="`Task.responses` is a list of texts, the best first",
            )
            check_json(task.answer, f"the answer of task {task.id!r}, which goes into the run's files,")
            expect(
                pickle.loads(pickle.dumps(task)) == task,
                f"task {task.id!r} does not survive the trip to another process",
                mend="answers and metadata are plain data",
            )
        ids = [task.id for task in tasks]
        twice = next((one for one in ids if ids.count(one) > 1), None)
        expect(twice is None, f"two tasks have the id {twice!r}", mend="an id names one task of the whole environment")


def _check_prompt(task: Task) -> None:
    prompt: object = task.prompt
    mend = "a prompt is a text, a list of token ids, or a list of messages {'role': ..., 'content': ...}; never empty"
    if isinstance(prompt, str):
        expect(prompt, f"the prompt of task {task.id!r} is empty", mend=mend)
        return
    is_list = isinstance(prompt, list) and bool(prompt)
    expect(is_list, f"the prompt of task {task.id!r} is {prompt!r:.100}", mend=mend)
    assert isinstance(prompt, list)
    if all(isinstance(item, int) for item in prompt):
        return
    for message in prompt:
        is_message = isinstance(message, dict) and {"role", "content"} <= message.keys()
        expect(
            is_message and all(isinstance(value, str) for value in message.values()),
            f"the prompt of task {task.id!r} has the message {message!r:.100}",
            mend=mend,
        )


def check_purity(case: EnvironmentCase) -> None:
    """`task` is a function of options, seed, split and index: not of earlier calls, processes or global generators."""
    random.seed(1)
    first = {split: case.tasks(case.make(), split) for split in SPLITS}
    random.seed(2)
    other = case.make()
    mend = "draw a task from `random.Random(rollstock.derive_seed(seed, split, index))`, and keep no generator "
    "between calls"
    for split in reversed(SPLITS):
        for index in reversed(range(len(first[split]))):
            task = other.task(split, index)
            if task != first[split][index]:
                fail(
                    f"task({split!r}, {index}) is {task.prompt!r:.80} in a second instance, asked in another order, "
                    "and "
                    f"{first[split][index].prompt!r:.80} in the first",
                    mend=mend,
                )


def check_splits(case: EnvironmentCase) -> None:
    """No task of one split appears in the other, neither by its id nor by its prompt."""
    environment = case.make()
    train, heldout = (case.tasks(environment, split) for split in SPLITS)
    if not heldout:
        raise NotApplicable("there are no held-out tasks")
    prompts = {json.dumps(task.prompt, sort_keys=True): task.id for task in train}
    ids = {task.id for task in train}
    mend = "decide the split of a task by what it asks (a hash of it), before anything is drawn"
    for task in heldout:
        expect(task.id not in ids, f"the id {task.id!r} is in both splits", mend=mend)
        twin = prompts.get(json.dumps(task.prompt, sort_keys=True))
        expect(twin is None, f"held-out task {task.id!r} asks what training task {twin!r} asks", mend=mend)


def check_conversation(case: EnvironmentCase) -> None:
    """`respond` gives a text, or None at the end of the episode; its state is JSON, and all that it remembers."""
    environment, other = case.make(), case.make()
    for task in case.tasks(environment, "train")[:4]:
        for text in [own_answer(task), *case.responses[:3]]:
            turns: list[Message] = []
            state: dict[str, Any] = {}
            for _ in range(MAX_TURNS):
                turns.append({"role": "assistant", "content": text})
                before = copy.deepcopy((turns, state))
                reply = environment.respond(task, turns, state)
                expect(
                    turns == before[0], "`respond` changes `turns`", mend="what an episode remembers belongs in `state`"
                )
                check_json(state, "the state of an episode")
                again = other.respond(task, *before)
                expect(
                    again == reply and before[1] == state,
                    f"the same turns and state get {reply!r:.80}, and {again!r:.80} from another instance",
                    mend="keep what an episode remembers in `state` alone; draw random numbers from its seed",
                )
                if reply is None:
                    break
                expect(
                    isinstance(reply, str) and reply,
                    f"`respond` gives {reply!r:.80}",
                    mend="return a text, or None at the end",
                )
                turns.append({"role": "user", "content": reply})


def check_scores(case: EnvironmentCase) -> None:
    """A score is a finite number or None, the same each time, whatever the response; scoring changes nothing."""
    environment = case.make()
    other = case.make()
    random.seed(3)
    samples = case.samples(environment)
    scores = [score_of(environment.score, sample) for sample in samples]
    random.seed(4)
    for sample, score in reversed(list(zip(samples, scores, strict=True))):
        again = score_of(other.score, sample)
        expect(
            again == score,
            f"the response {sample.response!r:.60} to task {sample.task.id!r} scores {score}, and {again} the second "
            "time",
            mend="a score is a function of the sample",
        )
    for task in case.tasks(environment, "train"):
        right, empty = (score_of(environment.score, make_sample(task, text)) for text in (own_answer(task), ""))
        if task.answer is not None and right is not None and empty is not None:
            expect(
                right >= empty,
                f"the own answer of task {task.id!r} scores {right}, less than nothing at all ({empty})",
                mend="`answer` is what a score compares with; leave it None where no single answer is right",
            )


def score_of(score: Any, sample: Sample) -> float | None:
    """Score a sample, checking the result; ConformanceError for what is neither a finite number nor None."""
    before = copy.deepcopy(sample)
    value = score(sample)
    expect(sample == before, "scoring changes the sample", mend="work on copies of `sample.state` and `sample.turns`")
    if value is None:
        return None
    is_number = isinstance(value, int | float) or hasattr(value, "__float__")
    expect(
        is_number and float(value) == float(value) and abs(float(value)) != float("inf"),
        f"the response {sample.response!r:.60} scores {value!r}",
        mend="return a finite number, or None to abstain",
    )
    return float(value)


def check_fingerprint(case: EnvironmentCase) -> None:
    """`fingerprint` is a text, the same for the same data."""
    prints = [case.make().fingerprint() for _ in range(2)]
    expect(
        all(isinstance(found, str) for found in prints) and prints[0] == prints[1],
        f"the fingerprints of two instances are {prints}",
        mend="return a checksum of the data, or its version; never a time or an address",
    )


CHECKS = (
    check_options,
    check_sizes,
    check_tasks,
    check_purity,
    check_splits,
    check_conversation,
    check_scores,
    check_fingerprint,
)
