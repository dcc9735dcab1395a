"""Answers of plugins that would change a run without a word, or fail far from their cause, name the plugin."""

from typing import Any

import pytest

from rollstock import Executor, Memory, NoOptions, PluginError, Scheduler, WorkerGroup, WorkerLoad
from rollstock.answers import CheckedScheduler, micro_batches, num_workers, sentences, share_kept
from rollstock.backends.torch.backend import TorchBackend
from rollstock.launch import train
from rollstock.plugins.executors.local import Local, LocalGroup
from rollstock.testing import installed


def scheduler_that(answers: Any) -> Scheduler[Any]:
    class Answers(Scheduler[NoOptions]):
        def micro_batches(self, lengths: Any, *, groups: Any = None, num_parts: int = 1) -> Any:
            return answers

    return Answers()


@pytest.mark.parametrize("answers", [5, "many", [[0, 0], [1, 2]], [[0], [2]], [[0, 1, 2, 3]], [], [["a"]], [None]])
def test_cuts_that_leave_out_or_repeat_a_sequence_are_refused(answers: Any) -> None:
    with pytest.raises(PluginError, match=r"scheduler:Answers must return lists that hold each index from 0 to 2 once"):
        micro_batches(scheduler_that(answers), [7, 8, 9])


def test_cuts_come_in_any_order_and_none_is_everything_at_once() -> None:
    assert micro_batches(scheduler_that([[2, 0], (1,)]), [7, 8, 9]) == [[2, 0], [1]]
    assert micro_batches(scheduler_that(None), [7, 8, 9]) == [[0, 1, 2]]


@pytest.mark.parametrize("found", [None, "a problem", [1], 5])
def test_problems_that_are_no_list_of_sentences_are_refused(found: Any) -> None:
    with pytest.raises(PluginError, match="validate of plugin executor:Local must return a list of sentences"):
        sentences("executor", Local(), found)
    assert sentences("executor", Local(), ("a", "b")) == ["a", "b"]


class Forgetful(Local):
    def start(self, spec: Any) -> Any:
        super().start(spec)


def test_an_executor_that_starts_nothing_is_named_and_nothing_is_written(small_run: Any, tmp_path: Any) -> None:
    assert issubclass(Forgetful, Executor)
    with (
        installed("executor", "forgetful", Forgetful),
        pytest.raises(PluginError, match="start of plugin executor:forgetful must return a WorkerGroup, not None"),
    ):
        train(small_run(tmp_path / "run", executor="forgetful"))
    assert not (tmp_path / "run").exists()


def scheduler_of_sizes(answer: Any) -> Scheduler[Any]:
    class Sizes(Scheduler[NoOptions]):
        resizes = True

        def generation_batch_size(self, prompt_lengths: Any, max_new_tokens: Any, **_: Any) -> Any:
            return answer

        def num_workers(self, load: Any) -> Any:
            return answer

    return Sizes()


def both_sizes(scheduler: Scheduler[Any]) -> list[int | None]:
    memory = Memory(total=1, free=1, allocated=0, peak=0)
    load = WorkerLoad(role="rollout", num_workers=2, queue_length=5, utilisation=0.5)
    checked = CheckedScheduler(scheduler)
    return [
        checked.generation_batch_size([7], 9, bytes_per_token=1, memory=memory),
        checked.num_workers(load),
        num_workers(scheduler, load),
    ]


WRONG_SIZES = {0: "0 of type int", -3: "-3 of type int", 2.5: "2.5 of type float", "many": "'many' of type str"}


@pytest.mark.parametrize(
    ("answer", "said"), [*WRONG_SIZES.items(), ([4], "[4] of type list"), (True, "True of type bool")]
)
def test_sizes_that_are_no_whole_number_are_refused(answer: Any, said: str) -> None:
    scheduler = scheduler_of_sizes(answer)
    memory = Memory(total=1, free=1, allocated=0, peak=0)
    expected = r" of plugin scheduler:Sizes must return a whole number, at least 1, or None to leave it to others, not "
    with pytest.raises(PluginError, match="^generation_batch_size" + expected) as caught:
        CheckedScheduler(scheduler).generation_batch_size([7], 9, bytes_per_token=1, memory=memory)
    assert said in str(caught.value)
    with pytest.raises(PluginError, match="^num_workers" + expected) as caught:
        num_workers(scheduler, WorkerLoad(role="rollout", num_workers=2, queue_length=5, utilisation=0.5))
    assert said in str(caught.value)


def test_sizes_may_be_numbers_of_any_library_and_none() -> None:
    numpy = pytest.importorskip("numpy")
    assert both_sizes(scheduler_of_sizes(numpy.int64(4))) == [4, 4, 4]
    assert both_sizes(scheduler_of_sizes(None)) == [None, None, None]


def test_a_scheduler_that_an_engine_is_given_decides_all_else_as_it_is() -> None:
    class Places(Scheduler[NoOptions]):
        def micro_batches(self, lengths: Any, *, groups: Any = None, num_parts: int = 1) -> Any:
            return [list(lengths), groups, num_parts]

        def place_experts(self, load: Any, num_places: int) -> Any:
            return [load, num_places]

    checked = CheckedScheduler(Places())
    assert checked.plugin_name == "Places"
    assert checked.micro_batches([3], groups=[0], num_parts=2) == [[3], [0], 2]
    assert checked.place_experts([[1.0]], 5) == [[[1.0]], 5]


class Nobody(Scheduler[NoOptions]):
    def generation_batch_size(self, *_: Any, **__: Any) -> Any:
        return "as many as fit"


def test_a_run_whose_scheduler_gives_no_size_ends_with_its_name(small_run: Any, tmp_path: Any) -> None:
    with (
        installed("scheduler", "nobody", Nobody),
        pytest.raises(PluginError, match="generation_batch_size of plugin scheduler:nobody must return a whole number"),
    ):
        train(small_run(tmp_path / "run", scheduler="nobody"))


@pytest.mark.parametrize("found", [0, -1, 1.5, "half", None, True, float("nan")])
def test_shares_of_a_model_that_cannot_be_are_refused(found: Any) -> None:
    class Shares(TorchBackend):
        def share_kept(self, world_size: int) -> Any:
            return found

    with pytest.raises(PluginError, match="share_kept of plugin backend:Shares must return a number above 0 and at "):
        share_kept(Shares(), 4)
    assert share_kept(TorchBackend(), 4) == 1.0


class Unfinished(WorkerGroup):
    role = "actor"

    @property
    def size(self) -> int:
        return 1

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return None


class Halfway(Local):
    def start(self, spec: Any) -> Any:
        return Unfinished()


class Seven(LocalGroup):
    @property
    def size(self) -> int:
        return 7


class More(Local):
    def start(self, spec: Any) -> Any:
        group: Any = super().start(spec)
        group.__class__ = Seven
        return group


def test_an_executor_that_starts_another_number_of_workers_is_named(small_run: Any, tmp_path: Any) -> None:
    with (
        installed("executor", "more", More),
        pytest.raises(PluginError, match="start of plugin executor:more must return the 1 workers of 'actor'"),
    ):
        train(small_run(tmp_path / "run", executor="more"))


def test_an_executor_whose_workers_cannot_be_called_is_named_with_what_they_lack(small_run: Any, tmp_path: Any) -> None:
    with (
        installed("executor", "halfway", Halfway),
        pytest.raises(PluginError) as caught,
    ):
        train(small_run(tmp_path / "run", executor="halfway"))
    assert str(caught.value) == (
        "start of plugin executor:halfway must return a finished WorkerGroup, and Unfinished lacks submit: define what "
        "rollstock.WorkerGroup leaves open (size, call, submit)"
    )
    assert not (tmp_path / "run").exists()
