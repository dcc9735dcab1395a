"""The conformance kit of extensions: hooks that fit, columns that arrive, and a run that goes on as if never stopped.

For authors of extensions, who call `check_extension(MyExtension, directory=tmp_path)` in a test. It trains tiny
models for a few steps with the extension in the run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstock.columns import ALWAYS, PLAYED, SOURCES
from rollstock.contract import hook_functions
from rollstock.conversion import to_plain
from rollstock.errors import PluginError
from rollstock.hookspecs import hookimpl
from rollstock.interfaces.algorithm import Algorithm
from rollstock.interfaces.extension import Extension
from rollstock.manager import make_manager
from rollstock.plugin import NoOptions
from rollstock.testing.install import installed
from rollstock.testing.kit import NotApplicable, Report, expect, fail, run_checks
from rollstock.testing.runs import read_metrics, tiny_config
from rollstock.testing.subject import Subject, check_json
from rollstock.testing.subject import check_options as check_plugin_options

if TYPE_CHECKING:
    from rollstock.batch import Batch
    from rollstock.run import Run

WATCHER = "kit_watcher"
CLOCKED = ("timing_s/", "perf/", "rollout/tokens_per_second")
"""How the names of metrics begin that measure time, and so differ from run to run."""


@dataclass(frozen=True)
class ExtensionCase:
    """The extension under test, where its runs are kept, and what is special about their config."""

    subject: Subject[Extension[Any]]
    directory: Path
    sections: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name that the extension has in a config."""
        folded = re.sub(r"\W", "_", self.subject.cls.__name__).lower()
        return self.subject.plugin_name or f"kit_{folded}"

    def train(self, folder: str) -> Path:
        """A run of three steps with the extension, and a checkpoint after each, made at the first call; its
        directory."""
        from rollstock.launch import train

        directory = self.directory / folder
        if directory.exists():
            return directory
        mine = {"name": self.name, **to_plain(self.subject.config)}
        sections = {**self.sections, "extensions": [WATCHER, mine, *self.sections.get("extensions", [])]}
        overrides = ["train.steps=3", "checkpoint.every_steps=1", "trackers=[jsonl]"]
        outcome = train(tiny_config(directory, sections, overrides))
        expect(outcome.status == "finished", f"the run ended {outcome.status}", mend="an extension must not end a run")
        return outcome.directory


def check_extension(
    extension: type[Extension[Any]] | Extension[Any] | str,
    *,
    directory: Path,
    options: Mapping[str, Any] | None = None,
    sections: Mapping[str, Any] | None = None,
    skip: Mapping[str, str] | None = None,
) -> Report:
    """Check an extension, given as a class, an instance or an installed plugin's name.

    directory: an empty one, for the runs; options: of the plugin; sections: of the runs' config that must be other
    than the tiny example's; skip: checks that do not hold on purpose, each with the reason. Raises ConformanceError.
    """
    case = ExtensionCase(Subject(Extension, extension, options), directory, sections or {})
    with installed("extension", WATCHER, _watcher(case)):
        if case.subject.plugin_name:
            return run_checks(case.subject.label, CHECKS, case, skip=skip)
        with installed("extension", case.name, case.subject.cls):
            return run_checks(case.subject.label, CHECKS, case, skip=skip)


class _Watcher(Extension[NoOptions]):
    """Wraps the extension under test, and looks at what the stages leave."""

    watched: Sequence[str] = ()

    @hookimpl(wrapper=True)
    def rollstock_prepare(self, run: Run, batch: Batch) -> Generator[None, bool | None, bool | None]:
        """Look for the columns that were promised."""
        done = yield
        missing = sorted(set(self.watched) - set(batch.columns))
        expect(
            not missing,
            f"`provides` names {', '.join(missing)}, which the batch does not have after the prepare stage",
            mend="wrap rollstock_prepare, and set the column after the yield: batch['name'] = ...",
        )
        return done


def _watcher(case: ExtensionCase) -> type[Extension[Any]]:
    provides = case.subject.cls.provides
    watched = sorted(provides) if isinstance(provides, Set) else []
    return type("Watcher", (_Watcher,), {"watched": watched})


def check_options(case: ExtensionCase) -> None:
    """Every option has a help text, and the defaults fit their own types and bounds; making a plugin leaves its
    config alone."""
    check_plugin_options(case.subject)


def check_hooks(case: ExtensionCase) -> None:
    """An extension implements a lifecycle hook; each fits its hookspec."""
    manager = make_manager()
    try:
        hooks = hook_functions(case.subject.make(), case.subject.label, manager._pluggy)
    except PluginError as error:
        fail(
            str(error),
            mend="compare with rollstock.hookspecs: the names of hooks and of their arguments must be the same",
        )
    module = sys.modules.get(case.subject.cls.__module__)
    beside = [
        name for name in vars(module or object) if name.startswith("rollstock_") and name != "rollstock_extension"
    ]
    expect(
        hooks or beside,
        "it implements no hook, so that it does nothing",
        mend="mark methods that are named as hooks with @hookimpl, or @hookimpl(wrapper=True) to wrap a stage",
    )


def check_columns(case: ExtensionCase) -> None:
    """`provides` names columns of its own, and none of the core's; `needs` names columns that others bring."""
    extension = case.subject.make()
    provides = _names(extension.provides, "provides")
    taken = sorted(provides & (ALWAYS | PLAYED | SOURCES.keys()))
    expect(not taken, f"it provides {', '.join(taken)}, which the core does", mend="choose another name for the column")
    needed = _names(extension.needs, "needs") | _names(extension.needed_columns(), "needed_columns()")
    own = sorted(needed & provides)
    expect(not own, f"it needs {', '.join(own)}, which it provides itself", mend="leave it out of `needs`")


def _names(value: object, what: str) -> set[str]:
    is_set = isinstance(value, Set) and all(isinstance(name, str) and name for name in value)
    expect(is_set, f"{what} is {value!r}", mend="a set of column names, such as frozenset({'length_bonus'})")
    assert isinstance(value, Set)
    return set(value)


def check_validation(case: ExtensionCase) -> None:
    """`validate` takes a run config with its algorithm, and gives a list of sentences."""
    config = tiny_config(case.directory / "unused", case.sections)
    algorithm = make_manager().create_as(Algorithm, config.algorithm)
    problems: object = case.subject.make().validate(config, algorithm)
    is_list = isinstance(problems, list | tuple) and all(isinstance(problem, str) for problem in problems)
    expect(
        is_list,
        f"`validate` gives {problems!r}",
        mend="return a list of sentences, empty when all is well",
    )


def check_state(case: ExtensionCase) -> None:
    """State is JSON, and comes back."""
    extension = case.subject.make()
    state = check_json(extension.state(), "the state")
    other = case.subject.make()
    other.load_state(state)
    expect(
        other.state() == state, f"after load_state({state}), the state is {other.state()}", mend="take back all of it"
    )
    case.subject.make().load_state({})


def check_run(case: ExtensionCase) -> None:
    """A run with the extension finishes, and the columns that it provides are there."""
    steps = [row["step"] for row in read_metrics(case.train("first")) if "metrics" in row]
    expect(
        steps == [1, 2, 3],
        f"a run of three steps recorded the steps {steps}",
        mend="wrappers must return what they were given",
    )


def check_repetition(case: ExtensionCase) -> None:
    """Two runs with one seed are the same, the measured times aside."""
    _compare(
        read_metrics(case.train("first")),
        read_metrics(case.train("second")),
        "two runs with one seed",
        "derive random numbers from `rollstock.derive_seed(run.seed, purpose, run.step)`, never from the clock",
    )


def check_resumption(case: ExtensionCase) -> None:
    """A run that is resumed from a checkpoint goes on as one that was never interrupted."""
    from rollstock.launch import resume

    whole, folder = read_metrics(case.train("first")), case.train("second")
    if not (folder / "checkpoints" / "step-000001").is_dir():
        raise NotApplicable("the runs keep no checkpoint of step 1")
    resume(folder, step=1)
    _compare(
        whole,
        read_metrics(folder),
        "a run that was never stopped and one that was resumed after step 1",
        "put what an extension remembers from step to step into `state`",
    )


def _compare(one: list[dict[str, Any]], other: list[dict[str, Any]], what: str, mend: str) -> None:
    for mine, theirs in zip(one, other, strict=False):
        ours, others = _steady(mine), _steady(theirs)
        differing = sorted(name for name in ours.keys() | others.keys() if ours.get(name) != others.get(name))
        if differing:
            name = differing[0]
            fail(f"{what} differ at step {mine['step']}: {name} is {ours.get(name)} and {others.get(name)}", mend=mend)
    expect(len(one) == len(other), f"{what} have {len(one)} and {len(other)} records", mend=mend)


def _steady(row: Mapping[str, Any]) -> dict[str, Any]:
    values = row.get("metrics", row.get("evaluation", {}))
    # As text: a metric that is NaN in both runs is the same.
    return {name: repr(value) for name, value in values.items() if not name.startswith(CLOCKED)}


CHECKS = (
    check_options,
    check_hooks,
    check_columns,
    check_validation,
    check_state,
    check_run,
    check_repetition,
    check_resumption,
)
