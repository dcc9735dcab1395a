"""Makes the scripts of docs/ importable, so that tests use what the writer of a page uses."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "docs"))
