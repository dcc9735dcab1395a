"""Every code block of README and docs does what its page says; what is not run says why."""

import re
from pathlib import Path

import pytest
import run_blocks

SLOW = re.compile(r"rollstock (train|resume|eval|doctor)|pytest|check_|import torch")


def page_parameters() -> list[object]:
    """One parameter a page that has blocks; a page whose blocks import torch, seconds each time, is slow."""
    parameters = []
    for page in run_blocks.pages():
        text = page.read_text(encoding="utf-8")
        if "```" in text:
            marks = [pytest.mark.slow] if SLOW.search(text) else []
            name = page.relative_to(run_blocks.REPOSITORY).as_posix()
            parameters.append(pytest.param(page, id=name, marks=marks))
    return parameters


@pytest.mark.parametrize("page", page_parameters())
def test_blocks_of_the_page_work(page: Path, tmp_path: Path) -> None:
    for block, seconds in run_blocks.run_page(page, tmp_path):
        print(f"{block.place}: {block.language} {block.title} {seconds:.1f} s")


def test_what_is_not_run_says_why_and_is_listed() -> None:
    blocks = [block for page in run_blocks.pages() for block in run_blocks.read_blocks(page)]
    left_out = [block for block in blocks if block.use == "skip"]
    for block in left_out:
        print(f"{block.place} is not run: {block.reason}")
    assert len(left_out) < len(blocks) / 10, [block.place for block in left_out]


def test_every_link_to_a_file_leads_somewhere() -> None:
    link = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[^)\s]*)?\)")
    broken = []
    for page in run_blocks.pages():
        prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        broken += [f"{page.name}: {found}" for found in link.findall(prose) if not (page.parent / found).exists()]
    assert broken == []
