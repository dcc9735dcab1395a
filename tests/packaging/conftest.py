"""A clean copy of the checkout, what is built from it, and environments to install that into."""

import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEFTOVERS = ("build", "dist", "runs", "models", "*.egg-info", "__pycache__", ".*")


@dataclass(frozen=True)
class Environment:
    """A virtual environment that has nothing of its own, and finds the dependencies of this one."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def pip_install(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*command, "--no-index", "--no-build-isolation", *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    def run(self, *arguments: str, cwd: Path) -> str:
        done = subprocess.run(
            [str(self.folder / "bin" / arguments[0]), *arguments[1:]],
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def make_environment(tmp_path: Path) -> Callable[[], Environment]:
    def make() -> Environment:
        folder = tmp_path / "environment"
        venv.create(folder, with_pip=False)
        own = next((folder / "lib").glob("python*")) / "site-packages"
        # A plain path: the .pth files of the outer folder, an editable rollstock among them, are not read.
        (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        return Environment(folder)

    return make


def copy_checkout(target: Path) -> Path:
    """Copy what git would commit; of an unpacked sdist, everything that was not built."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        return Path(shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*LEFTOVERS)))
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)
    return target


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout in which nothing was built before."""
    return copy_checkout(tmp_path_factory.mktemp("checkout") / "rollstock")


@pytest.fixture(scope="session")
def built(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with an sdist, and with the wheel that was built from it."""
    target = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(checkout)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return target
