"""The page is one file, complete, safe against what samples contain, and small."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstock.errors import UserError
from rollstock.report import write_report
from rollstock.report.samples import MAX_CHARACTERS, MAX_STEPS

ATTACK = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><!-- %%DATA%% \u2028"
)


def block(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


@pytest.fixture
def attacked(write_run: Callable[..., Path], sample: Callable[..., dict[str, Any]]) -> Path:
    """A run in which everything that can hold text holds an attack."""
    rows = [
        sample(1.0, prompt=ATTACK, response=ATTACK, task_id=ATTACK, finish_reason=ATTACK, rewards={ATTACK: 1.0, "b": 0})
    ]
    return write_run(
        metrics={1: {"reward/mean": 0.5, ATTACK: 1.0}},
        evaluations={0: {f"eval/greedy/{ATTACK}": 1.0}},
        rollouts={1: rows},
        config={"model": {"path": ATTACK}, "algorithm": {"name": ATTACK}, "note": ATTACK},
        manifest={"created": ATTACK, "resumed": [{"step": ATTACK, "changed": [ATTACK]}]},
    )


def test_nothing_of_a_run_becomes_markup(attacked: Path) -> None:
    page = write_report(attacked).read_text(encoding="utf-8")
    assert len(re.findall(r"<script", page)) == 2, "the data block and the page's own script"
    assert "<img" not in page
    assert 'onerror="document' not in page
    assert block(page)["samples"][0]["best"][0]["response"] == ATTACK
    assert "%%DATA%%" in page, "a placeholder inside a value stays what it is"


def test_the_page_loads_nothing_and_allows_no_other_script(attacked: Path) -> None:
    page = write_report(attacked).read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/=]+'", page)
    own = re.sub(r'<script type="application/json".*?</script>|<pre>.*?</pre>', "", page, flags=re.S)
    addresses = set(re.findall(r"https?://[^\s\"']+", own))
    assert addresses <= {"http://www.w3.org/2000/svg"}, "a namespace, which nobody fetches"
    assert not re.search(r"<(link|iframe|object|embed|base)\b|@import|url\(", own)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the chromium browser to run the page")
def test_a_browser_draws_the_page_and_runs_no_attack(attacked: Path, tmp_path: Path) -> None:
    page = write_report(attacked)
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    options = ["--virtual-time-budget=2000", "--window-size=1200,900", "--dump-dom"]
    done = subprocess.run([*command, *options, page.as_uri()], capture_output=True, text=True, timeout=120)
    assert "<title>run · rollstock</title>" in done.stdout
    assert done.stdout.count('class="chart"') == 3
    assert re.search(r'<path class="curve k0" d="M', done.stdout)
    assert "<img" not in done.stdout
    assert "&lt;img src=x" in done.stdout, "the attack is shown as text"


def test_a_page_that_cannot_be_written_leaves_nothing(write_run: Callable[..., Path], tmp_path: Path) -> None:
    run = write_run(metrics={1: {"a": 1.0}})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"is a directory: name the file to write, such as .*report\.html"):
        write_report(run, tmp_path)
    with pytest.raises(UserError, match=r"cannot be written to .*: File name too long; choose another --out FILE"):
        write_report(run, tmp_path / "new" / ("long" * 100) / "report.html")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written to"):
        write_report(run, tmp_path / "file" / "report.html")
    (tmp_path / "file").unlink()
    assert sorted(tmp_path.rglob("*")) == before


def test_secrets_are_masked(write_run: Callable[..., Path]) -> None:
    page = write_report(write_run(metrics={1: {"a": 1.0}})).read_text()
    assert "TOPSECRET" not in page
    assert "api_key: '********'" in page.replace("&#x27;", "'")


def test_an_empty_run_in_progress_still_makes_a_page(write_run: Callable[..., Path]) -> None:
    page = write_report(write_run()).read_text()
    data = block(page)
    assert data == {"charts": [], "samples": [], "health": [], "checkpoints": []}
    assert 'data-status="empty"' in page


def test_the_tiles_show_how_far_it_came(write_run: Callable[..., Path]) -> None:
    rows = {
        step: {"reward/mean": step / 20, "timing_s/step": 2.0, "perf/total_num_tokens": 100.0} for step in range(1, 21)
    }
    evaluations = {0: {"eval/greedy/solved": 0.125}, 20: {"eval/greedy/solved": 0.75}}
    page = write_report(write_run(metrics=rows, evaluations=evaluations)).read_text()
    tiles = re.findall(r'label">(.*?)</span><span class="number">(.*?)</span><span class="note">(.*?)</span>', page)
    assert tiles == [
        ("steps", "20 of 20", ""),
        ("mean reward", "0.975", "0.075 at first"),
        ("held-out greedy, solved", "0.75", "0.125 at first"),
        ("time in steps", "40 s", "2 s a step"),
        ("tokens", "2k", "50 a second"),
    ]
    assert 'data-status="finished"' in page


def test_best_and_worst_samples_do_not_overlap(
    write_run: Callable[..., Path], sample: Callable[..., dict[str, Any]]
) -> None:
    rows = [sample(reward, response=str(reward)) for reward in (0.1, 0.9, None, 0.5, 0.3)]
    data = block(write_report(write_run(rollouts={1: rows})).read_text())
    (found,) = data["samples"]
    assert [row["reward"] for row in found["best"]] == [0.9, 0.5, 0.3]
    assert [row["reward"] for row in found["worst"]] == [0.1, None]
    assert found["count"] == 5


def test_long_texts_and_chat_prompts_are_made_readable(
    write_run: Callable[..., Path], sample: Callable[..., dict[str, Any]]
) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rows = [sample(1.0, prompt=chat, response="x" * 9000 + "end")]
    (row,) = block(write_report(write_run(rollouts={1: rows})).read_text())["samples"][0]["best"]
    assert row["prompt"] == "[system]\nBe brief.\n\n[user]\nHi"
    assert len(row["response"]) < MAX_CHARACTERS + 100
    assert row["response"].endswith("end")
    assert "6003 characters left out" in row["response"]


def test_ten_thousand_steps_stay_a_small_page(
    write_run: Callable[..., Path], sample: Callable[..., dict[str, Any]]
) -> None:
    metrics = {step: {f"m{index}/x": step * 1.2345678 for index in range(40)} for step in range(1, 10_001)}
    rollouts = {step: [sample(float(i)) for i in range(8)] for step in range(1, 10_001, 50)}
    page = write_report(write_run(metrics=metrics, rollouts=rollouts))
    assert page.stat().st_size < 1_000_000
    steps = [found["step"] for found in block(page.read_text())["samples"]]
    assert len(steps) == MAX_STEPS
    assert (steps[0], steps[-1]) == (1, 9951)


def test_it_goes_where_it_is_told_and_replaces_what_was_there(write_run: Callable[..., Path], tmp_path: Path) -> None:
    run = write_run()
    out = tmp_path / "pages" / "a.html"
    for _ in range(2):
        assert write_report(run, out) == out
    assert [path.name for path in out.parent.iterdir()] == ["a.html"]
    assert not (run / "report.html").exists()


def test_a_report_needs_no_torch(write_run: Callable[..., Path]) -> None:
    code = (
        "import sys; from pathlib import Path; from rollstock.report import write_report\n"
        "write_report(Path(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(write_run())], check=True)
