"""What an examination hands back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "info", "warning", "error"]
_RANK = {"error": 0, "warning": 1, "info": 2, "ok": 3}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    severity: `error` will fail, `warning` will hurt, `info` is worth knowing, `ok` is fine. subject: what was looked
    at, an option's path where it is one. advice: what to do; empty where nothing need be.
    """

    severity: Severity
    subject: str
    message: str
    advice: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether a run would fail."""
        return self.severity == "error"


def sorted_findings(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first; those of one severity in the order in which they were found, none twice."""
    return sorted(dict.fromkeys(findings), key=lambda finding: _RANK[finding.severity])
