"""Calls are split over workers and put together again, whatever the number of workers."""

import pytest
import torch

from rollstock import Batch, Completion, GenerationRequest, GenerationResult, Metric, RunError, Trajectory
from rollstock.dispatch import Registration, gather, register, registration, split_call, worth_sending


class Worker:
    @register(dispatch="scatter")
    def forward(self, batch, scale):
        lengths = batch.lengths.tolist()
        return {"logprobs": list((batch.flat("response").float() * scale).split(lengths))}

    @register(dispatch="scatter")
    def generate(self, requests):
        done = [Completion(tokens=[r.seed], logprobs=[0.0], finish_reason="stop", versions=[0]) for r in requests]
        return GenerationResult(done, {"n": Metric(len(requests), 1.0, "sum")})

    @register(dispatch="scatter", sync=False)
    def update(self, batch):
        return {"loss": Metric(float(batch.lengths.sum()), float(len(batch)))}

    @register(dispatch="rank_zero")
    def weights(self):
        return ["w"]

    @register()
    def name(self):
        return "x"

    def unmarked(self):
        raise AssertionError


def call(num_workers, method, *args):
    workers = [Worker() for _ in range(num_workers)]
    shares = split_call(registration(Worker, method), num_workers, args)
    results = [getattr(w, method)(*a) for w, a in zip(workers, shares.arguments, strict=False)]
    return len(results), gather(results, shares)


@pytest.fixture
def batch():
    return Batch.from_trajectories(
        [
            Trajectory(
                prompt=torch.tensor([1]),
                response=torch.arange(n),
                action_mask=torch.ones(n, dtype=torch.bool),
                rollout_logprobs=torch.zeros(n),
                versions=torch.zeros(n, dtype=torch.int64),
                group=i,
            )
            for i, n in enumerate([3, 0, 9, 1, 4])
        ]
    )


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 7])
def test_columns_come_back_in_the_order_of_the_whole(batch, num_workers):
    _, found = call(num_workers, "forward", batch, 2.0)
    assert torch.equal(found["logprobs"], batch.flat("response").float() * 2)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 8])
def test_completions_come_back_in_order_and_prompts_stay_together(num_workers):
    requests = [GenerationRequest(prompt=(p,), seed=10 * p + k) for p in range(3) for k in range(2)]
    shares = split_call(registration(Worker, "generate"), num_workers, (requests,))
    homes = {}
    for rank, (mine,) in enumerate(shares.arguments):
        for request in mine:
            homes.setdefault(request.prompt, set()).add(rank)
    assert all(len(ranks) == 1 for ranks in homes.values())
    _, found = call(num_workers, "generate", requests)
    assert [c.tokens for c in found.completions] == [[r.seed] for r in requests]
    assert found.metrics["n"].value == 6


def test_metrics_of_all_ranks_are_merged_by_their_reducer(batch):
    _, found = call(3, "update", batch)
    assert found["loss"].weight == 5
    alone = call(1, "update", batch)[1]
    # sums of lengths weighted by trajectories: not linear, so only the weight is comparable across cuts
    assert alone["loss"].value == 17.0


def test_rank_zero_and_broadcast_call_as_many_as_they_say():
    assert call(4, "weights") == (1, ["w"])
    assert call(4, "name") == (4, "x")


def test_a_scattered_batch_is_balanced_by_tokens(batch):
    shares = split_call(registration(Worker, "update"), 2, (batch,))
    loads = [sum(part.total_lengths()) for (part,) in shares.arguments]
    assert sum(loads) == 22
    assert abs(loads[0] - loads[1]) <= 2


def test_an_unmarked_method_is_named_with_those_that_are_marked():
    with pytest.raises(
        RunError, match="no registered method 'unmarked'; it has: forward, generate, name, update, weights"
    ):
        registration(Worker, "unmarked")


def test_only_batches_and_requests_can_be_scattered():
    with pytest.raises(RunError, match="not dict"):
        split_call(registration(Worker, "update"), 2, ({},))


@pytest.mark.parametrize(("equal_counts", "sizes"), [(False, [1, 4]), (True, [2, 3])])
def test_parts_may_be_asked_to_have_equally_many_trajectories(batch, equal_counts, sizes):
    """One of 10 tokens beside four with 5 in all: balanced by tokens it stands alone."""
    uneven = batch.select([2, 1, 1, 1, 3])
    shares = split_call(Registration("scatter", True, equal_counts=equal_counts), 2, (uneven,))
    assert sorted(len(part) for (part,) in shares.arguments) == sizes


def test_workers_of_one_data_parallel_group_get_the_same_share_and_the_first_of_them_answers():
    marker = Registration("data_parallel", True, places=True)
    shares = split_call(marker, [1, 0, 1, 0], (list("abcd"), "rest"))
    assert shares.arguments == [(["c", "d"], "rest"), (["a", "b"], "rest")] * 2
    assert [shares.keywords(rank) for rank in range(4)] == [{"places": [2, 3]}, {"places": [0, 1]}] * 2
    answers = [[item.upper() for item in mine] for mine, _ in shares.arguments]
    sent = [worth_sending(marker, answer, answers=rank in shares.answering, rank=rank)
            for rank, answer in enumerate(answers)]  # fmt: skip
    assert sent == [["C", "D"], ["A", "B"], None, None]
    assert gather(sent, shares) == ["A", "B", "C", "D"]


def test_a_method_of_other_roles_is_refused_with_theirs():
    class Model:
        @register(role=("actor", "critic"))
        def update(self):
            return None

    assert registration(Model, "update", "actor").roles == ("actor", "critic")
    with pytest.raises(RunError, match="the role 'reference' has no method 'update'; these have: actor, critic"):
        registration(Model, "update", "reference")


def test_what_cannot_be_put_together_is_refused_by_its_type():
    shares = split_call(Registration("scatter", True), 2, ([1, 2],))
    with pytest.raises(RunError, match="cannot gather int, which has no class method `gathered`"):
        gather([1, 2], shares)
    with pytest.raises(RunError, match="takes what is to be split as its first positional argument"):
        split_call(Registration("scatter", True), 2, ())
