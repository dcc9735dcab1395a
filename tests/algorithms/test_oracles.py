"""rollstock's plugins give the numbers that verl and TRL gave for the same random batches, or differ on purpose.

The batches and the peers' answers are stored in `fixtures/` by `benchmarks/oracles/run.py --fixtures`; the cases and
rollstock's side of them are the scripts of that folder.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "oracles"))

import compare
import draws
import rollstock_side
import trl_cases
import verl_cases
from cases import Case, takes

FIXTURES = Path(__file__).parent / "fixtures"
DRAWS = draws.load(FIXTURES / "draws.safetensors")
ANSWERS = {peer: draws.load(FIXTURES / f"{peer}.safetensors") for peer in ("verl", "trl")}
LISTS: dict[str, Any] = {"verl": verl_cases, "trl": trl_cases}
TOLERANCE = 1e-6


def runs(which: str) -> list[Any]:
    """(peer, case, draw) for every case of the lists of this name."""
    return [
        pytest.param(peer, case, draw, id=f"{peer}: {case.name}: {draw}")
        for peer, lists in LISTS.items()
        for case in getattr(lists, which)
        for draw in DRAWS
        if takes(case, draw)
    ]


def each(which: str) -> list[Any]:
    """(peer, case) for every case of the lists of this name."""
    return [
        pytest.param(peer, case, id=f"{peer}: {case.name}")
        for peer, lists in LISTS.items()
        for case in getattr(lists, which)
    ]


def case_of(peer: str, name: str) -> Case:
    found: Case = next(case for case in (*LISTS[peer].CASES, *LISTS[peer].DIFFERENT) if case.name == name)
    return found


def both(peer: str, name: str, sort: str) -> tuple[dict[str, Tensor], dict[str, Tensor], draws.Columns]:
    """Our answers and the peer's to a case, and the numbers they are about."""
    case, columns = case_of(peer, name), DRAWS[f"{sort}@0"]
    return rollstock_side.answer(columns, case), compare.of_case(case, ANSWERS[peer][f"{sort}@0"]), columns


def close(ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("peer", "case", "draw"), runs("CASES"))
def test_values_and_gradients_are_the_peers(peer: str, case: Case, draw: str) -> None:
    columns = DRAWS[draw]
    theirs = compare.of_case(case, ANSWERS[peer][draw])
    gaps = compare.differences(case, rollstock_side.answer(columns, case), theirs, columns["mask"])
    assert max(gaps.values()) < case.tolerance, gaps


@pytest.mark.parametrize(("peer", "case"), each("CASES"))
def test_the_stored_answers_are_numbers_and_not_all_of_them_0(peer: str, case: Case) -> None:
    answers = [compare.of_case(case, ANSWERS[peer][draw]) for draw in DRAWS if takes(case, draw)]
    for name in case.outputs or answers[0]:
        assert all(bool(torch.isfinite(answer[name]).all()) for answer in answers), name
        assert any(bool(answer[name].any()) for answer in answers), name


@pytest.mark.parametrize(("peer", "case"), each("DIFFERENT"))
def test_what_differs_on_purpose_does_differ_and_says_why(peer: str, case: Case) -> None:
    gaps = [
        gap
        for draw, columns in DRAWS.items()
        if takes(case, draw)
        for gap in compare.differences(
            case,
            rollstock_side.answer(columns, case),
            compare.of_case(case, ANSWERS[peer][draw]),
            columns["mask"],
        ).values()
    ]
    assert max(gaps) > 10 * TOLERANCE
    assert case.why


@pytest.mark.parametrize(("peer", "case", "draw"), runs("CASES"))
def test_float32_gives_the_same_to_its_own_precision(peer: str, case: Case, draw: str) -> None:
    columns = {name: x.float() if x.is_floating_point() else x for name, x in DRAWS[draw].items()}
    theirs = compare.of_case(case, ANSWERS[peer][draw])
    gaps = compare.differences(case, rollstock_side.answer(columns, case), theirs, columns["mask"])
    assert max(gaps.values()) < 1e-5, gaps


class TestVerl:
    @pytest.mark.parametrize("name", ["grpo, a group of one", "rloo, a group of one"])
    def test_keeps_the_raw_score_of_a_group_of_one(self, name: str) -> None:
        ours, theirs, columns = both("verl", name, "lone")
        sizes = columns["groups"].bincount()
        alone = sizes[columns["groups"]] == 1
        assert not ours["advantages"][alone].any()
        close(theirs["advantages"][alone], (columns["scores"][:, None] * columns["mask"])[alone])
        close(ours["advantages"][~alone], theirs["advantages"][~alone])

    def test_gpg_weighs_by_rewards_that_are_0_and_not_by_groups_that_are_uniform(self) -> None:
        ours, theirs, columns = both("verl", "gpg, weight of the batch", "special")
        scores, groups = columns["scores"], columns["groups"]
        uniform = torch.stack([scores[groups == g].std() == 0 for g in groups])
        share = (~uniform).double().mean() / (scores != 0).double().mean()
        assert uniform.any()
        close(ours["advantages"] * share, theirs["advantages"])

    def test_geo_mean_counts_responses_without_tokens(self) -> None:
        ours, theirs, columns = both("verl", "geo_mean, with an empty response", "special")
        acting = columns["mask"].any(1)
        assert not acting.all()
        for name in ("loss", "gradient"):
            close(ours[name] * acting.double().mean(), theirs[name])

    def test_geo_mean_and_sapo_ignore_the_aggregation(self) -> None:
        for name, default in (("geo_mean, token-sum", "geo_mean"), ("sapo, token-mean", "sapo")):
            _, asked, _ = both("verl", name, "plain")
            _, plain, _ = both("verl", default, "plain")
            assert torch.equal(asked["gradient"], plain["gradient"])

    def test_clip_cov_keeps_the_loss_of_clipped_tokens_but_no_gradient(self) -> None:
        ours, theirs, _ = both("verl", "clip_cov, clipped tokens among those held back", "turns")
        close(ours["gradient"], theirs["gradient"])
        assert abs(float(ours["loss"] - theirs["loss"])) > 10 * TOLERANCE

    def test_kl_cov_chooses_anew_at_each_update(self) -> None:
        case = case_of("verl", "kl_cov, a later update of the step")
        columns = DRAWS["turns@0"]
        theirs = compare.of_case(case, ANSWERS["verl"]["turns@0"])
        anew = Case("", case.kind, "", case.ours, our_options={"fraction": 0.1, "cov_coef": 0.7})
        close(rollstock_side.answer(columns, anew)["gradient"][columns["mask"]], theirs["gradient"][columns["mask"]])

    def test_the_kl_term_is_not_weighted(self) -> None:
        ours, theirs, columns = both("verl", "vanilla with rollout_is_weights and kl loss", "turns")
        mask = columns["mask"]
        minus = (columns["ref_logprobs"] - columns["logprobs"])[mask]
        k3 = minus.exp() - minus - 1
        close(ours["loss"] - theirs["loss"], 0.1 * ((columns["rollout_weights"][mask] - 1) * k3).mean())

    def test_k3_is_cut_off_at_10(self) -> None:
        ours, theirs, columns = both("verl", "kl_penalty, k3, far off", "special")
        mask = columns["mask"]
        far = mask & (ours["value"] > 10)
        assert far.any()
        assert bool((theirs["value"][far] == 10).all())
        assert not theirs["gradient"][far].any()
        close(ours["value"][mask & ~far], theirs["value"][mask & ~far])
        close(ours["gradient"][mask & ~far], theirs["gradient"][mask & ~far])

    def test_the_controller_is_told_the_divergence_of_a_token(self) -> None:
        ours, theirs, columns = both("verl", "KL penalty in the reward", "plain")
        mask = columns["mask"]
        kl = torch.where(mask, columns["old_logprobs"] - columns["ref_logprobs"], 0.0).sum(1)
        close(theirs["measured"], (kl / mask.sum(1)).mean())
        close(ours["measured"], kl.mean())
        close(ours["rewards"][mask], theirs["rewards"][mask])

    def test_rollout_correction_had_something_to_correct(self) -> None:
        mask = DRAWS["turns@0"]["mask"]
        for name in ("IcePop", "rejected by geometric mean", "rejected by one token", "weighted and rejected"):
            _, theirs, _ = both("verl", f"rollout correction, {name}", "turns")
            weights = theirs["weights"][mask]
            assert 0 < int((weights == 0).sum()) < len(weights), name
        _, truncated, _ = both("verl", "rollout correction, token, truncated", "turns")
        assert float(truncated["weights"].max()) == pytest.approx(1.3)


class TestTRL:
    def test_adds_1e_4_to_the_standard_deviation(self) -> None:
        ours, theirs, columns = both("trl", "grpo advantages", "plain")
        deviation = torch.stack([columns["scores"][columns["groups"] == g].std() for g in columns["groups"]])
        close(ours["advantages"] * ((deviation + 1e-6) / (deviation + 1e-4))[:, None], theirs["advantages"])

    def test_counts_responses_without_tokens(self) -> None:
        ours, theirs, columns = both("trl", "grpo, with an empty response", "special")
        share = columns["mask"].any(1).double().mean()
        for name in ("loss", "gradient"):
            close(ours[name] * share, theirs[name])

    def test_multiplies_the_kl_estimate_by_the_ratio(self) -> None:
        ours, theirs, columns = both("trl", "dapo with kl, TRL's default", "plain")
        mask = columns["mask"]
        new, old, ref = (columns[f"{name}logprobs"][mask] for name in ("", "old_", "ref_"))
        k3 = (ref - new).exp() - (ref - new) - 1
        close(theirs["loss"] - ours["loss"], 0.1 * (((new - old).exp() - 1) * k3).mean())

    def test_rloo_clips_the_ratio_of_the_whole_response(self) -> None:
        _, theirs, columns = both("trl", "rloo, a later update of the step", "turns")
        mask = columns["mask"]
        log_ratio = torch.where(mask, columns["logprobs"] - columns["old_logprobs"], 0.0).sum(1)
        ratio, advantages = log_ratio.exp(), columns["sequence_advantages"]
        losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
        close(theirs["loss"], losses.mean())

    def test_ipo_compares_means_of_log_probs(self) -> None:
        sums, theirs, _ = both("trl", "dpo ipo, sums of log-probs", "plain")
        means, _, _ = both("trl", "dpo ipo", "plain")
        close(means["loss"], theirs["loss"])
        assert abs(float(sums["loss"] - theirs["loss"])) > 10 * TOLERANCE

    def test_a_pair_with_an_empty_response_counts(self) -> None:
        ours, theirs, columns = both("trl", "dpo, with an empty response", "special")
        mask = columns["mask"]
        pairs = len(mask) // 2
        gaps = torch.where(mask, columns["logprobs"] - columns["ref_logprobs"], 0.0).sum(1)
        assert not mask[-1].any()
        lone = -torch.nn.functional.logsigmoid(0.1 * gaps[pairs - 1])
        close(theirs["loss"] * pairs, ours["loss"] * pairs + lone)

    def test_the_sft_term_of_dpo_is_a_mean_over_all_chosen_tokens(self) -> None:
        _, theirs, columns = both("trl", "dpo with sft", "plain")
        plain, _, _ = both("trl", "dpo sigmoid", "plain")
        chosen = columns["mask"][: len(columns["mask"]) // 2]
        nll = -columns["logprobs"][: len(chosen)][chosen].mean()
        close(theirs["loss"], plain["loss"] + 0.5 * nll)


class TestPage:
    PAGE = (Path(__file__).parents[2] / "docs" / "explanation" / "checked-against.md").read_text(encoding="utf-8")

    def rows(self, peer: str) -> dict[str, list[str]]:
        """The cells of the page's rows after the case's name, of both tables of a peer."""
        found = {}
        for title in (f"## {peer}\n", f"## {peer}, different on purpose\n"):
            section = self.PAGE.split(title)[1].split("\n## ")[0]
            lines = [line for line in section.splitlines() if line.startswith("|")]
            found |= {cells[1]: cells[2:] for cells in ([x.strip() for x in line.split("|")] for line in lines[2:])}
        return found

    @pytest.mark.parametrize("peer", LISTS)
    def test_it_has_every_case_and_nothing_else(self, peer: str) -> None:
        rows = self.rows({"trl": "TRL"}.get(peer, peer))
        cases = [*LISTS[peer].CASES, *LISTS[peer].DIFFERENT]
        assert list(rows) == [case.name for case in cases]
        for case in cases:
            assert rows[case.name][0] == f"`{case.ours}`"
            assert not case.why or rows[case.name][3] == case.why

    @pytest.mark.parametrize(("peer", "case"), each("CASES"))
    def test_its_differences_are_at_least_those_of_the_stored_batches(self, peer: str, case: Case) -> None:
        (row,) = compare.compare([case], DRAWS, ANSWERS[peer], rollstock_side.answer)
        _, value, gradient, *_ = self.rows({"trl": "TRL"}.get(peer, peer))[case.name]
        for measured, printed in ((row.value, value), (row.gradient, gradient)):
            # One digit is printed; another processor rounds otherwise in the last digits of a sum.
            assert (measured is None) == (printed == "")
            assert measured is None or measured <= max(2 * float(printed), 1e-5 * case.tolerance)
