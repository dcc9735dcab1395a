"""What the peers' sides have in common: every case is answered for every draw that it takes, and the answers stored.

For `verl_side.py` and `trl_side.py`, under the Python of either environment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

from cases import Case, takes
from draws import Columns, load, save
from torch import Tensor

Results = dict[str, Tensor]


def main(package: str, kinds: Mapping[str, Callable[[Columns, Case], Results]], cases: Iterable[Case]) -> None:
    """Read the draws that the command line names, answer with the function of each case's kind, and write to the file
    that it names next."""
    source, target = sys.argv[1:]
    answered = list(cases)
    found = {
        name: {
            f"{case.name}/{output}": x.double()
            for case in answered
            if takes(case, name)
            for output, x in kinds[case.kind]({key: x.clone() for key, x in columns.items()}, case).items()
        }
        for name, columns in load(Path(source)).items()
    }
    save(Path(target), found, {"package": package, "version": version(package)})
