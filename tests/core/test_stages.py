"""What the core does in each stage, what it refuses, and that plugins may wrap or replace it."""

import json
from pathlib import Path

import pytest
import torch

from rollstock import (
    Algorithm,
    Batch,
    Extension,
    Metric,
    NoOptions,
    RunError,
    Trajectory,
    UserError,
    hookimpl,
)
from rollstock.config import load_config
from rollstock.launch import train
from rollstock.stages import mini_batches

CONFIG = """
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
           num_key_value_heads: 1, max_position_embeddings: 64}
  tokenizer: {characters: "0123456789+=guesshigrlow "}
algorithm: {name: grpo, group_size: 4}
environment: {name: arithmetic, chat: false, prompt: "{a}{op}{b}="}
sampling: {max_new_tokens: 3}
train: {steps: 2, prompts_per_step: 4}
backend: {name: torch, learning_rate: 1.0e-2}
evaluation: {prompts: 4, samples: 0}
trackers: [jsonl]
"""


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)

    def run(*overrides, name="run"):
        train(load_config(path, [f"run.directory={tmp_path / name}", *overrides]))
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [row["metrics"] for row in rows if "metrics" in row]

    run.directory = tmp_path
    return run


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("share", ["true", "false"])
def test_on_policy_the_trainer_recomputes_the_samplers_logprobs(run, temperature, share):
    for metrics in run(f"sampling.temperature={temperature}", f"backend.share_prompts={share}"):
        assert metrics["training/rollout_logprob_diff_max"] < 2e-5
        assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
        assert metrics["actor/pg_clipfrac"] == 0.0


def test_recomputed_old_logprobs_give_the_run_that_skipping_them_gives(run):
    skipped = run(name="skipped")
    computed = run("extensions=[]", "algorithm.kl_coef=0.0", "train.epochs=1", name="computed")
    assert [m["actor/pg_loss"] for m in skipped] == [m["actor/pg_loss"] for m in computed]


def test_weights_land_on_the_generators_and_change_with_every_update(run):
    assert all(metrics["sync/changed"] == 1.0 for metrics in run())


def test_a_learning_rate_of_zero_changes_no_weight(run):
    assert all(metrics["sync/changed"] == 0.0 for metrics in run("backend.learning_rate=0"))


def test_results_do_not_depend_on_the_number_of_generators(run):
    one, three = run(name="one"), run("roles.rollout.count=3", name="three")
    names = ["reward/mean", "actor/pg_loss", "actor/grad_norm", "response_length/mean"]
    for mine, other in zip(one, three, strict=True):
        assert {n: mine[n] for n in names} == pytest.approx({n: other[n] for n in names}, abs=1e-6)


def test_observations_of_a_two_turn_environment_carry_no_loss(run, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "packages" / "two_turn"))
    steps = run("environment={name: two_turn}", "sampling.max_new_tokens=16")
    assert max(m["rollout/max_turns"] for m in steps) == 2
    rows = (run.directory / "run" / "rollouts" / "step-000001.jsonl").read_text().splitlines()
    observed = [json.loads(row) for row in rows if "igher" in row or "ower" in row]
    assert observed
    for metrics in steps:
        assert metrics["training/rollout_logprob_diff_max"] < 2e-5
        tokens = metrics["train/num_action_tokens"]
        assert tokens == pytest.approx(metrics["response_length/mean"] * metrics["train/num_trajectories"])


class Base(Algorithm[NoOptions]):
    needs = frozenset({"old_logprobs"})

    @property
    def samples_per_prompt(self):
        return 2

    def advantages(self, batch):
        return batch.scores[:, None] * batch.mask

    def loss(self, micro):
        return micro.loss(-micro.logprobs * micro.advantages)


def test_advantages_that_are_not_finite_end_the_run_and_name_the_task(run, installed):
    class Broken(Base):
        def advantages(self, batch):
            return (batch.scores[:, None] / 0.0) * batch.mask

    installed("algorithm", "broken", Broken)
    with pytest.raises(RunError, match="algorithm 'broken' gave advantages that are not finite, first for task"):
        run("algorithm={name: broken}")


def test_advantages_on_observations_are_refused(run, installed, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "packages" / "two_turn"))

    class Broken(Base):
        def advantages(self, batch):
            return torch.ones_like(batch.mask, dtype=torch.float32)

    installed("algorithm", "broken", Broken)
    with pytest.raises(RunError, match="gave advantages to masked tokens"):
        run("algorithm={name: broken}", "environment={name: two_turn}", "sampling.max_new_tokens=16")


def test_a_column_that_nobody_provides_refuses_the_run_before_it_starts(run, installed):
    class Needy(Base):
        needs = frozenset({"old_logprobs", "hint_bonus"})

    installed("algorithm", "needy", Needy)
    with pytest.raises(UserError, match="needs the column 'hint_bonus', which no role and no extension"):
        run("algorithm={name: needy}")
    assert not (run.directory / "run" / "metrics.jsonl").exists()


def test_an_extension_may_bring_a_column_of_its_own(run, installed):
    class Needy(Base):
        needs = frozenset({"hint_bonus"})

        def advantages(self, batch):
            return batch.hint_bonus[:, None] * batch.mask

    class Hints(Extension[NoOptions]):
        provides = frozenset({"hint_bonus"})

        @hookimpl(wrapper=True)
        def rollstock_prepare(self, run, batch):
            done = yield
            batch["hint_bonus"] = torch.full((len(batch),), 2.0)
            return done

    installed("algorithm", "needy", Needy)
    installed("extension", "hints", Hints)
    for metrics in run("algorithm={name: needy}", "extensions=[hints]"):
        assert metrics["critic/advantages/mean"] == 2.0


def test_a_column_that_an_extension_needs_is_computed_whether_or_not_the_algorithm_asks(run, installed):
    seen = []

    class Reads(Extension[NoOptions]):
        needs = frozenset({"old_logprobs", "ref_logprobs"})

        @hookimpl(wrapper=True)
        def rollstock_prepare(self, run, batch):
            assert "old_logprobs" not in batch
            done = yield
            seen.append(float((batch.old_logprobs - batch.ref_logprobs).abs().max()))
            assert torch.allclose(batch.old_logprobs, batch.rollout_logprobs, atol=2e-5)
            return done

    plain = run(name="plain")
    installed("extension", "reads", Reads)
    with_it = run("extensions=[reads]", name="reads")
    assert seen[0] == 0.0  # the reference is the model that training begins with
    assert seen[1] > 0.0
    for mine, theirs in zip(plain, with_it, strict=True):
        assert theirs["actor/pg_loss"] == pytest.approx(mine["actor/pg_loss"], abs=1e-6)


def test_an_extension_may_refuse_a_config(run, installed):
    class Picky(Extension[NoOptions]):
        needs = frozenset({"old_logprobs"})

        @hookimpl
        def rollstock_step_end(self, run, step):
            return

        def validate(self, config, algorithm):
            return [f"{algorithm.plugin_name} takes {config.train.steps} steps, which is too few"]

    installed("extension", "picky", Picky)
    with pytest.raises(UserError, match="extension 'picky': grpo takes 2 steps, which is too few"):
        run("extensions=[picky]")
    assert not (run.directory / "run" / "metrics.jsonl").exists()


def test_an_extension_that_needs_what_nobody_provides_refuses_the_run(run, installed):
    class Needy(Extension[NoOptions]):
        needs = frozenset({"ref_logprob"})

        @hookimpl
        def rollstock_step_end(self, run, step):
            return

    installed("extension", "needy", Needy)
    with pytest.raises(UserError, match="extension 'needy' needs the column 'ref_logprob'.* mean 'ref_logprobs'"):
        run("extensions=[needy]")


def test_an_extension_may_replace_a_stage_and_add_metrics(run, installed):
    class First(Extension[NoOptions]):
        @hookimpl
        def rollstock_select(self, run, batch):
            return batch.select([i for i, g in enumerate(batch.groups.tolist()) if g == 0])

        @hookimpl
        def rollstock_metrics(self, run, step, metrics):
            metrics["mine/step"] = Metric(step)

    installed("extension", "first", First)
    steps = run("extensions=[first]")
    assert [m["train/num_dropped"] for m in steps] == [12, 12]
    assert [m["train/num_trajectories"] for m in steps] == [4, 4]
    assert [m["mine/step"] for m in steps] == [1, 2]


@pytest.mark.parametrize(
    ("stage", "arguments", "message"),
    [
        (
            "generate",
            "run, tasks",
            "the generate stage returned NoneType, not a Batch; an extension that wraps it must",
        ),
        ("select", "run, batch", "the select stage returned NoneType, not a Batch"),
        ("update", "run, batch", "the update stage returned NoneType, not metrics"),
    ],
)
def test_a_wrapper_that_returns_nothing_is_told_so(run, installed, stage, arguments, message):
    scope = {"hookimpl": hookimpl}
    exec(f"@hookimpl(wrapper=True)\ndef rollstock_{stage}(self, {arguments}):\n    yield", scope)
    hook = scope[f"rollstock_{stage}"]
    installed("extension", "forgets", type("Forgets", (Extension,), {f"rollstock_{stage}": hook}))
    with pytest.raises(RunError, match=message):
        run("extensions=[forgets]")


def test_whoever_replaces_the_advantages_must_make_them(run, installed):
    class Empty(Extension[NoOptions]):
        @hookimpl
        def rollstock_advantages(self, run, batch):
            return True

    installed("extension", "empty", Empty)
    with pytest.raises(RunError, match="the advantages stage left no column `advantages`"):
        run("extensions=[empty]")


def test_the_first_extension_of_a_config_is_the_outermost(run, installed):
    calls = []

    def make(label):
        class Wrap(Extension[NoOptions]):
            @hookimpl(wrapper=True)
            def rollstock_sync(self, run):
                calls.append(f"{label} in")
                done = yield
                calls.append(f"{label} out")
                return done

        return Wrap

    installed("extension", "outer", make("outer"))
    installed("extension", "inner", make("inner"))
    run("extensions=[outer, inner]", "train.steps=1")
    assert calls[:4] == ["outer in", "inner in", "inner out", "outer out"]


def test_steps_without_anything_to_train_on_are_counted_and_end_the_run_at_last(run, installed):
    class Nothing(Base):
        def select(self, batch):
            return []

    installed("algorithm", "nothing", Nothing)
    with pytest.raises(RunError, match="10 steps in a row had nothing to train on"):
        run("algorithm={name: nothing}", "train.steps=20")
    rows = (run.directory / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(row)["metrics"] for row in rows if "metrics" in row]
    assert [m["train/num_empty_steps"] for m in steps] == [1.0] * 9
    assert all(m["train/num_dropped"] == 8 for m in steps)


def test_an_algorithm_may_ask_for_more_tasks_until_its_batch_is_full(run, installed):
    class Picky(Base):
        refill_rounds = 3

        def select(self, batch):
            return [i for i, g in enumerate(batch.groups.tolist()) if g < 2]

    installed("algorithm", "picky", Picky)
    for metrics in run("algorithm={name: picky}"):
        assert metrics["train/num_trajectories"] == 8  # two groups of two in each of two rounds
        assert metrics["train/num_dropped"] == 8
    assert metrics["train/position"] == 16


def test_what_a_refill_brings_beyond_the_size_of_a_step_is_left_over_and_counted(run, installed):
    class Picky(Base):
        refill_rounds = 3

        def select(self, batch):
            return [i for i, g in enumerate(batch.groups.tolist()) if g < 3]

    installed("algorithm", "picky", Picky)
    for metrics in run("algorithm={name: picky}"):
        assert metrics["train/num_rounds"] == 2
        assert metrics["train/num_trajectories"] == 8  # four of the six groups of two
        assert metrics["train/num_surplus"] == 4
        assert metrics["train/num_dropped"] == 4


def test_without_a_critic_a_head_start_for_it_holds_nothing_back(run):
    for metrics in run("train.critic_warmup=2"):
        assert "actor/pg_loss" in metrics


def test_greedy_sampling_under_grpo_is_refused_with_the_reason(run):
    with pytest.raises(UserError, match="each advantage is 0"):
        run("sampling.temperature=0")


def test_more_mini_batches_than_groups_are_refused(run):
    with pytest.raises(UserError, match="train.mini_batches: 5 is more than the 4 groups"):
        run("train.mini_batches=5")


def test_the_critic_gets_a_head_start(run):
    steps = run("algorithm={name: ppo, group_size: 2}", "train.critic_warmup=1")
    assert "actor/pg_loss" not in steps[0]
    assert "critic/vf_loss" in steps[0]
    assert "actor/pg_loss" in steps[1]
    assert steps[0]["sync/changed"] == 0.0


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_mini_batches_cover_each_epoch_once_and_keep_groups_whole(count):
    batch = Batch.from_trajectories(
        [
            Trajectory(
                prompt=torch.tensor([1]),
                response=torch.tensor([2]),
                action_mask=torch.tensor([True]),
                rollout_logprobs=torch.zeros(1),
                versions=torch.zeros(1, dtype=torch.int64),
                group=i // 2,
                task_id=str(i),
            )
            for i in range(8)
        ]
    )
    cuts = list(mini_batches(batch, 0, 1, epochs=2, count=count))
    assert len(cuts) == 2 * count
    for epoch in (cuts[: len(cuts) // 2], cuts[len(cuts) // 2 :]):
        assert sorted(t for cut in epoch for t in cut.task_ids) == sorted(batch.task_ids)
    for cut in cuts:
        assert all(cut.groups.tolist().count(g) == 2 for g in cut.groups.tolist())
    sizes = [len(cut) // 2 for cut in cuts]
    assert max(sizes) - min(sizes) <= 1  # as even as whole groups can be


def test_where_fewer_groups_are_left_than_mini_batches_each_is_one(run, installed):
    class Half(Base):
        def select(self, batch):
            return [i for i, g in enumerate(batch.groups.tolist()) if g < 2]

    installed("algorithm", "half", Half)
    for metrics in run("algorithm={name: half}", "train.mini_batches=4"):
        assert metrics["train/num_trajectories"] == 4
        assert metrics["train/num_updates"] == 2
