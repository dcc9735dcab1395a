"""The reward normaliser: running statistics by hand, what is left alone, and a run that is resumed."""

import json
import statistics
from types import SimpleNamespace

import pytest

from rollstock import ConfigError, RunError
from rollstock.launch import resume
from rollstock.manager import make_manager
from rollstock.plugins.extensions.reward_normaliser import RewardNormaliser, RunningMoments


def normalise(stages, run, options, *batches):
    call = stages(run, {"name": "reward_normaliser", **options})
    for batch in batches:
        call("score", batch)
    return batches[-1]


def test_scores_are_centred_and_scaled_by_all_that_were_seen(stages, stand_in, scored_batch):
    run = stand_in()
    first, second = scored_batch([1.0, 3.0]), scored_batch([2.0, 6.0])
    normalise(stages, run, {}, first, second)
    assert first.scores.tolist() == [-1.0, 1.0]  # mean 2, deviation 1
    seen = [1.0, 3.0, 2.0, 6.0]
    mean, std = statistics.mean(seen), statistics.pstdev(seen)
    assert second.scores.tolist() == pytest.approx([(2 - mean) / std, (6 - mean) / std])
    assert second.raw_scores.tolist() == [2.0, 6.0]
    assert run.value("reward/running_mean") == pytest.approx(mean)
    assert run.value("reward/running_std") == pytest.approx(std)


def test_raw_scores_are_metrics(stages, stand_in, scored_batch):
    run = stand_in()
    normalise(stages, run, {}, scored_batch([1.0, 5.0, None]))
    names = ["reward/raw_mean", "reward/raw_std", "reward/raw_max", "reward/raw_min"]
    assert [run.value(name) for name in names] == [3.0, 2.0, 5.0, 1.0]
    assert run.recorded["reward/raw_mean"].weight == 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"centre": False}, [1.0, 3.0]),
        ({"scale": False}, [-2.0, 2.0]),
        ({"clip": 0.25}, [-0.25, 0.25]),
        ({"centre": False, "clip": 1.5}, [1.0, 1.5]),
    ],
)
def test_centring_scaling_and_clipping_alone(stages, stand_in, scored_batch, options, expected):
    assert normalise(stages, stand_in(), options, scored_batch([2.0, 6.0])).scores.tolist() == expected  # std 2


@pytest.mark.parametrize(("options", "expected"), [({}, 0.0), ({"centre": False}, 0.1)])
def test_equal_scores_divide_by_nothing(stages, stand_in, scored_batch, options, expected):
    batch = normalise(stages, stand_in(), options, scored_batch([0.1, 0.1, 0.1]))
    assert batch.scores.tolist() == pytest.approx([expected] * 3)


def test_what_nobody_scored_counts_nowhere(stages, stand_in, scored_batch):
    batch = normalise(stages, stand_in(), {}, scored_batch([1.0, None, 3.0]))
    assert batch.scores.tolist() == [-1.0, 0.0, 1.0]
    assert batch.scored.tolist() == [True, False, True]
    run = stand_in()
    normalise(stages, run, {}, scored_batch([None, None]))
    assert run.recorded == {}


def test_statistics_of_their_own_for_each_kind_of_task(stages, stand_in, scored_batch):
    run = stand_in()
    kinds = [{"level": level} for level in ("easy", "hard", "easy", "hard")]
    batch = normalise(stages, run, {"per": "level"}, scored_batch([1.0, 10.0, 3.0, 30.0], metadata=kinds))
    assert batch.scores.tolist() == [-1.0, -1.0, 1.0, 1.0]
    assert run.value("reward/running_mean/hard") == 20.0


def test_a_task_without_the_key_is_named(stages, stand_in, scored_batch):
    batch = scored_batch([1.0], metadata=[{"source": "book"}])
    with pytest.raises(RunError, match="per: the metadata of task 'task-0' has no 'level'; it has: source"):
        normalise(stages, stand_in(), {"per": "level"}, batch)


def test_decay_lets_earlier_batches_count_less():
    moments = RunningMoments()
    moments.add([0.0, 0.0], decay=0.5)
    moments.add([3.0], decay=0.5)  # the two zeros count for one number
    assert (moments.count, moments.mean, moments.std) == (2.0, 1.5, 1.5)
    moments.add([7.0, 9.0], decay=0.0)  # nothing but the batch itself
    assert (moments.count, moments.mean, moments.std) == (2.0, 8.0, 1.0)


def test_a_large_common_offset_costs_no_digits():
    moments = RunningMoments()
    for values in ([1e9 + 1], [1e9 + 2, 1e9 + 3]):
        moments.add(values, decay=1.0)
    assert moments.std == pytest.approx(statistics.pstdev([1, 2, 3]), rel=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"centre": False, "scale": False}, "nothing to normalise"), ({"clip": 0}, "must be above 0")],
)
def test_options_that_do_nothing_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make_manager().create("extension", {"name": "reward_normaliser", **options})


def test_an_offline_algorithm_is_refused():
    assert RewardNormaliser().validate(None, SimpleNamespace(offline=True)) == [
        "nobody scores under an offline algorithm: leave it out"
    ]


def test_a_resumed_run_goes_on_with_the_same_statistics(steps_of_run, tmp_path):
    sections = {"extensions": [{"name": "reward_normaliser", "decay": 0.9}]}
    overrides = ["train.steps=3", "checkpoint.every_steps=1"]
    whole = steps_of_run("whole", *overrides, **sections)
    steps_of_run("other", *overrides, **sections)
    resume(tmp_path / "other", step=1)
    rows = [json.loads(line) for line in (tmp_path / "other" / "metrics.jsonl").read_text().splitlines()]
    again = [row["metrics"] for row in rows if "metrics" in row]
    for name in ("reward/running_mean", "reward/running_std", "reward/mean", "actor/pg_loss"):
        assert [metrics[name] for metrics in again] == [metrics[name] for metrics in whole]


@pytest.mark.parametrize("order", [["reward_normaliser", "overlong"], ["overlong", "reward_normaliser"]])
def test_extensions_compose_in_the_order_of_the_config(stages, stand_in, scored_batch, order):
    # The first is outermost, so it sees the scores last. Every response has one token, of a limit of one: penalty 4.
    sections = {
        "reward_normaliser": {"name": "reward_normaliser", "centre": False},
        "overlong": {"name": "overlong_penalty", "limit": 1, "buffer": 1, "scale": 4.0},
    }
    run, batch = stand_in(), scored_batch([2.0, 6.0])
    stages(run, *(sections[name] for name in order))("score", batch)
    penalty_last = order[0] == "overlong"
    assert batch.scores.tolist() == ([1.0 - 4, 3.0 - 4] if penalty_last else [-2.0 / 2, 2.0 / 2])
    assert batch.raw_scores.tolist() == ([2.0, 6.0] if penalty_last else [-2.0, 2.0])
