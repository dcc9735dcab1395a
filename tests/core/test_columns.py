"""Who provides the columns that an algorithm declared."""

import pytest

from rollstock.columns import ALWAYS, PLAYED, SOURCES, roles_needed, to_compute
from rollstock.errors import ConfigError


@pytest.mark.parametrize(
    ("needs", "roles"),
    [
        (set(), []),
        ({"scores", "groups", "mask"}, []),
        ({"old_logprobs", "old_entropy"}, []),
        ({"ref_logprobs"}, ["reference"]),
        ({"values", "ref_logprobs", "old_logprobs"}, ["critic", "reference"]),
    ],
)
def test_roles_follow_from_columns(needs, roles):
    assert roles_needed("mine", needs, frozenset()) == roles


def test_greedy_scores_start_no_role_and_are_no_forward_pass():
    needs = {"greedy_scores", "greedy_scored", "old_logprobs"}
    assert roles_needed("mine", needs, frozenset()) == []
    assert to_compute(needs, frozenset(), []) == {"actor": [("logprobs", "old_logprobs")]}


def test_a_column_of_an_extension_starts_no_role():
    assert roles_needed("mine", {"hint", "values"}, {"hint", "values"}) == []


def test_a_column_that_nobody_provides_is_refused_with_the_nearest_that_exist():
    with pytest.raises(ConfigError) as caught:
        roles_needed("mine", {"ref_logprob"}, {"hint"})
    message = str(caught.value)
    assert "algorithm 'mine' needs the column 'ref_logprob', which no role and no extension" in message
    assert "Did you mean 'ref_logprobs'?" in message
    assert "hint" in message
    assert "`provides`" in message


def test_a_column_that_an_extension_needs_in_vain_is_refused_in_its_name():
    with pytest.raises(ConfigError, match="extension 'mine' needs the column 'hint'"):
        roles_needed("mine", {"hint"}, frozenset(), kind="extension")


def test_each_role_is_asked_once_for_all_of_its_columns():
    needs = {"old_logprobs", "old_entropy", "ref_logprobs", "scores"}
    assert to_compute(needs, frozenset(), []) == {
        "actor": [("entropy", "old_entropy"), ("logprobs", "old_logprobs")],
        "reference": [("logprobs", "ref_logprobs")],
    }


def test_what_is_there_already_is_not_computed_again():
    assert to_compute({"old_logprobs", "values"}, {"values"}, ["old_logprobs"]) == {}


def test_no_column_comes_from_two_sides():
    assert not ALWAYS & SOURCES.keys()
    assert not PLAYED & (ALWAYS | SOURCES.keys())


def test_a_policy_with_a_value_head_gives_the_values_and_needs_no_critic():
    needs = {"values", "old_logprobs", "ref_logprobs"}
    assert roles_needed("mine", needs, frozenset(), head="lm+value") == ["reference"]
    assert to_compute(needs, frozenset(), [], head="lm+value") == {
        "actor": [("logprobs", "old_logprobs"), ("values", "values")],
        "reference": [("logprobs", "ref_logprobs")],
    }


def test_a_reward_model_has_no_log_probs_of_its_own():
    with pytest.raises(ConfigError, match="needs the column 'old_logprobs', which no role"):
        roles_needed("mine", {"old_logprobs"}, frozenset(), head="score")
