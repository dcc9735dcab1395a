"""The command line, `rollstock`: train, resume, evaluate, export, and look at plugins, configs, machines and runs.

For people and for scripts (`--json`). Each command is a thin layer over a function that a program may call as well.
Exit codes: 0 done, 1 the run failed, 2 the input is wrong.
"""

from rollstock.cli.main import main

__all__ = ["main"]
