"""What the person who watches sees, in a pipe and on a real (pseudo) terminal."""

import os
import pty
import subprocess
import sys
import time

import pytest

from rollstock.plugins.trackers.console import Console, ConsoleConfig, head, short

METRICS = {"reward/mean": 0.51239, "response_length/mean": 7.0, "timing_s/step": 12.5, "other": 3.0}


def started(info, **options):
    tracker = Console(ConsoleConfig(**options))
    tracker.start(info, {})
    return tracker


def test_plain_lines_where_there_is_no_terminal(info, capsys, tmp_path):
    tracker = started(info())
    tracker.log(1, METRICS)
    lengths = {
        "eval/greedy/response_length/mean": 3.0,
        "eval/greedy/num_samples": 20.0,
        "eval/greedy/num_unscored": 0.0,
    }
    tracker.evaluation(1, {"eval/greedy/solved": 0.25, "eval/greedy/reward_mean": 0.4, **lengths})
    tracker.message("checkpoint written")
    tracker.finish("finished")
    assert capsys.readouterr().out.splitlines() == [
        f"demo: 6 steps, in {tmp_path}",
        "step 1/6  reward/mean 0.5124  response_length/mean 7  timing_s/step 12.5000",
        "evaluation after step 1:  greedy/reward_mean 0.4000  greedy/solved 0.2500",
        "checkpoint written",
        "finished at step 1/6 after 0m 00s",
    ]


def test_a_resumed_run_says_so(info, capsys):
    started(info(resumed_at=4)).finish("interrupted")
    out = capsys.readouterr().out
    assert "6 steps, from step 4" in out
    assert "interrupted at step 4/6" in out


def test_only_the_metrics_and_steps_asked_for_and_always_the_last(info, capsys):
    tracker = started(info(), metrics=["other", "missing"], every=4)
    for step in range(1, 7):
        tracker.log(step, METRICS)
    assert capsys.readouterr().out.splitlines()[1:] == ["step 4/6  other 3", "step 6/6  other 3"]


def test_samples_the_best_and_the_worst_in_one_line_each(info, rows, capsys):
    tracker = started(info(), samples=2)
    tracker.samples(1, rows(1, count=6))
    tracker.log(1, {"reward/mean": 2.5})
    tracker.log(2, {"reward/mean": 2.5})
    step, *shown, after = capsys.readouterr().out.splitlines()[1:]
    assert (step, after) == ("step 1/6  reward/mean 2.5000", "step 2/6  reward/mean 2.5000")
    assert shown == ["       5  t5: 6 [bold]|x|[/bold]", "       0  t0: 1 [bold]|x|[/bold]"]


def test_few_samples_are_not_shown_twice(info, rows, capsys):
    tracker = started(info(), samples=8)
    tracker.samples(1, rows(1))
    tracker.log(1, {})
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_no_samples_unless_asked_for(info, rows, capsys):
    tracker = started(info())
    tracker.samples(1, rows(1))
    tracker.log(1, {})
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_control_characters_reach_no_terminal(info, capsys):
    tracker = started(info(), samples=1)
    tracker.samples(1, [{"task_id": "t", "response": "\x1b[2Jgone\x07", "reward": 1.0}])
    tracker.log(1, {})
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "gone" in out


def test_the_other_stream(info, capsys):
    started(info(), stream="stderr")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "6 steps" in captured.err


def test_a_table_with_a_header_on_request(info, capsys):
    tracker = started(info(), style="rich")
    for step in range(1, 24):
        tracker.log(step, METRICS)
    tracker.finish("finished")
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert sum("response_le" in line for line in lines) == 2
    assert any(line.split() == ["23", "0.5124", "7", "12.5000"] for line in lines)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (12.0, "12"),
        (-3.0, "-3"),
        (0.5, "0.5000"),
        (1e-5, "1e-05"),
        (123456.5, "1.23e+05"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_are_short(value, text):
    assert short(value) == text
    assert len(short(value)) <= 9


def test_heads_of_columns():
    assert head("response_length/mean") == ("response_le", "mean")
    assert head("loss") == ("", "loss")


PROGRAM = """
import pathlib, sys
from rollstock import RunInfo
from rollstock.plugins.trackers.console import Console
tracker = Console()
tracker.start(RunInfo(name="demo", directory=pathlib.Path("."), config={}, num_steps=3), {})
for step in (1, 2, 3):
    tracker.log(step, {"reward/mean": step / 8})
if sys.argv[1] == "finish":
    tracker.finish("finished")
else:
    raise SystemExit(3)
"""


@pytest.mark.parametrize("end", ["finish", "crash"])
def test_a_terminal_gets_a_table_a_bar_and_its_cursor_back(end):
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, end], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # how a pseudo-terminal says that the other side is gone
            break
        if not piece:
            break
        written += piece
    os.close(ours)
    process.wait(timeout=30)
    text = written.decode()
    assert "0.3750" in text
    assert "3/3" in text
    hide, show = text.rfind("\x1b[?25l"), text.rfind("\x1b[?25h")
    assert -1 < hide < show
