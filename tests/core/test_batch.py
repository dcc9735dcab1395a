"""Trajectories in columns: flat inside, padded views outside."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollstock import Batch, Trajectory
from rollstock.testing import make_trajectory


def trajectory(prompt, response, *, mask=None, group=0, reward=1.0):
    mask = [True] * len(response) if mask is None else mask
    return Trajectory(
        prompt=torch.tensor(prompt, dtype=torch.int64),
        response=torch.tensor(response, dtype=torch.int64),
        action_mask=torch.tensor(mask, dtype=torch.bool),
        rollout_logprobs=torch.tensor([-float(t) if m else 0.0 for t, m in zip(response, mask, strict=True)]),
        versions=torch.tensor([3 if m else -1 for m in mask], dtype=torch.int64),
        group=group,
        reward=reward,
        task_id=f"task{group}",
    )


@pytest.fixture
def batch():
    return Batch.from_trajectories(
        [
            trajectory([1, 2], [5, 6, 2], group=0, reward=1.0),
            trajectory([1], [], group=1, reward=None),
            trajectory([1, 2, 3], [7, 8, 9, 2], mask=[True, False, False, True], group=1, reward=-1.0),
        ]
    )


def test_columns_are_right_padded_views_of_flat_tensors(batch):
    assert batch.flat("response").tolist() == [5, 6, 2, 7, 8, 9, 2]
    assert batch.response(2).tolist() == [7, 8, 9, 2]
    assert batch["response"].tolist() == [[5, 6, 2, 0], [0, 0, 0, 0], [7, 8, 9, 2]]
    assert batch.mask.tolist() == [[True] * 3 + [False], [False] * 4, [True, False, False, True]]
    assert batch.lengths.tolist() == [3, 0, 4]
    assert batch.total_lengths() == [5, 1, 7]


def test_the_mask_never_comes_from_token_ids_so_pad_may_equal_eos(cases):
    case = cases["eos_is_pad"]
    ended = case["completion_ids"].index(case["eos_id"]) + 1
    short = trajectory([1], case["completion_ids"][:ended])
    long = trajectory([1], [9] * len(case["completion_ids"]))
    mask = Batch.from_trajectories([short, long]).mask[0].int().tolist()
    assert mask == case["right_action_mask"]
    assert mask != case["wrong_by_id"]


def test_a_reward_of_none_is_not_a_score_of_zero(batch):
    assert batch.scores.tolist() == [1.0, 0.0, -1.0]
    assert batch.scored.tolist() == [True, False, True]


def test_setting_a_padded_column_keeps_only_real_places(batch):
    batch["advantages"] = torch.arange(12.0).reshape(3, 4)
    assert batch.flat("advantages").tolist() == [0.0, 1.0, 2.0, 8.0, 9.0, 10.0, 11.0]
    assert batch.advantages[1].tolist() == [0.0] * 4


def test_selecting_takes_rows_of_every_column_in_the_order_given(batch):
    batch["advantages"] = torch.arange(12.0).reshape(3, 4)
    part = batch.select([2, 0])
    assert part.groups.tolist() == [1, 0]
    assert part.task_ids == ["task1", "task0"]
    assert part.advantages.tolist() == [[8.0, 9.0, 10.0, 11.0], [0.0, 1.0, 2.0, 0.0]]
    assert len(batch.select([])) == 0


def test_concat_undoes_a_split(batch):
    batch["values"] = torch.rand(3, 4)
    whole = Batch.concat([batch.select([0]), batch.select([1, 2])])
    assert torch.equal(whole.flat("values"), batch.flat("values"))
    assert torch.equal(whole.groups, batch.groups)
    with pytest.raises(ValueError, match="different columns"):
        Batch.concat([batch, Batch.from_trajectories([trajectory([1], [2])])])


def test_a_missing_column_is_named_with_what_there_is(batch):
    with pytest.raises(AttributeError, match=r"no column 'values'.*rollout_logprobs.*declares it in its `needs`"):
        _ = batch.values
    with pytest.raises(KeyError, match="no token column 'scores'"):
        batch.flat("scores")


def test_a_column_of_the_wrong_size_or_sort_is_refused(batch):
    with pytest.raises(ValueError, match="must have 3 rows"):
        batch["advantages"] = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="must have 7 rows"):
        batch.set_flat("advantages", torch.zeros(6))
    with pytest.raises(ValueError, match="is a sequence column"):
        batch.set_flat("scores", torch.zeros(7))
    with pytest.raises(ValueError, match="is a token column"):
        batch["response"] = torch.zeros(3)


def test_a_packed_stream_says_which_token_predicts_which(batch):
    packed = batch.packed()
    assert packed.tokens.tolist() == [1, 2, 5, 6, 2, 1, 1, 2, 3, 7, 8, 9, 2]
    assert packed.lengths.tolist() == [5, 1, 7]
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5, 6]
    assert packed.tokens[packed.predicts + 1].tolist() == packed.targets.tolist() == batch.flat("response").tolist()


def test_an_empty_prompt_cannot_be_packed():
    with pytest.raises(ValueError, match="empty prompt"):
        Batch.from_trajectories([trajectory([], [1])]).packed()


def test_padding_is_differentiable(batch):
    flat = torch.rand(7, requires_grad=True)
    (batch.pad(flat) * torch.arange(12.0).reshape(3, 4)).sum().backward()
    assert flat.grad.tolist() == [0.0, 1.0, 2.0, 8.0, 9.0, 10.0, 11.0]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.randoms())
def test_padding_and_unpadding_are_inverse_for_any_lengths(lengths, random):
    batch = Batch.from_trajectories([trajectory([1], [random.randrange(9) for _ in range(n)]) for n in lengths])
    flat = torch.rand(sum(lengths), 2)
    assert torch.equal(batch.unpad(batch.pad(flat)), flat)
    assert batch.pad(flat).shape == (len(lengths), max(lengths), 2)


def test_trajectories_of_a_control_policy_carry_observations_and_actions():
    episode = trajectory([1], [0, 1])
    episode.observations, episode.actions = torch.rand(2, 3), torch.rand(2, 1)
    episode.step_rewards = torch.tensor([0.5, 1.0])
    batch = Batch.from_trajectories([episode])
    assert batch.observations.shape == (1, 2, 3)
    assert batch.step_rewards.tolist() == [[0.5, 1.0]]


def routed_batch():
    """Two trajectories whose column has values for prompts too: 10 x trajectory + place."""
    trajectories = [trajectory([1, 2], [5, 6, 2]), trajectory([1, 2, 3], [7], group=1)]
    for i, each in enumerate(trajectories):
        each.routed_experts = (10 * i + torch.arange(len(each.prompt) + len(each.response)))[:, None, None].expand(
            -1, 3, 2
        )
    return Batch.from_trajectories(trajectories)


def test_a_column_may_have_values_for_prompts_which_stay_with_their_trajectories():
    batch = routed_batch()
    assert batch.flat("routed_experts").shape == (4, 3, 2)
    assert batch.packed_column("routed_experts")[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 10, 11, 12, 13]
    assert [part[:, 1, 1].tolist() for part in batch.prompt_column("routed_experts")] == [[0, 1], [10, 11, 12]]
    turned = batch.select([1, 0])
    assert turned.packed_column("routed_experts")[:, 0, 0].tolist() == [10, 11, 12, 13, 0, 1, 2, 3, 4]
    joined = Batch.concat([turned, batch]).to("cpu")
    assert len(joined.packed_column("routed_experts")) == 18
    assert len(joined.packed_column("routed_experts")) == len(joined.packed().tokens)


def test_a_batch_can_be_had_without_a_column():
    batch = routed_batch()
    less = batch.without("routed_experts")
    assert "routed_experts" in batch
    assert "routed_experts" not in less
    with pytest.raises(KeyError, match="with values for prompts"):
        less.packed_column("routed_experts")
    assert less.without("routed_experts") is less
    assert less.flat("response") is batch.flat("response")  # nothing else is copied
    less.set_flat("advantages", torch.zeros(4))
    assert "advantages" not in batch


def test_a_trajectory_without_experts_takes_the_column_from_all():
    trajectories = [trajectory([1, 2], [5]), trajectory([1], [5])]
    trajectories[0].routed_experts = torch.zeros(3, 1, 1, dtype=torch.uint8)
    assert "routed_experts" not in Batch.from_trajectories(trajectories)


@pytest.mark.parametrize("shortest", [0, 60, 200, 1200])  # tokens: by their places, some of each, row by row
def test_long_rows_are_cut_and_padded_as_short_ones_are(shortest: int) -> None:
    lengths = [shortest + extra for extra in (3, 0, 90, 7, 41)]
    whole = Batch.from_trajectories([make_trajectory(n, group=i, seed=i) for i, n in enumerate(lengths)])
    starts = [sum(lengths[:i]) for i in range(5)]
    flat = whole.flat("rollout_logprobs").requires_grad_()
    padded = whole.pad(flat)
    assert padded.shape == (5, max(lengths))
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        assert torch.equal(padded[i, :length], flat[start : start + length])
        assert not padded[i, length:].any()
    assert torch.equal(whole.unpad(padded), flat)
    (padded * padded).sum().backward()
    assert torch.equal(flat.grad, 2 * flat.detach())
    assert whole.mask.dtype == torch.bool
    order = [4, 0, 2, 2]
    part = whole.select(order)
    for name in ("response", "action_mask", "versions"):
        expected = torch.cat([whole.flat(name)[starts[i] : starts[i] + lengths[i]] for i in order])
        assert torch.equal(part.flat(name), expected)
    part["twice"] = part.pad(part.flat("response")) * 2
    assert torch.equal(part.flat("twice"), part.flat("response") * 2)
    assert len(whole.select([1])) == 1
    assert len(whole.select([])) == 0
