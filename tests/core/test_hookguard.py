import pytest

from rollstock import Extension, hookimpl
from rollstock.errors import RunError
from rollstock.manager import PluginManager, make_manager


class Core:
    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    @hookimpl(trylast=True)
    def rollstock_score(self, run, batch):
        if self.error:
            raise self.error
        return True


class PassesOn:
    @hookimpl(wrapper=True)
    def rollstock_score(self, run, batch):
        return (yield)


class FailsBefore:
    @hookimpl(wrapper=True)
    def rollstock_score(self, run, batch):
        raise KeyError("before")
        yield


class FailsAfter:
    @hookimpl(wrapper=True)
    def rollstock_score(self, run, batch):
        yield
        raise KeyError("after")


class Recovers:
    @hookimpl(wrapper=True)
    def rollstock_score(self, run, batch):
        try:
            return (yield)
        except ValueError:
            return "recovered"


class Translates:
    @hookimpl(wrapper=True)
    def rollstock_score(self, run, batch):
        try:
            return (yield)
        except ValueError as error:
            raise RunError("translated") from error


class YieldsTwice:
    @hookimpl(wrapper=True)
    def rollstock_score(self, run, batch):
        yield
        yield


def manager_with(**plugins: object) -> PluginManager:
    manager = make_manager()
    for name, plugin in plugins.items():
        manager.register(name, plugin)
    return manager


def notes_of(manager: PluginManager, kind: type[BaseException]) -> list[str]:
    with pytest.raises(kind) as caught:
        manager.hook.rollstock_score(run=None, batch=None)
    return list(getattr(caught.value, "__notes__", []))


def test_what_a_hook_raises_carries_its_plugins_name() -> None:
    assert notes_of(manager_with(core=Core(ValueError("x"))), ValueError) == [
        "raised by the hook rollstock_score of plugin core"
    ]


def test_a_wrapper_is_not_blamed_for_what_passes_through_it() -> None:
    manager = manager_with(core=Core(ValueError("x")), wrapper=PassesOn())
    assert notes_of(manager, ValueError) == ["raised by the hook rollstock_score of plugin core"]


@pytest.mark.parametrize("wrapper", [FailsBefore(), FailsAfter()])
def test_a_wrapper_that_fails_itself_is_blamed(wrapper: object) -> None:
    manager = manager_with(core=Core(), wrapper=wrapper, outer=PassesOn())
    assert notes_of(manager, KeyError) == ["raised by the hook rollstock_score of plugin wrapper"]


def test_a_wrapper_may_answer_in_place_of_an_error() -> None:
    manager = manager_with(core=Core(ValueError("x")), wrapper=Recovers())
    assert manager.hook.rollstock_score(run=None, batch=None) == "recovered"


def test_a_wrapper_that_turns_an_error_into_another_is_blamed_for_that_one() -> None:
    manager = manager_with(core=Core(ValueError("x")), wrapper=Translates())
    assert notes_of(manager, RunError) == ["raised by the hook rollstock_score of plugin wrapper"]


def test_results_pass_through_wrappers() -> None:
    manager = manager_with(core=Core(), wrapper=PassesOn())
    assert manager.hook.rollstock_score(run=None, batch=None) is True


def test_a_wrapper_that_yields_twice_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="second yield"):
        manager_with(core=Core(), wrapper=YieldsTwice()).hook.rollstock_score(run=None, batch=None)


def test_instances_are_named_with_their_kind_and_name() -> None:
    class Failing(Extension):
        @hookimpl
        def rollstock_run_end(self, run, status):
            raise ValueError(status)

    from types import ModuleType

    module = ModuleType("failing_module")
    module.rollstock_extension = hookimpl(lambda: Failing)  # type: ignore[attr-defined]
    manager = make_manager()
    manager.add("extension", "failing", module)
    manager.create("extension", {"name": "failing"})
    with pytest.raises(ValueError, match="failed") as caught:
        manager.hook.rollstock_run_end(run=None, status="failed")
    assert caught.value.__notes__ == ["raised by the hook rollstock_run_end of plugin extension:failing/instance"]
