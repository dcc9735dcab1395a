"""The config's section `pipeline`: its short form, what is refused, and whose log-probs are the old ones."""

import json
from pathlib import Path

import pytest
import torch

from rollstock import Extension, NoOptions, hookimpl
from rollstock.build import choose
from rollstock.config import load_config, load_run_config
from rollstock.doctor.config import examine_config
from rollstock.errors import ConfigError
from rollstock.launch import train
from rollstock.pipeline import sampler_is_old

from ...conftest import steady_rows

MINIMAL = "model: {path: some/model}\nalgorithm: grpo\nenvironment: arithmetic\n"


def test_a_bare_text_is_short_for_the_mode(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Path("demo.yaml")
    file.write_text(MINIMAL)
    assert load_config(file).pipeline.mode == "sync"
    file.write_text(MINIMAL + "pipeline: async\n")
    config = load_config(file)
    assert (config.pipeline.mode, config.origins["pipeline.mode"]) == ("async", "demo.yaml:4")
    file.write_text(MINIMAL + "pipeline: {mode: async, max_staleness: 3}\n")
    config = load_config(file, ["pipeline=async"])
    assert (config.pipeline.mode, config.pipeline.max_staleness) == ("async", 3)  # the others stay as they were
    assert load_config(file, ["pipeline={mode: double_buffer}"]).pipeline.max_staleness == 1
    with pytest.raises(ConfigError, match="must be one of"):
        load_config(file, ["pipeline=asynchronous"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["pipeline.max_staleness=2"],
            "pipeline.max_staleness: 2 would change nothing, since it is 0 in the mode sync",
        ),
        (["pipeline=double_buffer", "pipeline.max_staleness=2"], "since it is 1 in the mode double_buffer"),
        (["pipeline.partial_tokens=8"], "pipeline.partial_tokens: 8 would change nothing.*only in the mode async"),
        (["pipeline.old_logprobs=recompute"], "recompute would change nothing, since the mode sync does so"),
        (["pipeline=async", "algorithm={name: sft}"], "pipeline.mode: async generates ahead, and 'sft' trains on"),
        (
            ["pipeline=async", "pipeline.old_logprobs=sampler", "extensions=[rollout_correction]"],
            "every weight would be 1",
        ),
    ],
)
def test_what_would_change_nothing_is_refused(small_run, tmp_path, overrides, words):
    with pytest.raises(ConfigError, match=words):
        choose(small_run(tmp_path / "run", *overrides))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], False),
        (["pipeline.old_logprobs=sampler"], True),
        (["pipeline=async"], True),
        (["pipeline=double_buffer"], True),
        (["pipeline=async", "pipeline.old_logprobs=recompute"], False),
        (["pipeline=async", "extensions=[rollout_correction]"], False),
        (["pipeline=async", "extensions=[kl_in_reward]", "pipeline.old_logprobs=sampler"], True),
        (["pipeline=async", "extensions=[length_balance]"], True),
    ],
)
def test_the_sampler_is_the_old_policy_unless_somebody_compares_the_two(small_run, tmp_path, overrides, expected):
    config = small_run(tmp_path / "run", *overrides)
    parts = choose(config)
    assert sampler_is_old(config, parts.algorithm, parts.extensions) is expected


class Watch(Extension[NoOptions]):
    """Notes, before the update, how far the old log-probs are from the sampler's."""

    @hookimpl(wrapper=True)
    def rollstock_update(self, run, batch):
        there = "old_logprobs" in batch
        gap = (batch.old_logprobs - batch.rollout_logprobs).abs().max() if there else torch.tensor(-1.0)
        self.found.append(round(float(gap), 5))
        return (yield)

    found: list = []  # noqa: RUF012  # emptied by each test


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["pipeline=double_buffer"], "the sampler's"),
        (["pipeline=double_buffer", "pipeline.old_logprobs=recompute"], "left to the update itself"),
        (["pipeline=double_buffer", "pipeline.old_logprobs=recompute", "train.epochs=2"], "the trainer's"),
    ],
)
def test_old_logprobs_are_those_that_were_chosen(small_run, tmp_path, installed, overrides, expected):
    torch.set_num_threads(1)
    installed("extension", "watch", Watch)
    Watch.found.clear()
    run = train(small_run(tmp_path / "run", *overrides, extensions=["watch"])).directory
    gaps = Watch.found[1:]  # of the batches that an older policy made
    drift = [row["metrics"]["actor/ppo_kl"] for row in steady_rows(run) if "metrics" in row][1:]
    if expected == "the sampler's":
        assert gaps == [0, 0]
        assert all(abs(value) > 1e-4 for value in drift)  # the ratio is against the policy that sampled
    elif expected == "the trainer's":
        assert all(gap > 1e-3 for gap in gaps)
    else:
        assert gaps == [-1, -1]
        assert all(abs(value) < 1e-6 for value in drift)  # it is 1


def test_the_resolved_config_says_the_mode(small_run, tmp_path):
    torch.set_num_threads(1)
    run = train(small_run(tmp_path / "run", "pipeline=double_buffer", "train.steps=1")).directory
    assert load_run_config(run / "config.yaml").pipeline.mode == "double_buffer"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert "pipeline/staleness_max" in next(row["metrics"] for row in rows if "metrics" in row)


def test_a_synchronous_run_tells_nothing_of_a_pipeline(small_run, tmp_path):
    torch.set_num_threads(1)
    run = train(small_run(tmp_path / "run", "train.steps=1")).directory
    names = {name for row in steady_rows(run) for name in row.get("metrics", {})}
    assert not [name for name in names if name.startswith("pipeline/")]


def doctors(small_run, tmp_path, *overrides, **sections):
    found = examine_config(small_run(tmp_path / "run", *overrides, **sections))
    return {finding.subject: finding for finding in found if finding.subject.startswith("pipeline")}


def test_the_doctor_says_how_old_batches_may_be(small_run, tmp_path):
    assert doctors(small_run, tmp_path)["pipeline"].message.startswith("sync: each batch is generated by the policy")
    found = doctors(small_run, tmp_path, "pipeline=async", "pipeline.max_staleness=4")
    assert found.keys() == {"pipeline"}
    assert found["pipeline"].severity == "ok"
    assert found["pipeline"].message == (
        "async: batches come from a policy that is up to 4 updates older; old log-probs are the sampler's"
    )


def test_the_doctor_warns_of_old_samples_that_nothing_weighs(small_run, tmp_path):
    found = doctors(small_run, tmp_path, "pipeline=async", "pipeline.old_logprobs=recompute")
    assert found["pipeline.mode"].severity == "warning"
    assert "nothing in the loss tells" in found["pipeline.mode"].message
    corrected = doctors(small_run, tmp_path, "pipeline=async", "extensions=[rollout_correction]")
    assert corrected.keys() == {"pipeline"}
    assert corrected["pipeline"].message.endswith("the trainer's before its update")


def test_the_doctor_knows_that_updates_wait_for_long_responses(small_run, tmp_path):
    long = ["pipeline=async", "sampling.max_new_tokens=2000"]
    assert doctors(small_run, tmp_path, *long)["pipeline.partial_tokens"].severity == "info"
    assert "pipeline.partial_tokens" not in doctors(small_run, tmp_path, *long, "pipeline.partial_tokens=256")
