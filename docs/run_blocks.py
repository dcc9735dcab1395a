"""Run every code block of a page of documentation, in order, in a folder that looks like the repository's root.

For the tests, which run all pages, and for whoever writes one: `python docs/run_blocks.py docs/how-to/reward.md`.
`--list` says what would be done with each block. Packages that a page installs go into an environment of its own.

What is done with a block follows from its language:

- `title="some/path"` in any language: it is written to that file; a Python file is then run as well;
- `bash`: run; the exit code must be 0. `python`: run without the names of other blocks, as a reader may copy it alone;
- `console`: the lines after `$ ` are run, and what they print must match what follows them, `...` standing for
  anything. A `text` block right after one that is run is its output, in the same way. Where a line of the output shown
  begins with `error:`, the command must fail; everywhere else it must not;
- `yaml`: checked as a config, options of plugins included; sections that it leaves out are those of examples/tiny.yaml;
- `json`, `jsonl` and `toml` must be well formed; `mermaid` is a picture;
- an HTML comment on the line above, `<!-- not run: needs a GPU -->`, leaves a block out, and has to give a reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
BASE_CONFIG = Path("examples/tiny.yaml")
LIMIT_S = 900.0

_FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)(?P=fence) *$", re.M | re.S
)
_TITLE = re.compile(r"""title=(?:"([^"]*)"|(\S+))""")
_MARK = re.compile(r"<!--\s*not run\b:?(?P<reason>.*?)-->", re.S)
_SECTION = re.compile(r"^(?=[A-Za-z_]+:)", re.M)

_RUN_PYTHON = """
import sys
for number in range(1, len(sys.argv), 2):
    place, text = sys.argv[number:number + 2]
    exec(compile(text, place, "exec"), {"__name__": "__main__"})
"""

_CHECK_CONFIGS = """
import sys
from rollstock.config import complete_config, load_config
from rollstock.manager import make_manager
for path in sys.argv[1:]:
    config = load_config(path)
    complete_config(config, make_manager(config.plugins.block))
"""


class BlockError(Exception):
    """A block that does not do what its page says; the message begins with page and line."""


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, what it says, and why it is not run, None if it is."""

    page: str
    line: int
    language: str
    title: str
    text: str
    reason: str | None
    after_run: bool = False
    """Whether a block that is run stands right before it, with no more than a sentence between."""

    @property
    def place(self) -> str:
        """`docs/how-to/reward.md:12`."""
        return f"{self.page}:{self.line}"

    @property
    def use(self) -> str:
        """What is done with it: skip, write, run, match, check, or look at; BlockError where that cannot be told."""
        if self.reason is not None:
            return "skip"
        if self.title:
            return "write"
        if self.language == "text" and self.after_run:
            return "match"
        uses = {"bash": "run", "console": "run", "python": "run", "mermaid": "look at"}
        uses |= dict.fromkeys(("yaml", "json", "jsonl", "toml"), "check")
        if self.language not in uses:
            what = f"the language {self.language!r}" if self.language else "no language"
            raise BlockError(f"{self.place}: a block with {what} cannot be run: {_WAYS}")
        return uses[self.language]


_WAYS = "give it one that can, or say why not on the line above, <!-- not run: the reason -->"


def pages(root: Path = REPOSITORY) -> list[Path]:
    """README.md and every page under docs/."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def read_blocks(page: Path, root: Path = REPOSITORY) -> list[Block]:
    """The blocks of a page, in order. BlockError for a mark without a reason, or with no block under it."""
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(root).as_posix()
    blocks: list[Block] = []
    marked, end = set(), 0
    for fence in _FENCE.finditer(text):
        line = text.count("\n", 0, fence.start()) + 1
        between = text[end : fence.start()]
        mark = next((m for m in _MARK.finditer(between) if not between[m.end() :].strip()), None)
        reason = None
        if mark is not None:
            marked.add(end + mark.start())
            reason = " ".join(mark["reason"].split())
            if len(reason) < 3:
                raise BlockError(
                    f"{name}:{line}: the block is marked as not run without a reason: <!-- not run: the reason -->"
                )
        language, _, rest = fence["info"].strip().partition(" ")
        title = _TITLE.search(rest)
        near = bool(blocks) and blocks[-1].language in ("bash", "python") and blocks[-1].reason is None
        near = near and not blocks[-1].title and "\n#" not in between and len(re.split(r"\n\s*\n", between.strip())) < 2
        title_text = (title[1] or title[2]) if title else ""
        blocks.append(Block(name, line, language, title_text, textwrap.dedent(fence["body"]), reason, near))
        end = fence.end()
    for mark in _MARK.finditer(_FENCE.sub(lambda found: "x" * len(found[0]), text)):
        if mark.start() not in marked:
            raise BlockError(
                f"{name}:{text.count(chr(10), 0, mark.start()) + 1}: no block follows this mark: {mark[0]}"
            )
    return blocks


def matches(shown: str, printed: str) -> bool:
    """Whether a command printed what a page shows; `...` stands for anything, spaces at line ends do not count."""
    want, got = ("\n".join(line.rstrip() for line in text.strip().splitlines()) for text in (shown, printed))
    return re.fullmatch(re.escape(want).replace(re.escape("..."), ".*"), got, re.S) is not None


class Folder:
    """Where the blocks of a page are run: `examples` and `docs` of the repository, and a Python environment.

    The environment sees the packages of the one that runs this, and takes what the page installs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in ("examples", "docs"):
            ignored = shutil.ignore_patterns("__pycache__", "runs", "*.md")
            shutil.copytree(REPOSITORY / name, path / name, ignore=ignored)
        home = path / ".venv"
        venv.create(home, symlinks=True, with_pip=False)
        self.python = home / "bin" / "python"
        site = next((home / "lib").glob("python*/site-packages"))
        parents = [folder for folder in sys.path if folder.endswith("-packages")]
        (site / "parents.pth").write_text("".join(f"import site; site.addsitedir({parent!r})\n" for parent in parents))
        for command in ("rollstock", "pytest", "pip"):
            script = home / "bin" / command
            start = (
                f"import runpy, sys\nsys.argv[0] = {command!r}\nrunpy.run_module({command!r}, run_name='__main__')\n"
            )
            script.write_text(f"#!{self.python}\n{start}")
            script.chmod(0o755)
        self.environment = _environment(home)
        self.last = ""
        self.configs: list[tuple[Block, Path]] = []

    def do(self, block: Block) -> None:
        """Do with a block what its language asks for. BlockError if it does not work."""
        match block.use:
            case "write":
                self._write(block)
            case "run" if block.language == "console":
                self._console(block)
            case "run":
                self._run(block, ["bash", "-euo", "pipefail", "-c", block.text])
            case "match" if not matches(block.text, self.last):
                raise BlockError(f"{block.place}: shown is\n{block.text}\nprinted was\n{self.last[-4000:]}")
            case "check":
                self._check(block)

    def check_configs(self) -> None:
        """Check all configs that the page showed, in one process, once everything that it installs is there."""
        if not self.configs:
            return
        printed, code = self._call([self.python, "-c", _CHECK_CONFIGS, *(path for _, path in self.configs)])
        if code:
            places = ", ".join(block.place for block, _ in self.configs)
            raise BlockError(f"one of the configs at {places} is wrong:\n{printed[-4000:]}")

    def do_python(self, blocks: Sequence[Block]) -> None:
        """Run Python blocks in one process, which spares imports. BlockError, with the traceback, if one fails."""
        texts = [text for block in blocks for text in (block.place, block.text)]
        self._run(blocks[0], [self.python, "-c", _RUN_PYTHON, *texts])

    def _run(self, block: Block, command: Sequence[str | Path]) -> None:
        self.last, code = self._call(command)
        if code:
            raise BlockError(f"{block.place}: the {block.language} block ended with {code}:\n{self.last[-4000:]}")

    def _write(self, block: Block) -> None:
        path = self.path / block.title
        if not path.resolve().is_relative_to(self.path.resolve()):
            raise BlockError(f"{block.place}: {block.title} is outside of the folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
        if block.language == "python":
            printed, code = self._call([self.python, path])
            if code:
                raise BlockError(f"{block.place}: {block.title} cannot be run:\n{printed[-4000:]}")
        elif block.language in ("yaml", "json", "jsonl", "toml"):
            self._check(block)

    def _console(self, block: Block) -> None:
        """Run the commands of a console block, and compare what is shown after each."""
        parts = re.split(r"^\$ ", block.text, flags=re.M)
        if parts[0].strip() or len(parts) < 2:
            raise BlockError(f"{block.place}: a console block begins with a command, after `$ `")
        for part in parts[1:]:
            lines = part.splitlines()
            count = 1
            while lines[count - 1].endswith("\\") and count < len(lines):
                count += 1
            command, shown = "\n".join(lines[:count]), "\n".join(lines[count:])
            printed, code = self._call(["bash", "-euo", "pipefail", "-c", command])
            fails = re.search(r"^error:", shown, re.M) is not None
            if bool(code) != fails:
                raise BlockError(f"{block.place}: {command} ended with {code}:\n{printed[-4000:]}")
            if shown.strip() and not matches(shown, printed):
                raise BlockError(f"{block.place}: after {command} is shown\n{shown}\nprinted was\n{printed[-4000:]}")

    def _check(self, block: Block) -> None:
        try:
            if block.language == "json":
                json.loads(block.text)
            elif block.language == "jsonl":
                [json.loads(line) for line in block.text.splitlines() if line.strip()]
            elif block.language == "toml":
                tomllib.loads(block.text)
            else:
                self.configs.append((block, self._whole(block)))
        except ValueError as error:
            raise BlockError(f"{block.place}: the block is no {block.language}: {error}") from None

    def _whole(self, block: Block) -> Path:
        """Write the config of a block, with the sections of the base config that it leaves out after its own."""
        names = {section.partition(":")[0] for section in _SECTION.split(block.text)}
        base = _SECTION.split((self.path / BASE_CONFIG).read_text(encoding="utf-8"))
        path = self.path / ".configs" / f"{Path(block.page).stem}-{block.line}.yaml"
        path.parent.mkdir(exist_ok=True)
        rest = [section for section in base if section.partition(":")[0] not in names]
        path.write_text(block.text + "".join(rest), encoding="utf-8")
        return path

    def _call(self, command: Sequence[str | Path]) -> tuple[str, int]:
        """What a command printed, on both streams, and its exit code; whatever it started is ended with it."""
        with tempfile.TemporaryFile() as printed:
            process = subprocess.Popen(
                command, cwd=self.path, env=self.environment, stdin=subprocess.DEVNULL, stdout=printed,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                code = -signal.SIGALRM
            finally:
                with contextlib.suppress(ProcessLookupError):  # as a rule it leaves nothing behind
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            printed.seek(0)
            return printed.read().decode(errors="replace"), code


def _environment(home: Path) -> dict[str, str]:
    """Environment variables of a reader at a terminal, with no network and one thread."""
    hidden = ("PYTEST_", "COV_", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    path = os.pathsep.join([str(home / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    own = {"PATH": path, "VIRTUAL_ENV": str(home), "COLUMNS": "80", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    pip = {"NO_INDEX": "1", "QUIET": "1", "NO_BUILD_ISOLATION": "0", "DISABLE_PIP_VERSION_CHECK": "1"}
    return {**kept, **own, "HF_HUB_OFFLINE": "1", **{f"PIP_{name}": value for name, value in pip.items()}}


def run_page(page: Path, folder: Path, root: Path = REPOSITORY) -> Iterator[tuple[Block, float]]:
    """Run the blocks of a page; each comes with the seconds that it took. BlockError at the first that fails.

    Of Python blocks that are run together, the first comes with the seconds of them all.
    """
    blocks = [block for block in read_blocks(page, root) if block.use not in ("skip", "look at")]
    if not blocks:
        return
    workplace = Folder(folder)
    for together in _together(blocks):
        began = time.monotonic()
        if together[0].use == "run" and together[0].language == "python":
            workplace.do_python(together)
        else:
            workplace.do(together[0])
        yield together[0], time.monotonic() - began
        yield from ((block, 0.0) for block in together[1:])
    workplace.check_configs()


def _together(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """Python blocks in a row, as far as the output of none but the last is shown; every other block alone."""
    row: list[Block] = []
    for block in blocks:
        python = block.use == "run" and block.language == "python"
        if row and not (python and row[-1].language == "python" and row[-1].use == "run"):
            yield row
            row = []
        if block.use == "match" or not python:
            yield [block]
        else:
            row.append(block)
    if row:
        yield row


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: run pages, all of them unless some are named; 1 if a block fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path, help="pages to run; default: all")
    parser.add_argument("--list", action="store_true", help="say what is done with each block, and run none")
    options = parser.parse_args(arguments)
    try:
        for page in [page.resolve() for page in options.pages] or pages():
            if options.list:
                for block in read_blocks(page):
                    print(f"{block.place}: {block.language} {block.use} {block.title or block.reason or ''}".rstrip())
                continue
            with tempfile.TemporaryDirectory(prefix="page-") as folder:
                for block, seconds in run_page(page, Path(folder)):
                    print(f"{block.place}: {block.language} {block.title} {seconds:.1f} s", flush=True)
    except BlockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
