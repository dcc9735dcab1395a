"""The script that draws the pictures of README and docs."""

import json
from pathlib import Path
from xml.etree import ElementTree

import plot_run
import pytest

ROWS = [
    {"step": 0, "evaluation": {"eval/greedy/solved": 0.0}},
    {"step": 1, "metrics": {"reward/mean": 0.25}},
    {"step": 2, "metrics": {"reward/mean": 0.5}},
    {"step": 2, "evaluation": {"eval/greedy/solved": 1.0}},
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def test_rewards_of_steps_and_held_out_scores_are_curves(run: Path) -> None:
    reward, solved = plot_run.read_curves(run)
    assert reward.points == [(1, 0.25), (2, 0.5)]
    assert solved.points == [(0, 0.0), (2, 1.0)]
    assert solved.label == "held-out tasks solved, greedy"


def test_the_picture_is_well_formed_whatever_the_title(run: Path) -> None:
    picture = run / "images" / "run.svg"
    assert plot_run.main([str(run), str(picture), "--title", "a < b & 'c'"]) == 0
    root = ElementTree.parse(picture).getroot()
    names = [element.tag.partition("}")[2] for element in root.iter()]
    assert names.count("polyline") == 2
    assert names.count("circle") == 2
    assert root[0].text == "a < b & 'c'"


def test_rewards_below_zero_stay_inside(run: Path) -> None:
    curves = [plot_run.Curve("reward", [(1, -2.0), (2, 3.0)])]
    [line] = [e for e in ElementTree.fromstring(plot_run.draw(curves, "t")).iter() if e.tag.endswith("polyline")]
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert heights == [plot_run.HEIGHT - plot_run.BOTTOM, plot_run.TOP]


def test_a_run_without_steps_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert plot_run.main([str(tmp_path), str(tmp_path / "x.svg")]) == 2
    assert "has no training steps to draw" in capsys.readouterr().err
    assert plot_run.main([str(tmp_path / "none"), str(tmp_path / "x.svg")]) == 2
