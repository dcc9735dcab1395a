"""Rollout correction: weights, rejections and measures by hand, what they do to a gradient, and runs."""

import math
from types import SimpleNamespace

import pytest
import torch

from rollstock import (
    Algorithm,
    Batch,
    ConfigError,
    Extension,
    MicroBatch,
    NoOptions,
    Totals,
    hookimpl,
)
from rollstock.manager import make_manager
from rollstock.plugins.extensions.rollout_correction import RolloutCorrection
from rollstock.testing.install import installed

# Ratios of four responses, one of them empty: products 1, 4 and 1/16, geometric means 1, 2 and 1/4.
RATIOS = ([2.0, 0.5], [4.0, None, 1.0], [0.25, 0.25], [])


@pytest.fixture
def correct(stages, stand_in, ratio_batch):
    """`correct(ratios, option=...)` gives the weights, row by row without masked slots, and what was recorded."""

    def apply(ratios=RATIOS, **options):
        batch, run = ratio_batch(*ratios), stand_in()
        stages(run, {"name": "rollout_correction", **options})("prepare", batch)
        rows = [row[mask].tolist() for row, mask in zip(batch.token_weights, batch.mask, strict=True)]
        assert not bool(batch.token_weights[~batch.mask].any())
        return rows, run

    return apply


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # truncated (TIS)
        ({}, [[2, 0.5], [2, 1], [0.25, 0.25], []]),
        ({"cap": 3}, [[2, 0.5], [3, 1], [0.25, 0.25], []]),
        ({"floor": 0.5}, [[2, 0.5], [2, 1], [0.5, 0.5], []]),
        ({"cap": None}, [[2, 0.5], [4, 1], [0.25, 0.25], []]),
        ({"level": "sequence"}, [[1, 1], [2, 2], [0.0625, 0.0625], []]),
        ({"level": "sequence", "cap": 5}, [[1, 1], [4, 4], [0.0625, 0.0625], []]),
        ({"level": "geometric", "cap": None}, [[1, 1], [2, 2], [0.25, 0.25], []]),
        # masked (MIS); with both bounds on tokens, IcePop
        ({"outside": "mask"}, [[2, 0.5], [0, 1], [0.25, 0.25], []]),
        ({"outside": "mask", "floor": 0.5}, [[2, 0.5], [0, 1], [0, 0], []]),
        ({"outside": "mask", "cap": None, "floor": 0.3}, [[2, 0.5], [4, 1], [0, 0], []]),
        ({"outside": "mask", "level": "sequence", "cap": 3}, [[1, 1], [0, 0], [0.0625, 0.0625], []]),
        # responses rejected as a whole
        ({"level": "none"}, [[1, 1], [1, 1], [1, 1], []]),
        ({"level": "none", "reject_above": 1.9}, [[1, 1], [0, 0], [1, 1], []]),
        ({"level": "none", "reject_below": 0.3}, [[1, 1], [1, 1], [0, 0], []]),
        ({"level": "none", "reject_token_above": 3}, [[1, 1], [0, 0], [1, 1], []]),
        ({"level": "none", "reject_token_below": 0.3}, [[1, 1], [1, 1], [0, 0], []]),
        # k3, the mean of r - 1 - log r: (1 - log 2 + log 2 - 0.5) / 2 = 0.25, 1.5 - log 2 = 0.81, log 4 - 0.75 = 0.64
        ({"level": "none", "reject_k3_above": 0.7}, [[1, 1], [0, 0], [1, 1], []]),
        ({"level": "none", "reject_k3_above": 0.3}, [[1, 1], [0, 0], [0, 0], []]),
        ({"reject_above": 1.9, "reject_token_below": 0.3}, [[2, 0.5], [0, 0], [0, 0], []]),
        # with a mean of 1, over tokens and over responses; what is kept counts alone with `denominator: kept`
        ({"normalise": True, "cap": None}, [[1.5, 0.375], [3, 0.75], [0.1875, 0.1875], []]),
        (
            {"normalise": True, "level": "sequence", "outside": "mask", "floor": 0.5, "cap": 3},
            [[3, 3], [0, 0], [0, 0], []],
        ),
        (
            {"normalise": True, "level": "sequence", "outside": "mask", "floor": 0.5, "denominator": "kept"},
            [[1, 1], [0, 0], [0, 0], []],
        ),
    ],
)  # fmt: skip
def test_weights(correct, options, expected):
    rows, _ = correct(**options)
    assert rows == [pytest.approx(row) for row in expected]


def test_measures(correct):
    _, run = correct()
    found = {name.removeprefix("rollout_corr/"): metric.value for name, metric in run.recorded.items()}
    log4 = math.log(4)
    assert found == pytest.approx(
        {
            "kl": log4 / 6,  # minus the mean of the six tokens' log-ratios
            "k3_kl": (8 - 6 + log4) / 6,  # the mean of r - 1 - log r
            "rollout_ppl": math.e,  # every sampled token has the log-prob -1
            "training_ppl": math.e * (1 + 0.5 + 4) / 3,
            "log_ppl_diff": (0 - log4 / 2 + log4) / 3,
            "log_ppl_abs_diff": (0 + log4 / 2 + log4) / 3,
            "ppl_ratio": (1 + 0.5 + 4) / 3,
            "ratio_max": 4,
            "ratio_min": 0.25,
            "weight_mean": 1,  # 2, 0.5, 2, 1, 0.25 and 0.25
            "effective_sample_size": 36 / (6 * 9.375),
            "truncated_share": 1 / 6,
            "zero_share": 0,
            "rejected_share": 0,
        },
        abs=1e-6,
    )
    assert run.recorded["rollout_corr/kl"].weight == 6
    assert run.recorded["rollout_corr/ppl_ratio"].weight == 3


def test_measures_of_masked_and_rejected(correct):
    _, run = correct(level="sequence", outside="mask", cap=3, reject_token_below=0.3)
    assert run.value("rollout_corr/masked_share") == pytest.approx(1 / 3)
    assert run.value("rollout_corr/rejected_share") == pytest.approx(1 / 3)
    assert run.value("rollout_corr/zero_share") == pytest.approx(4 / 6)
    assert run.value("rollout_corr/weight_mean") == pytest.approx(1 / 3)  # of responses: 1, 0 and 0
    assert run.value("rollout_corr/effective_sample_size") == pytest.approx(1 / 3)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric", "none"])
def test_no_tokens_at_all_are_nothing_to_correct(correct, level):
    rows, run = correct(ratios=([], [None]), level=level, reject_above=2.0)
    assert rows == [[], []]
    assert run.recorded == {}


def test_everything_rejected_is_a_loss_of_0(correct, ratio_batch):
    rows, run = correct(level="none", reject_token_above=1.5, ratios=([2.0], [3.0, 1.0]))
    assert rows == [[0], [0, 0]]
    assert run.value("rollout_corr/effective_sample_size") == 0


def test_ratios_that_overflow_stay_finite(correct):
    rows, run = correct(ratios=([1e30, 1.0], [1e-30, 1.0]), cap=None)
    assert all(math.isfinite(weight) for row in rows for weight in row)
    assert math.isfinite(run.value("rollout_corr/effective_sample_size"))


def test_without_a_mismatch_all_weights_are_1(correct):
    for level in ("token", "sequence", "geometric"):
        rows, run = correct(ratios=([1.0] * 5, [1.0]), level=level, floor=0.5, reject_above=1.01, normalise=True)
        assert rows == [[1.0] * 5, [1.0]]
        assert run.value("rollout_corr/kl") == 0.0


def test_two_extensions_with_weights_multiply(stages, stand_in, ratio_batch):
    batch, run = ratio_batch([2.0, 1.0]), stand_in()
    twice = {"name": "rollout_correction", "cap": None}
    stages(run, twice, twice)("prepare", batch)
    assert batch.token_weights.tolist() == [[4.0, 1.0]]


def test_kept_tokens_are_the_action_tokens_of_the_update_alone(stages, stand_in, ratio_batch):
    batch, run = ratio_batch(*RATIOS), stand_in()
    options = {"outside": "mask", "floor": 0.5, "denominator": "kept"}  # keeps both of one and the second of another
    call = stages(run, {"name": "rollout_correction", **options})
    call("prepare", batch)
    before = batch.flat("action_mask").clone()
    seen = call("update", batch)["action_mask"]
    assert [row.tolist() for row in seen] == [
        [True, True, False], [False, False, True], [False, False, False], [False, False, False],
    ]  # fmt: skip
    assert torch.equal(batch.flat("action_mask"), before)
    all_of_them = stages(run, {"name": "rollout_correction"})("update", batch)["action_mask"]
    assert torch.equal(all_of_them, batch.action_mask)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "none", "floor": 0.5}, "no weights to bound"),
        ({"level": "none", "outside": "mask"}, "no weights to bound"),
        ({"level": "none", "normalise": True}, "no weights to bound"),
        ({"outside": "mask", "cap": None}, "would mask nothing or all"),
        ({"outside": "mask", "cap": 1.0}, "would mask nothing or all"),
        ({"reject_above": 1.0}, "for rounding alone"),
        ({"reject_token_below": 1.0}, "for rounding alone"),
        ({"reject_k3_above": 0.0}, "for rounding alone"),
        ({"denominator": "kept"}, "the same as all"),
        ({"cap": 0.5}, "at least 1"),
        ({"floor": 2.0}, "at most 1"),
    ],
)
def test_options_that_do_nothing_or_harm_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make_manager().create("extension", {"name": "rollout_correction", **options})


def test_an_offline_algorithm_and_ratios_to_the_sampler_are_refused():
    def said(offline, old):
        config = SimpleNamespace(pipeline=SimpleNamespace(old_logprobs=old))
        return RolloutCorrection().validate(config, SimpleNamespace(offline=offline))

    assert "no sampler" in said(True, "auto")[0]
    assert "every weight would be 1" in said(False, "sampler")[0]
    assert said(False, "auto") == ()


class Plain(Algorithm[NoOptions]):
    """A policy gradient written without a thought of corrections."""

    def advantages(self, batch):
        return batch.scores[:, None] * batch.mask

    def loss(self, micro):
        return micro.loss(-micro.advantages * micro.logprobs, mode="seq_mean_token_sum")


VALUES = torch.tensor([1.0, -0.5, 0.2, 2.0, 0.0])


def sampled_gradient(policy, sampler, algorithm, options, size=4000):
    """The gradient by the logits of a policy of two independent tokens, from responses that `sampler` drew."""
    logits = policy.clone().requires_grad_()
    drawn = torch.multinomial(sampler.softmax(0), 2 * size, True, generator=torch.Generator().manual_seed(0))
    tokens = drawn.view(size, 2)
    rewards = VALUES[tokens].prod(dim=1) + VALUES[tokens].sum(dim=1)
    flat, one = tokens.flatten(), torch.ones(size, dtype=torch.bool)
    batch = Batch(
        prompts=[torch.tensor([0])] * size,
        lengths=torch.full((size,), 2),
        token_columns={
            "response": flat,
            "action_mask": torch.ones(2 * size, dtype=torch.bool),
            "rollout_logprobs": sampler.log_softmax(0)[flat],
            "versions": torch.zeros_like(flat),
        },
        sequence_columns={"groups": torch.zeros(size, dtype=torch.int64), "scores": rewards, "scored": one},
        task_ids=[""] * size,
        finish_reasons=["stop"] * size,
        metadata=[{}] * size,
    )
    logprobs = logits.log_softmax(0)[tokens]
    batch["old_logprobs"] = logprobs.detach()
    if options is not None:
        extension = make_manager().create_as(Extension, {"name": "rollout_correction", **options})
        old, other, mask = batch.old_logprobs, batch.rollout_logprobs, batch.mask
        rejected = extension.rejected(old, other, mask)
        batch["token_weights"] = extension.weights(extension.ratios(old, other, mask), rejected, mask)
    batch["advantages"] = batch.scores[:, None] * batch.mask
    algorithm.loss(MicroBatch(batch, Totals.of(batch, response_limit=2), {"logprobs": logprobs})).value.backward()
    return logits.grad


def exact_gradient(policy):
    """The same on policy, without sampling: minus the gradient of the expected reward."""
    logits = policy.clone().requires_grad_()
    probs = logits.softmax(0)
    mean = (probs * VALUES).sum()
    (-(2 * mean + mean * mean)).backward()
    return logits.grad


@pytest.mark.parametrize("algorithm", ["plain", "grpo", "cispo"])
@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({"level": "token", "cap": 3.0}, 0.7),
        ({"level": "token", "cap": 3.0, "outside": "mask", "floor": 0.2}, 0.7),
        ({"level": "sequence", "cap": 8.0}, 0.4),
        ({"level": "sequence", "cap": None, "normalise": True}, 0.4),
    ],
)
def test_a_corrected_gradient_is_closer_to_the_one_on_policy(algorithm, options, factor):
    made = (
        Plain()
        if algorithm == "plain"
        else make_manager().create_as(Algorithm, {"name": algorithm, "aggregation": "seq_mean_token_sum"})
    )
    policy = torch.tensor([0.3, -0.2, 0.5, 0.0, -0.4])
    sampler = policy + torch.tensor([0.8, -0.6, 0.0, -0.7, 0.4])
    exact = exact_gradient(policy)
    on_policy = sampled_gradient(policy, policy, made, None)
    assert float((on_policy - exact).norm()) < 0.1 * float(exact.norm())
    astray = float((sampled_gradient(policy, sampler, made, None) - exact).norm())
    corrected = float((sampled_gradient(policy, sampler, made, options) - exact).norm())
    assert corrected < factor * astray


class Perturbed(Extension[NoOptions]):
    """Makes the sampler's log-probs those of another sampler."""

    @hookimpl(wrapper=True)
    def rollstock_generate(self, run, tasks):
        batch = yield
        noise = 0.5 * torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(run.step))
        batch.set_flat("rollout_logprobs", batch.flat("rollout_logprobs") + noise * batch.flat("action_mask"))
        return batch


def test_without_a_mismatch_a_run_is_what_it_is_without_the_extension(steps_of_run):
    plain = steps_of_run("plain")
    options = {"name": "rollout_correction", "level": "sequence", "floor": 0.9, "cap": 1.1, "reject_above": 1.1}
    corrected = steps_of_run("corrected", extensions=[options])
    for mine, theirs in zip(plain, corrected, strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "reward/mean"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-4, abs=1e-6)
        assert theirs["rollout_corr/ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert theirs["rollout_corr/ratio_min"] == pytest.approx(1.0, abs=1e-4)
        assert theirs["rollout_corr/zero_share"] == theirs["rollout_corr/rejected_share"] == 0


@pytest.mark.parametrize("algorithm", [{"name": "grpo", "group_size": 4}, {"name": "ppo", "group_size": 4}])
@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_a_mismatch_is_measured_and_corrected_under_any_algorithm(steps_of_run, algorithm, denominator):
    options = {
        "name": "rollout_correction", "outside": "mask", "cap": 1.5, "floor": 0.7, "denominator": denominator,
    }  # fmt: skip
    with installed("extension", "perturbed", Perturbed):
        sections = {"algorithm": algorithm, "train": {"steps": 2, "prompts_per_step": 4, "mini_batches": 2}}
        plain = steps_of_run("plain", extensions=["perturbed"], **sections)
        corrected = steps_of_run("corrected", extensions=[options, "perturbed"], **sections)
    first, other = plain[0], corrected[0]
    assert other["reward/mean"] == first["reward/mean"]
    assert other["actor/pg_loss"] != first["actor/pg_loss"]
    assert other["rollout_corr/k3_kl"] > 0.01
    assert 0 < other["rollout_corr/zero_share"] < 1
    assert other["rollout_corr/zero_share"] == other["rollout_corr/masked_share"]
    assert 0 < other["rollout_corr/effective_sample_size"] < 1
    assert other["train/num_action_tokens"] == first["train/num_action_tokens"]


@pytest.mark.parametrize("options", [{"level": "sequence"}, {"outside": "mask", "cap": 1.5, "denominator": "kept"}])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_how_a_batch_is_cut_changes_no_corrected_gradient(steps_of_run, options, aggregation):
    algorithm = {"name": "grpo", "group_size": 4, "aggregation": aggregation}
    extensions = [{"name": "rollout_correction", **options}, "perturbed"]
    found = []
    with installed("extension", "perturbed", Perturbed):
        for tokens in (10_000, 8):
            scheduler = {"name": "dynamic_batch", "tokens_per_micro_batch": tokens, "keep_groups": False}
            sections = {"algorithm": algorithm, "extensions": extensions, "scheduler": scheduler}
            found.append(steps_of_run(f"cut-{tokens}", "train.steps=1", **sections)[0])
    whole, cut = found
    assert whole["rollout_corr/weight_mean"] != pytest.approx(1.0, abs=1e-3)
    for name in ("actor/pg_loss", "actor/grad_norm"):
        assert cut[name] == pytest.approx(whole[name], rel=1e-4)


def test_two_extensions_in_one_run(steps_of_run):
    both = [{"name": "kl_in_reward", "coef": 0.1}, {"name": "rollout_correction", "level": "sequence"}]
    for metrics in steps_of_run("run", extensions=both):
        assert metrics["rollout_corr/weight_mean"] == pytest.approx(1.0, abs=1e-4)
        assert metrics["actor/kl_coef"] == 0.1


class Off(Extension[NoOptions]):
    """A sampler whose log-probs are all off by 0.1, so that every ratio to it begins at exp(0.1)."""

    @hookimpl(wrapper=True)
    def rollstock_generate(self, run, tasks):
        batch = yield
        sampled = batch.flat("rollout_logprobs")
        batch.set_flat("rollout_logprobs", torch.where(batch.flat("action_mask"), sampled - 0.1, sampled))
        return batch


def test_the_clip_can_be_around_the_sampler_in_place_of_a_correction(steps_of_run):
    algorithm = {"name": "grpo", "group_size": 4, "clip": 0.05}
    sections = {"algorithm": algorithm, "extensions": ["off"], "train": {"steps": 1, "prompts_per_step": 8}}
    with installed("extension", "off", Off):
        ((plain,), (held,)) = (
            steps_of_run(old, pipeline={"mode": "sync", "old_logprobs": old}, **sections) for old in ("auto", "sampler")
        )
    assert plain["actor/pg_clipfrac"] == 0  # the ratio to what the trainer itself says is 1
    assert plain["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert held["actor/pg_clipfrac"] > 0
    assert held["actor/ppo_kl"] == pytest.approx(-0.1, abs=1e-4)


def test_without_a_mismatch_it_does_not_matter_whose_log_probs_are_the_old_ones(steps_of_run):
    sections = {"train": {"steps": 2, "prompts_per_step": 4, "mini_batches": 2}}
    plain, held = (
        steps_of_run(old, pipeline={"mode": "sync", "old_logprobs": old}, **sections) for old in ("auto", "sampler")
    )
    for mine, theirs in zip(plain, held, strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "reward/mean"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "old", "said"),
    [("grpo", "recompute", "since the mode sync does so"), ("sft", "sampler", "'sft' reads no old log-probs")],
)
def test_old_log_probs_that_change_nothing_are_refused(steps_of_run, algorithm, old, said):
    with pytest.raises(ConfigError, match=said):
        steps_of_run("run", pipeline={"mode": "sync", "old_logprobs": old}, algorithm=algorithm)
