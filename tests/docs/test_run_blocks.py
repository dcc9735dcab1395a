"""The runner of blocks: what it does with each language, and that it notices when a block is wrong."""

from pathlib import Path

import pytest
from run_blocks import BlockError, matches, pages, read_blocks, run_page


@pytest.fixture
def run(tmp_path: Path):
    """Run the blocks of a page, given as text."""

    def run_text(text: str) -> list[str]:
        page = tmp_path / "page.md"
        page.write_text(text.replace("'''", "```"))
        return [block.place for block, _ in run_page(page, tmp_path / "folder", tmp_path)]

    (tmp_path / "folder").mkdir()
    return run_text


def read(text: str, tmp_path: Path) -> list[str]:
    page = tmp_path / "page.md"
    page.write_text(text.replace("'''", "```"))
    return [block.use for block in read_blocks(page, tmp_path)]


def test_all_pages_are_found() -> None:
    found = [page.name for page in pages()]
    assert found[0] == "README.md"
    assert "first-algorithm.md" in found
    assert "hooks.md" in found


def test_blocks_share_a_folder_in_order(run, tmp_path: Path) -> None:
    python = "'''python\nprint(int(open('a').read()) + 1, file=open('b', 'w'))\n'''\n"
    page = f"'''bash\necho 1 > a\n'''\n{python}'''bash\ncat b\n'''"
    assert run(page) == ["page.md:1", "page.md:4", "page.md:7"]
    assert (tmp_path / "folder" / "b").read_text() == "2\n"


def test_titled_blocks_become_files_that_later_blocks_import(run) -> None:
    module = "'''python title=\"pkg/ours.py\"\nnumber = 3\n'''\n"
    assert run(f"{module}\n'''bash\ncd pkg\npython -c 'import ours; assert ours.number == 3'\n'''")


def test_blocks_within_lists_are_found(run) -> None:
    with pytest.raises(BlockError, match=r"^page.md:3: the bash block ended with 1"):
        run("- one\n\n  '''bash\n  false\n  '''\n")


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("'''bash\nfalse | true\n'''", "ended with 1"),
        ("'''bash\necho $UNSET_VARIABLE\n'''", "UNSET_VARIABLE"),
        ("'''python\nassert 1 == 2\n'''", "AssertionError"),
        ("'''python title=a.py\nimport no_such_module\n'''", "no_such_module"),
        ("'''python title=../a.py\n'''", "outside"),
        ("'''console\n$ echo one\ntwo\n'''", "printed was\none"),
        ("'''console\n$ false\n'''", "ended with 1"),
        ("'''console\n$ echo error: none\nerror: none\n'''", "ended with 0"),
        ("'''console\necho one\n'''", "begins with a command"),
        ("'''bash\necho one\n'''\nIt prints:\n'''text\ntwo\n'''", "shown is\ntwo"),
        ("'''json\n{1}\n'''", "no json"),
        ("'''jsonl\n{}\n{\n'''", "no jsonl"),
        ("'''toml\na = \n'''", "no toml"),
        ("'''text\nnot after a command\n'''", "'text' cannot be run"),
        ("'''\nno language\n'''", "no language cannot be run"),
        ("'''rust\nfn main() {}\n'''", "'rust' cannot be run"),
    ],
)
def test_a_wrong_block_is_named_with_page_and_line(run, page: str, why: str) -> None:
    with pytest.raises(BlockError, match=r"^page.md:\d+: ") as caught:
        run(page)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    "page",
    [
        "'''console\n$ echo one two \\\n  three\none ... three\n$ echo\n'''",
        "'''console\n$ echo error: it is 3; exit 2\nerror: it is ...\n'''",
        "'''bash\nseq 9\n'''\n\nIt prints:\n\n'''text\n1\n...\n9\n'''",
        "'''json\n{\"a\": 1}\n'''\n'''jsonl\n{}\n\n[]\n'''\n'''toml\na = 1\n'''\n",
    ],
)
def test_a_right_block_passes(run, page: str) -> None:
    assert run(page)


def test_what_a_block_leaves_running_is_ended(run) -> None:
    ended = "! kill -0 $(cat pid) 2>/dev/null || grep -q ') Z' /proc/$(cat pid)/stat"
    run(f"'''bash\nsleep 1000 & echo $! > pid\n'''\n'''bash\n{ended}\n'''")


@pytest.mark.slow
def test_configs_are_checked_with_the_options_of_their_plugins(run) -> None:
    with pytest.raises(BlockError, match=r"(?s)page.md:1, page.md:4 is wrong.*group_sise"):
        run("'''yaml\ntrain: {steps: 3}\n'''\n'''yaml\nalgorithm:\n  name: grpo\n  group_sise: 4\n'''")


def test_a_reason_leaves_a_block_out(tmp_path: Path) -> None:
    assert read("<!-- not run: needs a GPU -->\n'''bash\nfalse\n'''\n'''bash\ntrue\n'''", tmp_path) == ["skip", "run"]
    assert read("<!-- not run: needs\na GPU -->\n\n'''text\nx\n'''\n\n'''mermaid\ngraph\n'''", tmp_path) == [
        "skip",
        "look at",
    ]


@pytest.mark.parametrize("mark", ["<!-- not run -->", "<!-- not run: -->", "<!--not run:  \n-->"])
def test_an_empty_reason_is_refused(tmp_path: Path, mark: str) -> None:
    with pytest.raises(BlockError, match="without a reason"):
        read(f"{mark}\n'''bash\nfalse\n'''", tmp_path)


@pytest.mark.parametrize(
    "page", ["<!-- not run: needs a GPU -->\nText.\n'''bash\nfalse\n'''", "'''bash\ntrue\n'''\n<!-- not run: a GPU -->"]
)
def test_a_mark_that_belongs_to_no_block_is_refused(tmp_path: Path, page: str) -> None:
    with pytest.raises(BlockError, match="no block follows this mark"):
        read(page, tmp_path)


def test_dots_stand_for_anything() -> None:
    assert matches("one\n...\nnine", "one\ntwo\nthree\nnine\n")
    assert matches("took ... s", "took 1.5 s")
    assert not matches("one\n...\nnine", "one\ntwo\nten")
    assert not matches("a.c", "abc")
