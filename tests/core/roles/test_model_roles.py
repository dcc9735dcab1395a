"""The roles that hold a model, as a controller calls them: scored, updated, saved, and of one mind about weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rollstock import Batch, GenerationRequest, Metric, Sampling, Trajectory
from rollstock.build import choose, model_spec, worker_spec
from rollstock.micro import Totals


@pytest.fixture(scope="module")
def make(small_run, tmp_path_factory, one_thread) -> Any:
    config = small_run(tmp_path_factory.mktemp("roles"), algorithm={"name": "ppo", "kl_reward_coef": 0.1})
    tokenizer = choose(config).tokenizer

    def make(role: str, **changes: Any) -> Any:
        spec = worker_spec(config, role, tokenizer)
        return spec.factory(**{**spec.kwargs, **changes}, rank=0, world_size=1)

    make.config, make.tokenizer = config, tokenizer
    return make


@pytest.fixture
def batch() -> Batch:
    made = Batch.from_trajectories(
        [
            Trajectory(
                prompt=torch.tensor([1, 2, 3]),
                response=torch.tensor(response),
                action_mask=torch.ones(len(response), dtype=torch.bool),
                rollout_logprobs=torch.full((len(response),), -1.0),
                versions=torch.ones(len(response), dtype=torch.int64),
                group=group,
                reward=1.0,
            )
            for group, response in enumerate([[4, 5], [6], [7, 8, 9]])
        ]
    )
    made["advantages"] = made.mask.float()
    made["returns"] = made.mask.float()
    return made


def test_columns_come_back_one_tensor_a_trajectory(make, batch):
    actor = make("actor")
    found = actor.forward(batch, ["logprobs", "entropy"])
    assert {name: [len(row) for row in rows] for name, rows in found.items()} == {
        "logprobs": [2, 1, 3],
        "entropy": [2, 1, 3],
    }
    assert all(bool((row < 0).all()) for row in found["logprobs"])
    critic = make("critic")
    assert [len(row) for row in critic.forward(batch, ["values"])["values"]] == [2, 1, 3]


def test_an_update_changes_the_weights_of_its_role_and_names_its_metrics(make, batch):
    for role, prefix in (("actor", "actor/"), ("critic", "critic/")):
        worker = make(role)
        outputs = ["values"] if role == "critic" else ["logprobs"]
        column = "values" if role == "critic" else "old_logprobs"
        batch.set_flat(column, torch.cat(worker.forward(batch, outputs)[outputs[0]]))
        before = worker.fingerprint()
        metrics = worker.update(batch, Totals.of(batch, response_limit=4), worker.algorithm.state())
        assert worker.fingerprint() != before
        assert f"{prefix}grad_norm" in metrics
        assert all("/" in name for name in metrics)
    assert "critic/vf_loss" in metrics


def test_the_log_probs_of_trainer_and_sampler_are_compared_in_every_update(make, batch):
    actor = make("actor")
    logprobs = torch.cat(actor.forward(batch, ["logprobs"])["logprobs"])
    batch.set_flat("old_logprobs", logprobs)
    batch.set_flat("rollout_logprobs", logprobs - 0.25)
    metrics = actor.update(batch, Totals.of(batch, response_limit=4), actor.algorithm.state())
    assert metrics["training/rollout_logprob_diff_mean"].value == pytest.approx(0.25, abs=1e-6)
    assert metrics["training/rollout_logprob_diff_max"].value == pytest.approx(0.25, abs=1e-6)


def test_state_restores_weights_and_optimizer(make, batch):
    first = make("actor")
    batch.set_flat("old_logprobs", torch.cat(first.forward(batch, ["logprobs"])["logprobs"]))
    totals, algorithm = Totals.of(batch, response_limit=4), first.algorithm.state()
    first.update(batch, totals, algorithm)
    second = make("actor")
    second.load_state(first.state())
    assert second.fingerprint() == first.fingerprint()
    for worker in (first, second):
        worker.update(batch, totals, algorithm)
    assert second.fingerprint() == first.fingerprint()


def test_the_reference_is_the_actors_start_and_is_not_trained(make, batch):
    actor, reference = make("actor"), make("reference")
    assert reference.fingerprint() == actor.fingerprint()
    mine, theirs = (w.forward(batch, ["logprobs"])["logprobs"] for w in (actor, reference))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_critic_starts_with_weights_of_its_own(make):
    spec = worker_spec(make.config, "critic", make.tokenizer).kwargs["model"]
    assert spec.head == "value"
    assert spec.seed != model_spec(make.config, make.tokenizer).seed


def test_memory_is_recorded_by_role(make):
    metrics = make("actor").memory()
    assert metrics.keys() == {"perf/actor_memory_gib", "perf/peak_memory_gib"}
    assert all(isinstance(metric, Metric) and metric.reducer == "max" for metric in metrics.values())


def test_the_rollout_role_generates_with_the_weights_that_it_was_given(make):
    actor, rollout = make("actor"), make("rollout")
    rollout.load_weights(actor.weights(), 5, False)
    assert rollout.fingerprint() == actor.fingerprint()
    result = rollout.generate([GenerationRequest(prompt=(1, 2, 3), seed=1)], Sampling(max_new_tokens=3))
    assert result.completions[0].versions == [5] * len(result.completions[0].tokens)
    assert rollout.generate([], Sampling()).completions == []
    rollout.close()


def test_the_model_config_is_written_for_later(make, tmp_path: Path):
    make("actor").save_config(tmp_path)
    assert '"llama"' in (tmp_path / "config.json").read_text()
