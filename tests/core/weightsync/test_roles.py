"""Trainers and generators of a run after a sync: one fingerprint, with tied embeddings and with adapters alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rollstock import Batch, GenerationRequest, RunError, Sampling, Trajectory, UserError, fingerprint
from rollstock.build import choose, worker_spec
from rollstock.launch import train
from rollstock.micro import Totals

MODEL = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


class Side:
    """An actor and two generators with their transport, called as a controller calls them."""

    def __init__(self, config: Any) -> None:
        tokenizer = choose(config).tokenizer

        def make(role: str, rank: int, count: int) -> Any:
            spec = worker_spec(config, role, tokenizer)
            return spec.factory(**spec.kwargs, rank=rank, world_size=count)

        self.actor = make("actor", 0, 1)
        self.rollouts = [make("rollout", rank, 2) for rank in range(2)]
        self.version = 0

    def sync(self, *, adapters: bool = False, base: bool = False) -> dict[str, float]:
        self.version += 1
        inboxes = [rollout.weights_inbox() for rollout in self.rollouts]
        offer = self.actor.offer_weights(self.version, inboxes, adapters, base)
        for rollout in self.rollouts:
            rollout.take_weights(offer)
        return {name: metric.value for name, metric in self.actor.finish_offer().items()}

    def update(self) -> None:
        batch = Batch.from_trajectories(
            [
                Trajectory(
                    prompt=torch.tensor([1, 2]),
                    response=torch.tensor([3, 4 + i]),
                    action_mask=torch.ones(2, dtype=torch.bool),
                    rollout_logprobs=torch.full((2,), -1.0),
                    versions=torch.ones(2, dtype=torch.int64),
                    group=0,
                )
                for i in range(2)
            ]
        )
        batch["advantages"] = batch.mask.float()
        batch.set_flat("old_logprobs", batch.flat("rollout_logprobs"))
        before = self.actor.fingerprint()
        self.actor.update(batch, Totals.of(batch, response_limit=4), self.actor.algorithm.state())
        assert self.actor.fingerprint() != before

    def close(self) -> None:
        for worker in (self.actor, *self.rollouts):
            worker.close()


@pytest.fixture
def side(small_run: Any, tmp_path: Path, one_thread: None) -> Any:
    made: list[Side] = []

    def make(*overrides: str, **sections: Any) -> Side:
        model = {"config": MODEL, "tokenizer": {"characters": "0123456789+="}}
        sections = {"model": model, "transport": "shm", **sections}
        made.append(Side(small_run(tmp_path / "run", "weight_sync.chunk_mib=1", *overrides, **sections)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_tied_embeddings_are_sent_once_and_both_ends_use_the_new_ones(side: Any) -> None:
    both = side()
    names = {name for name, _ in both.actor.weights().weights}
    assert ("model.embed_tokens.weight" in names) != ("lm_head.weight" in names)
    asked = [GenerationRequest(prompt=(1, 2, 3), seed=1)]
    for _ in range(2):
        both.update()
        both.sync()
        for rollout in both.rollouts:
            assert rollout.fingerprint() == both.actor.fingerprint()
            model = rollout.engine._model
            head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
            trained = dict(both.actor.backend.weights())["model.embed_tokens.weight"]
            assert torch.equal(head, trained)
            assert torch.equal(embedding, trained)
            found = rollout.generate(asked, Sampling(max_new_tokens=3)).completions[0]
            assert set(found.versions) == {both.version}


LORA = {"name": "torch", "learning_rate": 1e-2, "lora": {"rank": 2}}


def test_adapters_alone_give_the_trainers_merged_weights_to_the_bit_and_are_a_small_message(side: Any) -> None:
    pytest.importorskip("peft")
    both = side(backend=LORA)
    assert [rollout.base_fingerprint() for rollout in both.rollouts] == ["", ""]
    sizes = [both.sync(adapters=True, base=True)["sync/bytes"]]
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)  # the trainer's products must not depend on it
        both.update()
        ours = both.actor.fingerprint()
        torch.set_num_threads(1)
        sizes.append(both.sync(adapters=True)["sync/bytes"])
        assert {rollout.fingerprint() for rollout in both.rollouts} == {ours}
    assert max(sizes[1:]) < sizes[0] / 2
    base = fingerprint(both.actor.backend.base_weights())
    assert {rollout.base_fingerprint() for rollout in both.rollouts} == {base, both.actor.base_fingerprint()}
    both.sync()
    assert {rollout.fingerprint() for rollout in both.rollouts} == {both.actor.fingerprint()}
    assert [rollout.base_fingerprint() for rollout in both.rollouts] == ["", ""]
    with pytest.raises(RunError, match="adapters came to a generator that has nothing to add them to"):
        both.sync(adapters=True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["transport=shm"], "transport: 'shm' would carry nothing, since the executor 'local' keeps everything in one"),
        (["transport=shm", "algorithm={name: sft}"], "transport: 'shm' would carry nothing, since nobody generates"),
        (["weight_sync.content=adapters"], "weight_sync.content: adapters are to be sent, and backend.lora.rank 0 has"),
        (["transport=shn"], "there is no transport 'shn'. Did you mean 'shm'"),
    ],
)
def test_what_would_do_nothing_is_refused(small_run: Any, tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(small_run(tmp_path / "run", *overrides))
