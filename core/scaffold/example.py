"""The example config of a new package: a run that is over in seconds, with the new plugin in it."""

from __future__ import annotations

import copy

from rollstock.config.dialect import dump
from rollstock.defaults import EXAMPLE_EXPERTS, EXAMPLE_RUN
from rollstock.interfaces.router import Router
from rollstock.interfaces.transport import Transport
from rollstock.kinds import Kind


def example_config(kind: Kind, name: str) -> str:
    """The text of a config that trains the tiny example with the plugin `name`, where one process has work for it."""
    values = copy.deepcopy(EXAMPLE_RUN)
    if kind.many:
        values[kind.section] = [*values.get(kind.section, []), {"name": name}]
    elif kind.interface != Transport.__name__:  # which has nothing to carry within one process
        values[kind.section] = {"name": name}
    if kind.interface == Router.__name__:  # which has nothing to do in a dense model
        values["model"]["config"] = copy.deepcopy(EXAMPLE_EXPERTS)
    return dump(values)
