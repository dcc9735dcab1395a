"""The data of examples/rlhf is what its script writes, and its steps do what their comments say."""

import contextlib
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstock.config import load_config
from rollstock.export import export
from rollstock.launch import train
from rollstock.testing import read_metrics

ROOT = Path(__file__).parents[2]
RLHF = ROOT / "examples" / "rlhf"


def test_the_data_is_what_the_script_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(RLHF / "make_data.py"), str(tmp_path)], check=True)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_text() for path in (RLHF / "data").iterdir()}


def test_in_every_pair_the_right_response_is_the_chosen_one() -> None:
    largest, sums = (
        [json.loads(line) for line in (RLHF / "data" / name).read_text().splitlines()]
        for name in ("largest.jsonl", "sums.jsonl")
    )
    assert all(row["chosen"] == max(row["prompt"].rstrip("=").split(",")) != row["rejected"] for row in largest)
    for row in sums:
        a, b = (int(word) for word in row["prompt"].split("?")[0].split() if word.isdigit())
        assert row["chosen"] == str(a + b) != row["rejected"]


def losses(directory: Path) -> list[dict[str, float]]:
    return [row["evaluation"] for row in read_metrics(directory) if "evaluation" in row]


@pytest.fixture(scope="module")
def fine_tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The run of step 1, in a folder like the repository's root, which is the current directory; its export is made."""
    folder = tmp_path_factory.mktemp("root")
    for name in ("data", "rlhf"):
        shutil.copytree(ROOT / "examples" / name, folder / "examples" / name)
    with contextlib.chdir(folder):
        run = train(load_config("examples/rlhf/tiny-sft.yaml")).directory
        export(run, Path("models/tiny-sft"))
        yield folder / run


@pytest.mark.slow
def test_a_tiny_model_learns_demonstrations_and_then_preferences(fine_tuned: Path) -> None:
    before, *_, after = losses(fine_tuned)
    assert before["eval/loss"] > 2.0
    assert after["eval/loss"] < 1.2
    dpo = train(load_config("examples/rlhf/tiny-dpo.yaml"))
    before, *_, after = losses(dpo.directory)
    assert before["eval/rewards/margins"] == pytest.approx(0, abs=1e-3)
    assert after["eval/rewards/accuracies"] >= 0.95
    assert after["eval/rewards/margins"] > 0.3
    assert math.exp(after["eval/logps/chosen"]) > 1.5 * math.exp(before["eval/logps/chosen"])


@pytest.mark.slow
def test_a_tiny_model_learns_from_a_reward_model_that_learned_from_preferences(fine_tuned: Path) -> None:
    judge = train(load_config("examples/rlhf/tiny-reward-model.yaml"))
    before, *_, after = losses(judge.directory)
    assert before["eval/loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert after["eval/loss"] < 0.25
    assert after["eval/rewards/accuracies"] >= 0.9
    export(judge.directory, Path("models/tiny-reward-model"))
    policy = train(load_config("examples/rlhf/tiny-ppo.yaml"))
    before, *_, after = losses(policy.directory)
    assert after["eval/sampled/model_mean"] > before["eval/sampled/model_mean"] + 1.0
    assert after["eval/sampled/rule_mean"] > before["eval/sampled/rule_mean"] + 0.2
    assert not any(row["metrics"]["reward/num_unscored"] for row in read_metrics(policy.directory) if "metrics" in row)
