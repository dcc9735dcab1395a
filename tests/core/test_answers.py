"""Answers of plugins that would change a run without a word, or fail far from their cause, name the plugin."""

from typing import Any

import pytest

from rollstock import Executor, NoOptions, PluginError, Scheduler
from rollstock.answers import micro_batches, sentences
from rollstock.launch import train
from rollstock.plugins.executors.local import Local
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
