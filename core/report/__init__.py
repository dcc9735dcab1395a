"""`rollstock report`: a run as one HTML page that needs no network and no server.

For the person who trained, and whoever they send the page to. It only reads the run's files, so that it works while the
run goes on, after it was killed, and on another machine.
"""

from rollstock.report.page import build_report, write_report

__all__ = ["build_report", "write_report"]
