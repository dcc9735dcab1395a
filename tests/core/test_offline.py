"""Offline training: what is made of the responses that tasks hold, and whole runs on demonstrations and on pairs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from rollstock import Batch, ConfigError, Task, UserError
from rollstock.build import choose, worker_spec
from rollstock.checkpoint import CheckpointStore
from rollstock.dispatch import Registration, split_call
from rollstock.export import export
from rollstock.launch import evaluate, resume, train
from rollstock.offline import chosen_responses, read_responses
from rollstock.prompts import Prompts
from rollstock.testing import make_batch, read_metrics
from rollstock.tokens import character_tokenizer

TOKENIZER = character_tokenizer("0123456789+=")
SFT = SimpleNamespace(plugin_name="sft", samples_per_prompt=1, whole_groups=False)
DPO = SimpleNamespace(plugin_name="dpo", samples_per_prompt=2, whole_groups=True)
RANKING = SimpleNamespace(plugin_name="ranking", samples_per_prompt=3, whole_groups=True)


def prompts(limit=None, overlong="error"):
    return Prompts(tokenizer=TOKENIZER, limit=limit, overlong=overlong)


def task(*responses, prompt="1+1=", id="t"):
    return Task(id=id, prompt=prompt, responses=list(responses))


def test_a_response_is_its_text_and_the_token_that_ends_one():
    ((one,), metrics) = read_responses([task("12")], SFT, prompts(), limit=8)
    assert TOKENIZER.decode(one.prompt) == "1+1="
    assert TOKENIZER.decode(one.response) == "12<end>"
    assert (one.finish_reason, one.reward, one.task_id) == ("stop", 1.0, "t")
    assert one.action_mask.all()
    assert one.versions.tolist() == [-1, -1, -1]  # no policy of the run made it
    assert one.rollout_logprobs.tolist() == [0, 0, 0]
    assert one.metadata["sample"].response == "12"
    assert metrics["response_length/num_truncated"].value == 0
    assert metrics["response_length/mean"].value == 3


def test_the_responses_of_a_task_stand_side_by_side_and_have_the_scores_of_their_ranks():
    made, _ = read_responses([task("2", "3"), task("4", "5")], DPO, prompts(), limit=8)
    assert [one.group for one in made] == [0, 0, 1, 1]
    assert [one.reward for one in made] == [1.0, 0.0, 1.0, 0.0]
    ranked, _ = read_responses([task("2", "22", "3")], RANKING, prompts(), limit=8)
    assert [one.reward for one in ranked] == [1.0, 0.5, 0.0]


def test_of_a_pair_an_algorithm_of_demonstrations_takes_the_chosen_one():
    made, _ = read_responses([task("2", "3")], SFT, prompts(), limit=8)
    assert [TOKENIZER.decode(one.response) for one in made] == ["2<end>"]


def test_what_is_too_long_is_cut_or_left_out_and_counted():
    made, metrics = read_responses([task("1234567"), task("12")], SFT, prompts(), limit=4)
    assert [TOKENIZER.decode(one.response) for one in made] == ["1234", "12<end>"]
    assert [one.finish_reason for one in made] == ["length", "stop"]
    assert metrics["response_length/num_truncated"].value == 1
    assert metrics["response_length/clip_ratio"].value == 0.5
    made, metrics = read_responses([task("1", prompt="1+1+1="), task("2")], SFT, prompts(5, "skip"), limit=4)
    assert [one.group for one in made] == [1]
    assert metrics["prompt_length/num_skipped"].value == 1
    with pytest.raises(UserError, match="max_prompt_tokens=5"):
        read_responses([task("1", prompt="1+1+1=")], SFT, prompts(5), limit=4)


@pytest.mark.parametrize(
    ("algorithm", "responses", "said"),
    [
        (SFT, [], "task 'rows:7' holds no responses, and algorithm 'sft' trains on 1 response of each"),
        (DPO, ["2"], "holds 1 response, and algorithm 'dpo' trains on exactly 2 responses of each"),
        (DPO, ["2", "3", "4"], "holds 3 responses, and algorithm 'dpo' trains on exactly 2 responses"),
    ],
)
def test_a_task_without_the_responses_that_are_needed_is_refused(algorithm, responses, said):
    with pytest.raises(UserError, match=said):
        chosen_responses(task(*responses, id="rows:7"), algorithm)


def test_a_response_that_cannot_be_encoded_names_its_task():
    with pytest.raises(UserError, match="no token for 'x'") as caught:
        read_responses([task("x", id="rows:7")], SFT, prompts(), limit=4)
    assert "rows:7" in str(caught.value.__notes__)


def whole(batch: Batch) -> Batch:
    batch.whole_groups = True
    return batch


def test_a_batch_of_whole_groups_is_cut_between_groups_over_workers():
    batch = whole(make_batch(2, num_groups=5))
    shares = split_call(Registration("scatter", True), 3, (batch, "rest"))
    groups = [set(part.groups.tolist()) for part, _ in shares.arguments]
    assert sum(map(len, groups)) == 5
    assert set.union(*groups) == set(range(5))
    assert all(part.whole_groups for part, _ in shares.arguments)
    assert sorted(i for part in shares.indices for i in part) == list(range(10))


def test_the_mark_of_whole_groups_stays_with_a_batch():
    batch = whole(make_batch(2, num_groups=2))
    assert batch.select([0, 1]).whole_groups
    assert batch.to("cpu").whole_groups
    assert Batch.concat([batch, make_batch(2, num_groups=1)]).whole_groups
    assert not make_batch(2).select([0]).whole_groups
    assert whole(make_batch(2, num_groups=2).select([2, 0, 3, 1])).members() == [[0, 2], [1, 3]]


@pytest.mark.parametrize("budget", [1, 25, 10_000])
def test_no_micro_batch_cuts_a_group_that_must_stay_whole(small_run, tmp_path, pairs, budget):
    config = small_run(
        tmp_path, f"scheduler.tokens_per_micro_batch={budget}", algorithm={"name": "dpo"}, environment=pairs
    )
    spec = worker_spec(config, "actor", choose(config).tokenizer)
    actor = spec.factory(**spec.kwargs, rank=0, world_size=1)
    batch = whole(make_batch(2, num_groups=6))
    cuts = actor._cuts(batch)
    assert sorted(i for cut in cuts for i in cut) == list(range(12))
    assert all({i ^ 1 for i in cut} == set(cut) for cut in cuts)
    assert (len(cuts) == 6) == (budget == 1)
    assert (len(cuts) == 1) == (budget == 10_000)


@pytest.fixture
def pairs(tmp_path):
    """The environment of a file of pairs: a digit is asked for, and doubled in the rejected responses."""
    rows = [
        {"prompt": f"{a}+{b}=", "good": str(max(a, b)), "bad": str(max(a, b)) * 2} for a in range(8) for b in range(8)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "name": "jsonl",
        "path": str(path),
        "chat": False,
        "heldout_fraction": 0.2,
        "chosen": "good",
        "rejected": "bad",
    }


def lines(directory, part="metrics"):
    return [row[part] for row in read_metrics(directory) if part in row]


SFT_RUN = {"algorithm": {"name": "sft"}, "sampling": {"max_new_tokens": 4}}
DPO_RUN = {"algorithm": {"name": "dpo", "beta": 0.5}, "sampling": {"max_new_tokens": 4}}


def test_demonstrations_are_learned_and_the_heldout_loss_ranks_checkpoints(small_run, tmp_path, pairs):
    overrides = ("train.steps=60", "train.prompts_per_step=16", "evaluation.every=20", "evaluation.prompts=64")
    outcome = train(small_run(tmp_path / "run", *overrides, environment=pairs, **SFT_RUN))
    steps, evaluations = lines(outcome.directory), lines(outcome.directory, "evaluation")
    assert steps[0]["actor/nll"] > 2.0  # of 13 tokens
    assert steps[-1]["actor/nll"] < 0.9
    assert steps[-1]["actor/perplexity"] == pytest.approx(2.718281828 ** steps[-1]["actor/nll"])
    losses = [row["eval/loss"] for row in evaluations]
    assert losses[-1] < 1.0 < losses[0]
    assert CheckpointStore(outcome.directory / "checkpoints").load().score == -losses[-1]
    assert evaluate(outcome.directory).evaluation == outcome.evaluation


def test_preferences_widen_the_margin_and_put_heldout_pairs_in_order(small_run, tmp_path, pairs):
    overrides = ("train.steps=30", "train.prompts_per_step=8", "evaluation.prompts=64")
    outcome = train(small_run(tmp_path / "run", *overrides, environment=pairs, **DPO_RUN))
    first, *_, last = lines(outcome.directory)
    assert first["actor/loss"] == pytest.approx(0.6931, abs=1e-3)  # the policy is the reference still
    assert abs(first["rewards/margins"]) < 1e-4
    assert last["rewards/margins"] > 1.0
    before, after = lines(outcome.directory, "evaluation")
    assert before["eval/rewards/margins"] == pytest.approx(0.0, abs=1e-4)
    assert after["eval/rewards/accuracies"] == 1.0
    assert after["eval/loss"] < 0.4
    assert evaluate(outcome.directory).evaluation == outcome.evaluation  # which takes the reference model


def test_nothing_is_generated_and_nobody_is_asked_for_a_score(small_run, tmp_path, pairs):
    config = small_run(tmp_path / "run", "rewards=[]", environment=pairs, **DPO_RUN)
    assert choose(config).roles == ["actor", "reference"]
    outcome = train(config)
    metrics = lines(outcome.directory)[-1]
    assert not [name for name in metrics if name.startswith(("reward/", "rollout/", "sync/", "training/"))]
    rows = [json.loads(line) for line in (outcome.directory / "rollouts/step-000001.jsonl").read_text().splitlines()]
    assert [(row["group"], row["reward"], row["advantage"]) for row in rows] == [
        (0, 1.0, 1.0),
        (0, 0.0, -1.0),
        (1, 1.0, 1.0),
        (1, 0.0, -1.0),
    ]


@pytest.mark.parametrize("sections", [SFT_RUN, DPO_RUN], ids=["sft", "dpo"])
def test_micro_batches_change_nothing(small_run, tmp_path, pairs, sections):
    names = ["actor/loss", "actor/grad_norm", "rewards/margins", "rewards/chosen", "actor/nll", "logps/chosen"]
    runs = []
    for budget in (20, 10_000):
        overrides = (f"scheduler.tokens_per_micro_batch={budget}", "train.prompts_per_step=8", "train.steps=3")
        runs.append(train(small_run(tmp_path / str(budget), *overrides, environment=pairs, **sections)))
    cut, uncut = (lines(outcome.directory) for outcome in runs)
    for one, other in zip(cut, uncut, strict=True):
        common = [name for name in names if name in one]
        assert len(common) >= 3
        assert [one[name] for name in common] == pytest.approx([other[name] for name in common], rel=1e-3, abs=1e-5)


def test_the_temperature_of_sampling_is_not_that_of_the_data(small_run, tmp_path, pairs):
    cold = train(small_run(tmp_path / "cold", "sampling.temperature=0.2", environment=pairs, **SFT_RUN))
    warm = train(small_run(tmp_path / "warm", environment=pairs, **SFT_RUN))
    assert [row["actor/loss"] for row in lines(cold.directory)] == [row["actor/loss"] for row in lines(warm.directory)]


def test_the_scores_that_nobody_gives_do_not_stand_in_the_way_of_a_switch_by_name_alone(small_run, tmp_path, pairs):
    """Sections for rewards, engine and sampling may stay in a config whose algorithm is exchanged."""
    config = small_run(tmp_path / "run", "algorithm=sft", "rollout=native", "rewards=[environment]", environment=pairs)
    assert train(config).status == "finished"


SUMS = {"name": "arithmetic", "chat": False, "prompt": "{a}{op}{b}="}


def test_data_without_responses_is_refused_before_anything_is_written(small_run, tmp_path):
    config = small_run(tmp_path / "run", algorithm={"name": "sft"}, environment=SUMS)
    for dry_run in (True, False):
        with pytest.raises(UserError, match=r"holds no responses, and algorithm 'sft' trains on 1 response"):
            train(config, dry_run=dry_run)
    assert not (tmp_path / "run").exists()


def test_a_dry_run_makes_every_part(small_run, tmp_path, pairs):
    outcome = train(small_run(tmp_path / "run", environment=pairs, **DPO_RUN), dry_run=True)
    assert (outcome.status, outcome.step) == ("checked", 0)
    assert not (tmp_path / "run").exists()


def test_a_run_without_rewards_is_still_refused_where_somebody_must_score(small_run, tmp_path, pairs):
    with pytest.raises(ConfigError, match="nobody scores"):
        choose(small_run(tmp_path / "run", "rewards=[]", environment={**pairs, "answer": "good"}))


def test_what_was_trained_is_exported_and_reported(small_run, tmp_path, pairs):
    from rollstock.report import write_report

    outcome = train(small_run(tmp_path / "run", environment=pairs, **DPO_RUN))
    export(outcome.directory, tmp_path / "model")
    assert (tmp_path / "model/model.safetensors").is_file()
    card = (tmp_path / "model/README.md").read_text()
    assert "A language model trained with rollstock: `dpo`" in card
    assert "reinforcement" not in card
    page = write_report(outcome.directory).read_text()
    assert "rewards/margins" in page
    assert "eval/loss" in page


RESUMED = ("train.steps=8", "train.mini_batches=2", "train.epochs=2", "checkpoint.every_steps=2", "evaluation.every=3")


@pytest.mark.parametrize("sections", [SFT_RUN, DPO_RUN], ids=["sft", "dpo"])
def test_a_run_resumed_from_its_middle_equals_one_that_went_through(
    small_run, tmp_path, pairs, sections, assert_same_run, one_thread
):
    through = train(small_run(tmp_path / "through", *RESUMED, environment=pairs, **sections))
    shutil.copytree(through.directory, tmp_path / "again")
    resume(tmp_path / "again", step=4)
    assert_same_run(tmp_path / "again", through.directory)


@pytest.mark.slow
def test_a_run_killed_in_its_middle_equals_one_that_was_not(small_run, tmp_path, pairs, assert_same_run, one_thread):
    config = small_run(tmp_path / "through", *RESUMED, "train.steps=40", environment=pairs, **DPO_RUN)
    through = train(config).directory
    run = tmp_path / "killed"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "rollstock"]
    file = tmp_path / "config.yaml"
    shutil.copy(through / "config.yaml", file)
    process = subprocess.Popen([*command, "train", str(file), f"run.directory={run}"], env=environment, cwd=tmp_path)
    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while (not metrics.exists() or metrics.read_bytes().count(b"\n") < 6) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    subprocess.run([*command, "resume", str(run)], env=environment, cwd=tmp_path, check=True)
    assert_same_run(run, through)
