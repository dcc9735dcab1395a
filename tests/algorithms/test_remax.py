"""ReMax: the score of the greedy response as the baseline."""

import pytest
import torch

from rollstock.algorithms.remax import ReMax


def with_greedy(batch, scores, scored):
    batch["greedy_scores"], batch["greedy_scored"] = torch.tensor(scores), torch.tensor(scored)
    return batch


def test_the_advantage_is_the_lead_over_the_greedy_response(make_batch):
    batch = with_greedy(make_batch([[1, 0, 1], [1], []], [1.0, 0.25, 1.0]), [0.25, 1.0, 0.0], [True] * 3)
    assert ReMax().advantages(batch).tolist() == [[0.75, 0.0, 0.75], [-0.75, 0.0, 0.0], [0.0] * 3]


def test_without_a_score_of_the_greedy_response_there_is_no_signal(make_batch):
    batch = with_greedy(make_batch([[1, 1], [1, 1]], [1.0, 1.0]), [0.0, 0.0], [True, False])
    assert ReMax().advantages(batch).tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_one_sample_a_prompt_is_enough_and_the_greedy_score_is_declared():
    assert ReMax().samples_per_prompt == 1
    assert ReMax().needed_columns() == {"old_logprobs", "greedy_scores"}


def test_greedy_samples_are_refused_with_the_reason(small_config):
    (problem,) = ReMax().validate(small_config("sampling.temperature=0"))
    assert problem == (
        "sampling.temperature: 0 makes each sample the greedy response, its baseline, so each advantage is 0: raise it"
    )


@pytest.mark.parametrize("scores", [[0.0, 0.0], [1.0, 1.0]])
def test_equal_samples_still_say_something_about_the_greedy_response(make_batch, scores):
    batch = with_greedy(make_batch([[1], [1]], scores), [0.5, 0.5], [True, True])
    assert ReMax().advantages(batch).flatten().tolist() == [scores[0] - 0.5] * 2
