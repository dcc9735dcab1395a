"""`rollstock doctor`: machine, packages and plugins looked over, and what in a config will hurt before it starts.

For people whose run does not start, is slow, or learns nothing. It starts no run and writes nothing. Beyond what a run
itself would refuse it warns of what would only disappoint: memory that will not suffice, batches that do not divide,
prompts that are too long, a learning rate far from the usual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollstock.doctor.finding import Finding, sorted_findings
from rollstock.doctor.machine import examine_machine
from rollstock.doctor.packages import examine_packages
from rollstock.doctor.plugins import examine_plugins

if TYPE_CHECKING:
    from rollstock.schema import RunConfig

__all__ = ["Finding", "diagnose"]


def diagnose(config: RunConfig | None = None) -> list[Finding]:
    """Everything that there is to say, the worst first; with a config, what it needs and what it will run into too."""
    findings = [*examine_machine(), *examine_packages(), *examine_plugins()]
    if config is not None and not any(finding.subject == "torch" and finding.is_bad for finding in findings):
        from rollstock.doctor.config import examine_config  # it needs torch

        findings += examine_config(config)
    return sorted_findings(findings)
