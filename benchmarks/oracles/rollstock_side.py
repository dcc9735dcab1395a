"""rollstock's answers, through the same plugin classes and batches as in a run.

For `run.py` and for the tests, which compare them with the peers' stored ones.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from cases import CLIP, MISMATCH, Case
from draws import RESPONSE_LIMIT, VOCABULARY, Columns
from torch import Tensor

from rollstock import Algorithm, Backend, Batch, Extension, Loss, Metrics, MicroBatch, ModelSpec, Totals
from rollstock.algorithms import functional as F
from rollstock.algorithms.kl_control import KLController, KLControlOptions
from rollstock.testing.models import get_device, plain_model
from rollstock.testing.subject import Subject

Results = dict[str, Tensor]

MODEL = Path(__file__).resolve().parents[2] / "tests" / "algorithms" / "fixtures" / "model"


def save_model(folder: Path) -> None:
    """Write a tiny random model, opinionated enough that its gradients are not all alike."""
    block = {
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "max_position_embeddings": 32,
        "initializer_range": 0.5,
        "tie_word_embeddings": True,
    }
    plain_model(ModelSpec(config=block, pad_token_id=0, eos_token_ids=(1,))).save_pretrained(folder)


def make_algorithm(name: str, options: Mapping[str, Any]) -> Algorithm[Any]:
    """An installed algorithm, by name, with these options."""
    subject: Subject[Algorithm[Any]] = Subject(Algorithm, name, options)
    return subject.make()


def make_batch(columns: Columns, *, step_rewards: bool = False) -> Batch:
    """The drawn numbers as a batch: token columns flat, cut where a response ends."""
    mask = columns["mask"]
    places = torch.arange(mask.shape[1])
    lengths = torch.where(mask, places + 1, 0).amax(1)
    inside = places < lengths[:, None]

    def flat(name: str) -> Tensor:
        return columns[name][inside]

    size = len(mask)
    tokens = {name: flat(name) for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs", "values", "returns")}
    if step_rewards:
        tokens["step_rewards"] = flat("step_rewards")
    return Batch(
        prompts=[row[row > 0] for row in columns["prompts"]],
        lengths=lengths,
        token_columns={
            "response": flat("tokens"),
            "action_mask": mask[inside],
            "versions": torch.zeros(int(inside.sum()), dtype=torch.int64),
            **tokens,
        },
        sequence_columns={
            "groups": columns["groups"],
            "scores": columns["scores"],
            "scored": torch.ones(size, dtype=torch.bool),
            "greedy_scores": columns["greedy_scores"],
            "greedy_scored": torch.ones(size, dtype=torch.bool),
        },
        task_ids=[""] * size,
        finish_reasons=["stop"] * size,
        metadata=[{} for _ in range(size)],
    )


def advantages(columns: Columns, case: Case) -> Results:
    """What the algorithm makes of the rewards of a batch."""
    options = dict(case.our_options)
    batch = make_batch(columns, step_rewards=options.pop("step_rewards", False))
    found = make_algorithm(case.ours, options).advantages(batch)
    given = {"advantages": found} if isinstance(found, Tensor) else dict(found)
    return {name: _widened(x, columns) for name, x in given.items() if name in ("advantages", "returns")}


def loss(columns: Columns, case: Case) -> Results:
    """The policy loss on given advantages, with its gradient by the log-probs."""
    options = dict(case.our_options)
    batch = make_batch(columns)
    drawn = columns["token_advantages"] if options.pop("token_advantages", False) else _spread(columns)
    batch["advantages"] = drawn[:, : batch.max_length] * batch.mask
    leaf = "old_logprobs" if options.pop("on_policy", False) else "logprobs"
    if options.pop("weights", False):
        batch["token_weights"] = columns["rollout_weights"][:, : batch.max_length]
    algorithm = make_algorithm(case.ours, options)
    return _differentiated(algorithm.loss, batch, columns, "logprobs", leaf)


def held_back_loss(columns: Columns, case: Case) -> Results:
    """The loss of a method that chooses tokens once a step, by covariance.

    The peer chooses in its loss, with the log-probs of the moment, so those are what the choice is made with here. The
    drawn advantages take the place of the group's.
    """
    options = dict(case.our_options)
    drawn = "old_logprobs" if options.pop("on_policy", False) else "logprobs"
    moment = options.pop("chosen_with", drawn)
    algorithm = make_algorithm(case.ours, options)
    vars(algorithm)["sequence_advantages"] = lambda batch: columns["sequence_advantages"]
    chosen = algorithm.advantages(make_batch({**columns, "old_logprobs": columns[moment]}))
    assert not isinstance(chosen, Tensor)
    batch = make_batch(columns)
    for name, x in chosen.items():
        batch[name] = x
    return _differentiated(algorithm.loss, batch, columns, "logprobs", drawn)


def dpo(columns: Columns, case: Case) -> Results:
    """The loss of pairs: the first half of a draw is chosen over the second."""
    algorithm = make_algorithm(case.ours, case.our_options)
    return _differentiated(algorithm.loss, _paired(columns), columns, "logprobs", "logprobs")


def _paired(columns: Columns) -> Batch:
    batch = make_batch(columns)
    pairs = len(batch) // 2
    batch["groups"] = torch.arange(pairs).repeat(2)
    batch["scores"] = torch.cat([torch.ones(pairs), torch.zeros(pairs)]).double()
    return batch


def reward_model(columns: Columns, case: Case) -> Results:
    """The loss of pairs, with its gradient by what the model says after the last token, `[B]`."""
    batch = _paired(columns)
    leaf = columns["heads"].clone().requires_grad_()
    totals = Totals.of(batch, response_limit=RESPONSE_LIMIT)
    micro = MicroBatch(batch, totals, {"token_scores": leaf[:, None].expand(batch.mask.shape)})
    value = make_algorithm(case.ours, case.our_options).loss(micro).value
    (gradient,) = torch.autograd.grad(value, leaf)
    return {"loss": value.detach(), "gradient": gradient}


def sft(columns: Columns, case: Case) -> Results:
    """The loss of demonstrations."""
    batch = make_batch({**columns, "scores": torch.ones_like(columns["scores"])})
    algorithm = make_algorithm(case.ours, case.our_options)
    found = algorithm.advantages(batch)
    assert isinstance(found, Tensor)
    batch["advantages"] = found
    return _differentiated(algorithm.loss, batch, columns, "logprobs", "logprobs")


def critic_loss(columns: Columns, case: Case) -> Results:
    """The critic's loss, with its gradient by the new values."""
    algorithm = make_algorithm(case.ours, case.our_options)
    return _differentiated(algorithm.critic_loss, make_batch(columns), columns, "values", "new_values")


def rollout_correction(columns: Columns, case: Case) -> Results:
    """What the extension weights tokens with and measures, and the loss of GRPO under it."""
    algorithm = make_algorithm("grpo", {**CLIP, "dual_clip": 3.0, "aggregation": "seq_mean_token_mean"})
    return _corrected(columns, case.our_options, algorithm, "logprobs")


def bypass(columns: Columns, case: Case) -> Results:
    """The loss of an algorithm under the extension, at the log-probs of before the update."""
    found = _corrected(columns, case.our_options, make_algorithm(case.ours, {}), "old_logprobs")
    return {name: found[name] for name in ("loss", "gradient")}


def _corrected(columns: Columns, options: Mapping[str, Any], algorithm: Algorithm[Any], drawn: str) -> Results:
    subject: Subject[Extension[Any]] = Subject(Extension, "rollout_correction", options)
    extension: Any = subject.make()
    batch = make_batch(columns)
    batch["advantages"] = _spread(columns)[:, : batch.max_length]
    metrics: Metrics = {}
    run = SimpleNamespace(record=metrics.update)
    _through(extension.rollstock_prepare(run, batch))
    weights = _widened(batch["token_weights"], columns)
    found: Results = {}

    def update() -> None:
        found.update(_differentiated(algorithm.loss, batch, columns, "logprobs", drawn))

    _through(extension.rollstock_update(run, batch), update)
    measured = [metrics[f"rollout_corr/{name}"].value for name in MISMATCH]
    return {"weights": weights, "metrics": torch.tensor(measured, dtype=torch.float64), **found}


def sampler_weights(columns: Columns, case: Case) -> Results:
    """What the extension weights tokens with, `[B, T]`."""
    return {"weights": rollout_correction(columns, case)["weights"]}


def kl_in_reward(columns: Columns, case: Case) -> Results:
    """Rewards of tokens after a KL penalty, and the divergence that the controller is told."""
    batch = make_batch(columns)
    algorithm: Any = make_algorithm(case.ours, case.our_options)
    rewards = _widened(algorithm.penalised_rewards(batch), columns)
    measured = algorithm.after_update(batch, {})["actor/kl_reward"].value
    return {"rewards": rewards, "measured": torch.tensor(measured, dtype=torch.float64)}


def _through(hook: Generator[None, Any, Any], inside: Callable[[], None] = lambda: None) -> None:
    """Run a hook wrapper around `inside`."""
    next(hook)
    inside()
    try:
        hook.send({})
    except StopIteration:
        return
    raise AssertionError("a hook wrapper yields once")


def through_model(columns: Columns, case: Case) -> Results:
    """A loss of the tiny model itself, the norm of its gradient, and what the model says of each token, `[B, T]`."""
    options = dict(case.our_options)
    temperature = options.pop("temperature", 1.0)
    algorithm = make_algorithm(case.ours, options)
    batch = _paired(columns) if case.ours == "dpo" else make_batch(columns)
    batch["advantages"] = (
        _spread(columns)[:, : batch.max_length] if case.ours not in ("dpo", "sft") else batch.mask.double()
    )
    backend: Backend[Any] = Subject(Backend, "torch", {"max_grad_norm": 1e9}).make()
    backend.setup(ModelSpec(path=str(MODEL)), get_device("cpu"), trainable=True, total_updates=1)
    cut = [list(range(len(batch)))]
    outputs = ("logprobs", "entropy")
    said = backend.forward(batch, outputs, temperature=temperature, micro_batches=cut)
    metrics = backend.update(
        batch,
        algorithm.loss,
        outputs=["logprobs"],
        temperature=temperature,
        micro_batches=cut,
        totals=Totals.of(batch, response_limit=RESPONSE_LIMIT),
    )
    value = metrics.get("actor/pg_loss", metrics.get("actor/loss"))
    assert value is not None
    numbers = {"loss": value.value, "grad_norm": metrics["grad_norm"].value}
    found = {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}
    if case.ours in ("dpo", "sft"):
        return found
    return {**found, **{name: _widened(batch.pad(said[name]), columns) for name in outputs}}


def kl(columns: Columns, case: Case) -> Results:
    """A KL estimate of each token, with the gradient of their sum."""
    leaf = columns["logprobs"].clone().requires_grad_()
    kind: Any = case.ours
    found = F.kl_estimate(leaf, columns["ref_logprobs"], kind=kind)
    (gradient,) = torch.autograd.grad(found[columns["mask"]].sum(), leaf)
    return {"value": found.detach(), "gradient": gradient}


def whiten(columns: Columns, case: Case) -> Results:
    """Whitening over unmasked values."""
    return {"value": F.masked_whiten(columns["values"], columns["mask"], **case.our_options)}


def logits(columns: Columns, case: Case) -> Results:
    """Log-probs and entropies from logits, with the gradient of a weighted sum of both."""
    leaf = columns["logits"].clone().requires_grad_()
    logprobs, entropy = F.logprobs_and_entropy(leaf, columns["tokens"], **case.our_options)
    total = (columns["values"] * logprobs + columns["returns"] * entropy)[columns["mask"]].sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    return {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "gradient": gradient}


def controller(columns: Columns, case: Case) -> Results:
    """The coefficients of the adaptive KL controller, fed with made-up divergences."""
    options = dict(case.our_options)
    num_samples = options.pop("num_samples")
    made = KLController(KLControlOptions(kl_control="horizon", **options))
    coefficients = []
    for measured in (10 * columns["margins"]).tolist():
        made.update(measured, num_samples)
        coefficients.append(made.coefficient)
    return {"value": torch.tensor(coefficients, dtype=torch.float64)}


def _differentiated(
    function: Callable[[MicroBatch], Loss], batch: Batch, columns: Columns, output: str, drawn: str
) -> Results:
    """The loss of a whole batch, and its gradient by one output of the model, `[B, T]`."""
    leaf = columns[drawn].clone().requires_grad_()
    totals = Totals.of(batch, response_limit=RESPONSE_LIMIT)
    value = function(MicroBatch(batch, totals, {output: leaf[:, : batch.max_length]})).value
    (gradient,) = torch.autograd.grad(value, leaf)
    return {"loss": value.detach(), "gradient": gradient}


def _spread(columns: Columns) -> Tensor:
    return columns["sequence_advantages"][:, None] * columns["mask"]


def _widened(x: Tensor, columns: Columns) -> Tensor:
    """`[B, T]` of a batch to the width of the draw."""
    return torch.nn.functional.pad(x, (0, columns["mask"].shape[1] - x.shape[1]))


KINDS: Mapping[str, Callable[[Columns, Case], Results]] = {
    "advantages": advantages,
    "loss": loss,
    "held_back_loss": held_back_loss,
    "dpo": dpo,
    "reward_model": reward_model,
    "sft": sft,
    "critic_loss": critic_loss,
    "through_model": through_model,
    "kl": kl,
    "whiten": whiten,
    "logits": logits,
    "controller": controller,
    "rollout_correction": rollout_correction,
    "bypass": bypass,
    "sampler_weights": sampler_weights,
    "kl_in_reward": kl_in_reward,
}


def answer(columns: Columns, case: Case) -> Results:
    """What rollstock says of one case."""
    return KINDS[case.kind](columns, case)
