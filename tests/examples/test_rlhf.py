"""The data of examples/rlhf is what its script writes, and its first two steps do what their comments say."""

import json
import math
import shutil
import subprocess
import sys
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


@pytest.mark.slow
def test_a_tiny_model_learns_demonstrations_and_then_preferences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("data", "rlhf"):
        shutil.copytree(ROOT / "examples" / folder, tmp_path / "examples" / folder)
    monkeypatch.chdir(tmp_path)
    sft = train(load_config("examples/rlhf/tiny-sft.yaml"))
    before, *_, after = losses(sft.directory)
    assert before["eval/loss"] > 2.0
    assert after["eval/loss"] < 1.2
    export(sft.directory, Path("models/tiny-sft"))
    dpo = train(load_config("examples/rlhf/tiny-dpo.yaml"))
    before, *_, after = losses(dpo.directory)
    assert before["eval/rewards/margins"] == pytest.approx(0, abs=1e-3)
    assert after["eval/rewards/accuracies"] >= 0.95
    assert after["eval/rewards/margins"] > 0.3
    assert math.exp(after["eval/logps/chosen"]) > 1.5 * math.exp(before["eval/logps/chosen"])
