"""Generation ahead of training: what is taken and when, how old it may be, and that nothing is lost on the way."""

import dataclasses
import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollstock import RunError
from rollstock.pipeline.ahead import _matched
from rollstock.pipeline.synchronous import Kept

MODES = st.one_of(
    st.tuples(st.just("double_buffer"), st.just(1), st.none()),
    st.tuples(st.just("async"), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 5))),
)


def responses(batch):
    return [batch.response(i).tolist() for i in range(len(batch))]


def flight(toy):
    return [each.position for each in toy.pipeline._rounds]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mode=MODES, steps=st.integers(1, 6), prompts=st.integers(1, 3))
def test_every_step_gets_its_own_tasks_and_responses_within_the_bound(toy, mode, steps, prompts):
    name, staleness, partial = mode
    options = {"max_staleness": staleness, "partial_tokens": partial} if name == "async" else {}
    ahead = toy(name, steps=steps, prompts=prompts, pause=0.002, **options)
    plain = toy("sync", steps=steps, prompts=prompts)
    for step in range(steps):
        mine, expected = ahead.step(), plain.step()
        assert mine.task_ids == expected.task_ids == [str(step * prompts + i // 2) for i in range(2 * prompts)]
        assert responses(mine) == responses(expected)  # whatever the parts in which they were asked for
        assert mine.scores.tolist() == expected.scores.tolist()
        versions = mine.versions[mine.mask]
        assert 0 <= step + 1 - int(versions.min()) <= staleness
        for row, mask in zip(mine.versions, mine.mask, strict=True):
            assert torch.equal(row[mask], row[mask].sort().values)  # weights only get newer
    assert ahead.run.position == steps * prompts  # no task is begun that no step will need
    assert flight(ahead) == []


def test_a_double_buffer_is_one_update_behind_and_plays_each_round_with_one_policy(toy):
    ahead = toy("double_buffer", steps=4, pause=0.002)
    for _ in range(4):
        ahead.step()
    assert [age["pipeline/staleness_max"].value for age in ahead.run.ages] == [0, 1, 1, 1]
    assert [age["pipeline/staleness_mean"].value for age in ahead.run.ages] == [0, 1, 1, 1]
    assert all(age["pipeline/mixed_versions"].value == 0 for age in ahead.run.ages)
    assert [len(call) for call in ahead.engine.calls] == [4, 4, 4, 4]  # never two rounds in a request


def test_what_is_in_flight_is_counted_with_the_time_that_somebody_waited(toy):
    ahead = toy("async", max_staleness=2, steps=4, pause=0.001)
    for _ in range(4):
        ahead.step()
    found = [measured["pipeline/num_in_flight"].value for measured in ahead.run.measured]
    assert found == [8, 8, 4, 0]
    for name in ("trainer_wait_s", "generator_wait_s", "generation_s", "scoring_s"):
        values = [measured[f"perf/{name}"].value for measured in ahead.run.measured]
        assert all(value >= 0 for value in values)
        assert name == "generator_wait_s" or sum(values) > 0


def test_new_weights_come_between_two_parts_of_a_response(toy):
    """The engine hears of the second version while the responses of the second step are half said."""
    ahead = toy("async", steps=3, partial_tokens=1, samples=4)
    gate = threading.Semaphore(0)
    plain = ahead.engine.call

    def gated(method, *args):
        gate.acquire()
        return plain(method, *args)

    ahead.engine.call = gated
    for _ in range(40):
        gate.release()
    first = ahead.step()  # 12 requests at most for the first two rounds together, and then some
    for _ in range(40):
        gate.release()
    second, third = ahead.step(), ahead.step()
    assert set(first.versions[first.mask].tolist()) == {1}
    assert set(second.versions[second.mask].tolist()) <= {1, 2}
    assert set(third.versions[third.mask].tolist()) <= {2, 3}


def test_a_response_that_two_policies_made_says_so(toy):
    ahead = toy("async", steps=2, prompts=1, samples=4, partial_tokens=1)
    plain, swapped = ahead.engine.call, []

    def call(method, *args):
        result = plain(method, *args)
        if len(ahead.engine.calls) == 2 and not swapped:  # as `sync` between two requests
            swapped.append(True)
            ahead.run.version = ahead.engine.version = 2
        return result

    ahead.engine.call = call
    batch = ahead.step()
    (age,) = ahead.run.ages
    longer = (batch.lengths > 2).double().mean()
    assert age["pipeline/mixed_versions"].value == pytest.approx(float(longer))
    assert (age["pipeline/staleness_max"].value, batch.versions[:, 0].tolist()) == (1, [1] * 4)
    assert longer > 0


def test_an_engine_that_reports_older_weights_than_it_was_given_is_found_out(toy):
    ahead = toy("double_buffer", steps=3)
    ahead.step()
    ahead.run.version = 5
    with pytest.raises(RunError, match="token of version 1 is to be trained on with version 5.*rollout engine report"):
        ahead.step()


@pytest.mark.parametrize("mode", ["double_buffer", "async"])
def test_nobody_generates_while_a_run_is_put_back(toy, mode):
    ahead = toy(mode, steps=2)
    with ahead.pipeline.pausing():
        ahead.pipeline.next_tasks(ahead.run)  # starts the generator's thread
        while not ahead.run.roles["rollout"].turns._waiting:
            time.sleep(0.001)
        assert ahead.engine.calls == []
    assert ahead.step().task_ids == ["0", "0", "1", "1"]


@pytest.mark.parametrize("mode", ["double_buffer", "async"])
def test_an_error_of_the_generator_is_raised_by_the_step_that_waits_for_it(toy, mode):
    ahead = toy(mode, steps=4)
    ahead.engine.fails_at = 0
    with pytest.raises(ValueError, match="the engine broke") as caught:
        ahead.step()
    assert "in the generator's thread, ahead of the step that will need it" in caught.value.__notes__


def test_an_error_of_the_scorer_is_raised_too(toy):
    ahead = toy("async", steps=4)

    def broken(*_args):
        raise ValueError("the judge broke")

    ahead.judge.call = broken
    with pytest.raises(ValueError, match="the judge broke") as caught:
        ahead.step()
    assert "in the scorer's thread" in caught.value.__notes__[0]


def test_after_a_failure_the_run_may_go_on_from_the_last_finished_step(toy):
    ahead, plain = toy("double_buffer", steps=4), toy("sync", steps=4)
    assert responses(ahead.step()) == responses(plain.step())
    ahead.engine.fails_at = len(ahead.engine.calls)
    with pytest.raises(ValueError, match="the engine broke"):
        ahead.step()  # its batch was there already, and the next one has to be before the weights change
    ahead.engine.fails_at = -1
    ahead.run.position = ahead.run.progress.position
    ahead.pipeline.begin(ahead.run)
    for _ in range(3):
        assert responses(ahead.step()) == responses(plain.step())


def test_a_stage_that_is_answered_by_somebody_else_is_refused(toy):
    ahead = toy("async", steps=4)
    ahead.pipeline.next_tasks(ahead.run)
    with pytest.raises(RunError, match=r"an extension answered the generate stage itself.*pipeline.mode: sync"):
        ahead.pipeline.check_played()


def test_other_tasks_than_those_that_are_ahead_cannot_be_played(toy):
    ahead = toy("async", steps=4)
    tasks = ahead.pipeline.next_tasks(ahead.run)
    with pytest.raises(RunError, match="other tasks"):
        ahead.pipeline.play(ahead.run, list(tasks))


def test_samples_that_were_changed_after_they_were_scored_are_scored_anew(toy):
    ahead = toy("double_buffer", steps=2)
    tasks = ahead.pipeline.next_tasks(ahead.run)
    episodes, _ = ahead.pipeline.play(ahead.run, tasks)
    ahead.pipeline._wait(lambda: all(each.scores is not None for each in ahead.pipeline._rounds))
    samples = [episode.sample() for episode in episodes]
    longer = dataclasses.replace(samples[1], response="x" * 40)
    samples[2].state["seen"] = True
    scores = ahead.pipeline.score(ahead.run, [samples[3], longer, samples[2], samples[0]])
    assert scores.totals == [len(samples[3].response), 40, len(samples[2].response), len(samples[0].response)]
    assert [part["length"] for part in scores.parts] == scores.totals
    assert ahead.judge.scored[-1] == [longer, samples[2]]
    assert len(scores.totals) == 4


def test_equal_samples_get_a_score_each():
    class Of:
        def __init__(self, task, response):
            self.task, self.response = type("T", (), {"id": task})(), response

        def __eq__(self, other):
            return (self.task.id, self.response) == (other.task.id, other.response)

    scored = [Of("1", "a"), Of("1", "a"), Of("2", "a")]
    assert _matched([Of("2", "a"), Of("1", "a"), Of("1", "b"), Of("1", "a")], scored) == [2, 0, None, 1]
    assert _matched([Of("1", "a")] * 3, scored) == [0, 1, None]


def resumed(toy, old, mode, **options):
    """Another run with the state of the first, as a checkpoint would carry it."""
    import json

    kept = old.pipeline.state(old.run)
    new = toy(mode, steps=old.run.config.train.steps, **options)
    new.run.progress.step, new.run.version = old.run.progress.step, old.run.version
    new.engine.version = old.run.version
    new.run.progress.position = old.run.progress.position
    new.pipeline.load_state(new.run, Kept(json.loads(json.dumps(kept.values)), kept.tensors))
    new.run.position = new.run.progress.position
    new.pipeline.begin(new.run)
    return new


@pytest.mark.parametrize("taken", [False, True], ids=["between steps", "within a step"])
def test_a_double_buffer_comes_back_with_what_was_generated(toy, taken):
    old, plain = toy("double_buffer", steps=4), toy("sync", steps=4)
    for _ in range(2):
        old.step()
        plain.step()
    old.pipeline.wait_until_generated()
    if taken:  # a signal ends the third step before it is done
        old.pipeline.play(old.run, old.pipeline.next_tasks(old.run))
        old.pipeline.wait_until_generated()
    new = resumed(toy, old, "double_buffer")
    third = new.step()
    assert responses(third) == responses(plain.step())
    assert set(third.versions[third.mask].tolist()) == {2}  # as it would have been
    assert responses(new.step()) == responses(plain.step())
    assert flight(new) == []


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(partial=st.integers(1, 4), staleness=st.integers(1, 3), taken=st.booleans())
def test_an_asynchronous_run_comes_back_with_finished_and_unfinished_responses(toy, partial, staleness, taken):
    options = {"max_staleness": staleness, "partial_tokens": partial}
    old, plain = toy("async", steps=4, pause=0.001, **options), toy("sync", steps=4)
    old.step()
    plain.step()
    if taken:
        old.pipeline.play(old.run, old.pipeline.next_tasks(old.run))
    begun = [(e.seed, list(e.tokens)) for each in old.pipeline._rounds for e in each.play.episodes]
    new = resumed(toy, old, "async", **options)
    back = {e.seed: e.tokens for each in new.pipeline._rounds for e in each.play.episodes}
    for seed, tokens in begun:  # the old one may have gone on a little before it was stopped
        assert back[seed][: len(tokens)] == tokens
    for _ in range(3):
        assert responses(new.step()) == responses(plain.step())
    assert new.run.position == 8


def test_scores_that_were_given_are_not_asked_for_again(toy):
    old = toy("async", steps=4)
    old.step()
    old.pipeline._wait(lambda: all(each.scores is not None for each in old.pipeline._rounds))
    new = resumed(toy, old, "async")
    new.pipeline.play(new.run, new.pipeline.next_tasks(new.run))
    assert not any(sample.task.id in ("2", "3") for call in new.judge.scored for sample in call)


def test_another_mode_plays_what_was_ahead_again(toy, caplog):
    old = toy("double_buffer", steps=4)
    old.step()
    old.pipeline.wait_until_generated()
    new = resumed(toy, old, "sync")
    assert new.step().task_ids == ["2", "2", "3", "3"]
    assert "1 batches that were generated ahead are generated again" in caplog.text


def test_of_threads_that_nobody_waits_for_those_at_work_are_interrupted(toy):
    ahead = toy("async", steps=4)
    working = threading.Event()
    ended = {}

    def endless(method, *_args):
        working.set()
        while True:
            pass

    def noting(name, target):
        def run():
            try:
                target()
            except BaseException as error:
                ended[name] = type(error).__name__
                raise
            ended[name] = "in order"

        return run

    pipeline = ahead.pipeline
    ahead.engine.call = endless
    pipeline._play_rounds = noting("generator", pipeline._play_rounds)
    pipeline._score_rounds = noting("scorer", pipeline._score_rounds)
    pipeline.next_tasks(ahead.run)
    assert working.wait(60)
    pipeline.abandon()
    pipeline.close()
    assert not any(thread.is_alive() for thread in pipeline._threads.values())
    assert ended == {"generator": "_AbandonedError", "scorer": "in order"}
