"""How long it takes to list 200 installed plugins, and how many modules that imports.

Writes 200 distributions with a module and 100 lines of source each into a temporary folder, puts it on the path of a
new process, and times `rollstock plugins` there, the start of Python included. The floor is the start of Python alone;
for comparison, the same entry points are imported with stevedore, as a manager does that loads what it finds.

    python benchmarks/plugin_listing.py [NUMBER]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPEATS = 7
LIST = "from rollstock.cli import main; import sys; sys.exit(main(['plugins', '--json']))"
LOAD_ALL = (
    "from stevedore import ExtensionManager; from rollstock.kinds import KINDS; "
    "[ExtensionManager(kind.group, on_load_failure_callback=print) for kind in KINDS.values()]"
)
IMPORTED = (
    "import sys, io, contextlib\n"
    "from rollstock.cli import main\n"
    "with contextlib.redirect_stdout(io.StringIO()): main(['plugins'])\n"
    "print(sum(name.startswith('acme_') for name in sys.modules), 'torch' in sys.modules)"
)
SOURCE = '''"""Acme algorithm {number}: a plugin of average length.

It is one of many.
"""

from dataclasses import dataclass

from rollstock import Algorithm, hookimpl, option


@dataclass(kw_only=True)
class Config:
    clip: float = option(0.2, "clip range")


class Acme(Algorithm[Config]):
    def advantages(self, batch): ...

    def loss(self, micro): ...


@hookimpl
def rollstock_algorithm():
    return Acme

'''


def install(folder: Path, count: int) -> None:
    """Write `count` distributions of one plugin each."""
    for number in range(count):
        info = folder / f"acme_{number}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: acme-{number}\nVersion: 1.0\n\n" + "About it.\n" * 100
        )
        (info / "entry_points.txt").write_text(f"[rollstock.algorithm]\nacme_{number} = acme_{number}\n")
        filler = "".join(f"def helper_{line}(x):\n    return x + {line}\n\n\n" for line in range(20))
        (folder / f"acme_{number}.py").write_text(SOURCE.format(number=number) + filler)


def seconds(code: str, environment: dict[str, str]) -> float:
    """The median time of a new Python process that runs `code`."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, check=True)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    """Print the times, and what was imported."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        install(folder, count)
        environment = {**os.environ, "PYTHONPATH": name, "XDG_CACHE_HOME": str(folder / "cache")}
        found = json.loads(subprocess.check_output([sys.executable, "-c", LIST], env=environment))["plugins"]
        listed = sum(plugin["module"].startswith("acme_") for plugin in found)
        assert listed == count, f"{listed} of {count} were listed"
        imported, torch = subprocess.check_output([sys.executable, "-c", IMPORTED], env=environment, text=True).split()
        start, listing, loading = (seconds(code, environment) for code in ("pass", LIST, LOAD_ALL))
    print(f"listing {len(found)} plugins, {count} of them from {count} distributions: {listing:.3f} s")
    print(f"starting Python alone: {start:.3f} s; importing all of them instead: {loading:.3f} s")
    print(f"ratio to importing: {listing / loading:.2f}; plugins imported: {imported}; torch imported: {torch}")


if __name__ == "__main__":
    main()
