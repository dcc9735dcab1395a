"""Calls in worker processes: real ones, which hang, crash and print for real."""

import functools
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from rollstock.errors import RunError, UserError
from rollstock.sandbox import Sandbox

SERVED = Path(__file__).parent / "served"


@pytest.fixture
def served(monkeypatch):
    monkeypatch.syspath_prepend(str(SERVED))
    import served_functions

    return served_functions


@pytest.fixture
def sandbox(served):
    with Sandbox(served.build, name="reward", limit=30, num_workers=2) as sandbox:
        yield sandbox


@pytest.fixture
def impatient(served):
    with Sandbox(served.build, name="reward", limit=0.5, num_workers=2) as sandbox:
        yield sandbox


def ask(sandbox, *requests, seeds=None):
    return sandbox.map(list(requests), names=[f"sample-{i}" for i in range(len(requests))], seeds=seeds)


def test_outcomes_are_in_the_order_of_the_requests(sandbox):
    requests = [("sleep", 0.2), *[("double", i) for i in range(20)]]
    outcomes = ask(sandbox, *requests)
    assert [o.value for o in outcomes] == ["slept", *range(0, 40, 2)]
    assert {o.status for o in outcomes} == {"ok"}


def test_no_requests_start_no_call(sandbox):
    assert ask(sandbox) == []


def test_none_is_a_value_and_no_error(sandbox):
    (outcome,) = ask(sandbox, ("nothing",))
    assert (outcome.status, outcome.value, outcome.error) == ("ok", None, "")


def test_workers_are_reused(sandbox):
    first = {o.value for o in ask(sandbox, *[("process_id",)] * 8)}
    second = {o.value for o in ask(sandbox, *[("process_id",)] * 8)}
    assert first | second <= set(sandbox.pids)
    assert os.getpid() not in first


def test_an_exception_is_an_outcome_and_its_sample_is_named(sandbox, caplog):
    with caplog.at_level(logging.WARNING, "rollstock"):
        good, bad = ask(sandbox, ("double", 4), ("fail", "no such unit"))
    assert good.value == 8
    assert (bad.status, bad.value, bad.error) == ("raised", None, "ValueError: no such unit")
    assert "in fail" in bad.traceback
    assert "reward: sample-1 raised: ValueError: no such unit" in caplog.text
    assert "sample-0" not in caplog.text


def test_sys_exit_is_an_outcome(sandbox):
    before = sandbox.pids if sandbox.start() is None else []
    (outcome,) = ask(sandbox, ("leave",))
    assert outcome.error == "SystemExit: bye"
    assert sandbox.pids == before


@pytest.mark.parametrize("hang", [("sleep", 600), ("backtrack",)], ids=["sleeping", "holding the interpreter's lock"])
def test_a_hung_call_is_ended_and_the_others_go_on(impatient, caplog, hang):
    with caplog.at_level(logging.WARNING, "rollstock"):
        outcomes = ask(impatient, hang, *[("double", i) for i in range(6)], hang)
    assert [o.status for o in outcomes] == ["timed_out", *["ok"] * 6, "timed_out"]
    assert "sample-0 timed out: no answer within 0.5 s" in caplog.text
    assert "reward: timed out once more, with no answer within 0.5 s; its process was ended as told of sample-" in (
        caplog.text
    )
    assert len(impatient.pids) == 2
    assert [o.value for o in ask(impatient, ("double", 5))] == [10]


def test_a_hung_worker_is_gone_for_good(impatient, gone):
    impatient.start()
    before = impatient.pids
    ask(impatient, ("sleep", 600), ("sleep", 600))
    assert set(before).isdisjoint(impatient.pids)
    assert all(gone(pid) for pid in before)
    assert impatient.num_replaced == 2


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize(
    "action", [("hang_with_children", False), ("hang_with_children", True), ("hang_with_orphan",)], ids=str
)
def test_what_a_hung_call_started_is_ended_with_it(served, tmp_path, action, gone):
    name, *detach = action
    with Sandbox(served.build, name="reward", limit=2) as sandbox:
        (outcome,) = ask(sandbox, (name, str(tmp_path / "pid"), *detach))
    assert outcome.status == "timed_out"
    assert gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("action", "reason"),
    [(("exit_at_once", 3), "exit code 3"), (("segfault",), "signal SIGSEGV"), (("signal_self", 9), "signal SIGKILL")],
    ids=["os._exit", "segmentation fault", "kill -9"],
)
def test_a_call_that_kills_its_process_counts_as_raised(sandbox, action, reason):
    outcomes = ask(sandbox, ("double", 1), action, ("double", 2), ("double", 3), action)
    assert [o.value for o in outcomes] == [2, None, 4, 6, None]
    assert outcomes[1].status == outcomes[4].status == "raised"
    assert outcomes[1].error == f"its process died ({reason})"


def test_a_crash_leaves_its_trace_in_the_outcome(sandbox):
    (outcome,) = ask(sandbox, ("segfault",))
    assert "Segmentation fault" in outcome.output
    assert "in segfault" in outcome.output


@pytest.mark.parametrize(
    ("request_", "error"),
    [(("closure",), "pickle"), (("unreadable",), "only the worker can read this"), (("huge", 65 * 2**20), "bytes")],
    ids=["unpicklable", "not readable here", "too large"],
)
def test_a_result_that_cannot_be_handed_back_is_an_error_of_its_call(sandbox, request_, error):
    bad, good = ask(sandbox, request_, ("double", 3))
    assert bad.status == "raised"
    assert error in bad.error
    assert good.value == 6


def test_a_request_that_cannot_be_sent_is_an_error_of_its_call(sandbox):
    bad, good = ask(sandbox, ("double", lambda: 0), ("double", 3))
    assert bad.status == "raised"
    assert "cannot be sent" in bad.error
    assert good.value == 6


def test_large_requests_and_results_pass(sandbox):
    large = b"x" * (5 * 2**20)
    outcomes = ask(sandbox, *[("double", large)] * 3)
    assert all(o.value == large + large for o in outcomes)


def test_printing_belongs_to_its_sample_and_breaks_nothing(sandbox):
    outcomes = ask(sandbox, ("say", "one"), ("say", "two", "stderr"), ("say_on_descriptor", "three"), ("double", 1))
    assert [o.output for o in outcomes] == ["one", "two", "three", ""]
    assert outcomes[0].value == 3


def test_a_flood_of_output_is_cut_and_counted(sandbox):
    outcome, after = ask(sandbox, ("say", "y" * 2**20, "stdout", 8), ("double", 1))
    assert outcome.value == 2**20
    assert len(outcome.output) < 20_000
    assert outcome.output.endswith(f"({8 * 2**20 - 16 * 2**10} more bytes)")
    assert after.output == ""


def test_a_call_may_close_its_output(sandbox):
    assert [o.value for o in ask(sandbox, ("close_output",), ("double", 1), ("double", 2))] == ["closed", 2, 4]
    assert [o.value for o in ask(sandbox, ("double", 1), ("double", 2))] == [2, 4]


def test_seeds_make_results_independent_of_the_worker(served):
    seeds = list(range(12))
    drawn = []
    for num_workers in (1, 3):
        with Sandbox(served.build, name="reward", limit=30, num_workers=num_workers) as sandbox:
            drawn.append([o.value for o in ask(sandbox, *[("draw",)] * 12, seeds=seeds)])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 12


def test_a_worker_imports_no_torch(sandbox):
    (outcome,) = ask(sandbox, ("modules",))
    assert "rollstock.errors" in outcome.value
    assert "torch" not in outcome.value


def test_nor_does_one_that_serves_the_rewards_of_a_config(served):
    with Sandbox(served.build_scorer_and_list_modules, name="reward", limit=30) as sandbox:
        (outcome,) = ask(sandbox, ("modules",))
    assert "rollstock.plugins.rewards.rule" in outcome.value
    assert {"torch", "numpy", "transformers"}.isdisjoint(outcome.value)


def test_a_worker_imports_from_where_its_parent_does(sandbox):
    (outcome,) = ask(sandbox, ("import_path",))
    assert outcome.value == sys.path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_parent_decides_about_signals(sandbox, number):
    (outcome,) = ask(sandbox, ("signal_self", number))
    assert outcome.value == "still here"


def test_a_served_function_can_terminate_its_own_children(sandbox):
    (outcome,) = ask(sandbox, ("terminate_own_child",))
    assert outcome.value == -signal.SIGTERM


def test_a_factory_that_fails_says_why_before_the_run(served):
    with Sandbox(served.fail_to_build, name="reward", limit=1) as sandbox, pytest.raises(RunError) as caught:
        sandbox.start()
    assert "reward: a worker process could not be set up: RuntimeError: the verifier's tables are missing" in str(
        caught.value
    )
    assert "in fail_to_build" in str(caught.value)


def test_a_factory_that_finds_bad_input_is_the_users_error(served):
    with Sandbox(served.fail_as_user_error, name="reward", limit=1) as sandbox, pytest.raises(UserError) as caught:
        sandbox.start()
    assert str(caught.value) == "rule: 'exakt' is not a rule. Did you mean 'exact'?"


def test_a_worker_that_dies_at_its_start_is_tried_again_and_then_reported(served):
    with Sandbox(served.exit_while_building, name="reward", limit=1) as sandbox, pytest.raises(RunError) as caught:
        sandbox.start()
    assert "exit code 7" in str(caught.value)
    assert "libverifier.so: not found" in str(caught.value)
    assert sandbox.num_replaced == 3


def test_what_ended_a_worker_of_its_own_accord_is_named_at_once_and_the_users_to_mend(served):
    sandbox = Sandbox(served.exit_while_making_something, name="reward", limit=1)
    with sandbox, pytest.raises(UserError) as caught:
        sandbox.start()
    assert str(caught.value) == (
        "reward: reward 'mine' (file: judge.py) ended its process (exit code 7) while it was made; code that is "
        "imported must not exit:\nlibverifier.so: not found"
    )
    assert sandbox.num_replaced == 1


def test_what_was_made_when_a_worker_crashed_is_named(served, caplog):
    sandbox = Sandbox(served.crash_while_making_something, name="reward", limit=1)
    with sandbox, pytest.raises(RunError, match=r"signal SIGKILL\) while reward 'mine' \(file: judge.py\) was made"):
        sandbox.start()
    assert caplog.text.count("; trying again") == 2


def test_what_found_bad_input_is_named(served):
    with Sandbox(served.refuse_something, name="reward", limit=1) as sandbox, pytest.raises(UserError) as caught:
        sandbox.start()
    assert caught.value.__notes__ == ["while reward 'mine' (file: judge.py) was made"]


def test_a_worker_that_never_gets_ready_is_reported(served):
    sandbox = Sandbox(served.hang_while_building, name="reward", limit=1, start_limit=0.3)
    with sandbox, pytest.raises(RunError, match=r"not ready after 0\.3 s"):
        sandbox.start()


def test_a_factory_that_cannot_travel_is_refused_at_once():
    with pytest.raises(UserError, match="cannot be sent to a worker"):
        Sandbox(lambda: print, name="reward", limit=1)


def test_a_factory_takes_arguments_as_a_partial(served):
    with Sandbox(functools.partial(functools.partial, served.double), name="reward", limit=30) as sandbox:
        assert [o.value for o in sandbox.map([4], names=["a"])] == [8]


@pytest.mark.parametrize("arguments", [{"limit": 0}, {"limit": 1, "num_workers": 0}])
def test_impossible_settings_are_refused(served, arguments):
    with pytest.raises(ValueError, match="positive limit"):
        Sandbox(served.build, name="reward", **arguments)


def test_a_failure_that_repeats_is_told_whole_once_and_counted_in_each_round_after(sandbox, caplog):
    def ask_again(when, *requests):
        names = [f"task '{i}'" for i in range(len(requests))]
        with caplog.at_level(logging.WARNING, "rollstock"):
            sandbox.map(requests, names=names, of=["reward 'mine'"] * len(requests), when=when)
        told, caplog.records[:] = [record.getMessage() for record in caplog.records], []
        return told

    failing = [("fail", f"bad response {i}") for i in range(6)]
    whole, line = ask_again("step 1", *failing)
    assert whole.startswith("reward: reward 'mine' of task '")
    assert "(step 1) raised: ValueError: bad response" in whole
    assert "in fail" in whole
    first = whole.removeprefix("reward: reward 'mine' of ").partition(" raised")[0]
    assert line.startswith(
        f"reward: reward 'mine' raised 5 more times (step 1), with ValueError as told of {first}: task "
    )
    assert line.endswith(" and 2 more")
    assert ask_again("step 2", ("fail", "x"), ("double", 1)) == [
        f"reward: reward 'mine' raised once more (step 2), with ValueError as told of {first}: task '0'"
    ]
    assert ask_again("step 3", ("double", 1)) == []
    (other,) = ask_again("step 3", ("leave",))
    assert "SystemExit: bye\nTraceback" in other


def test_each_request_needs_a_name(sandbox):
    with pytest.raises(ValueError, match="as many names"):
        sandbox.map([("double", 1)], names=[])


def test_closing_ends_the_workers_and_a_later_call_starts_new_ones(sandbox, gone):
    sandbox.start()
    before = sandbox.pids
    sandbox.close()
    assert sandbox.pids == []
    assert all(gone(pid) for pid in before)
    assert [o.value for o in ask(sandbox, ("double", 1))] == [2]


def test_an_idle_worker_that_was_killed_is_replaced(sandbox, caplog):
    sandbox.start()
    os.kill(sandbox.pids[0], signal.SIGKILL)
    os.kill(sandbox.pids[1], signal.SIGKILL)
    time.sleep(0.3)
    assert [o.value for o in ask(sandbox, *[("double", i) for i in range(4)])] == [0, 2, 4, 6]
    assert "an idle worker process died (signal SIGKILL) and was replaced" in caplog.text


def test_an_interrupted_round_leaves_no_answer_to_the_next(served):
    def interrupt(_number, _frame):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Sandbox(served.build, name="reward", limit=30) as sandbox:
            sandbox.start()
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                ask(sandbox, ("sleep", 1))
            assert [o.value for o in ask(sandbox, ("double", 8))] == [16]
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_threads_take_turns(sandbox):
    results = {}

    def work(base):
        results[base] = [o.value for o in ask(sandbox, *[("double", base + i) for i in range(10)])]

    threads = [threading.Thread(target=work, args=(base,)) for base in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {base: [2 * (base + i) for i in range(10)] for base in (0, 100, 200)}
