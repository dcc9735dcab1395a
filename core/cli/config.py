"""`rollstock config`: a config in full, each value with where it came from."""

from __future__ import annotations

import argparse

from rollstock.cli.output import Output


def config(options: argparse.Namespace, output: Output) -> int:
    """Print the config with every option of every plugin; refuses what a run would refuse about the options."""
    from rollstock.config import annotated, complete_config, load_config, origins_of
    from rollstock.manager import make_manager

    loaded = load_config(options.config, options.overrides)
    whole = complete_config(loaded, make_manager(loaded.plugins.block))
    if output.as_json:
        output.json({"config": whole.to_dict(), "origins": origins_of(whole)})
    else:
        output.line(annotated(whole).rstrip())
    return 0
