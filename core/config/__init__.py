"""Configs: read from a file and overrides, checked, completed with the plugins' options, written, and explained.

For the command line, for programs that start runs, and for workers. What may be in a config is `rollstock.schema`'s and
the plugins' business.
"""

from rollstock.config.complete import complete_config
from rollstock.config.explain import annotated, origins_of
from rollstock.config.load import load_config, load_run_config
from rollstock.config.write import refuse_concealed, write_config
from rollstock.schema import RunConfig

__all__ = [
    "RunConfig",
    "annotated",
    "complete_config",
    "load_config",
    "load_run_config",
    "origins_of",
    "refuse_concealed",
    "write_config",
]
