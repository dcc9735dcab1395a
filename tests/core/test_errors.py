from rollstock.errors import ConfigError, PluginError, RunError, UserError, nearest, suggest


def test_exit_codes_tell_wrong_input_from_a_failed_run() -> None:
    assert (ConfigError("x").exit_code, PluginError("x").exit_code, UserError("x").exit_code) == (2, 2, 2)
    assert RunError("x").exit_code == 1


def test_nearest_ignores_case_and_separators() -> None:
    assert nearest("Dynamic-Batch", ["dynamic_batch", "elastic"]) == ["dynamic_batch"]


def test_nearest_is_empty_when_nothing_is_near() -> None:
    assert nearest("zebra", ["grpo", "ppo"]) == []


def test_suggest_asks_first_and_lists_the_nearest_first() -> None:
    assert suggest("grop", ["ppo", "rloo", "grpo"]) == "Did you mean 'grpo'? Known: grpo, ppo, rloo."


def test_suggest_without_anything_known_says_so() -> None:
    assert suggest("grpo", []) == "There are none."


def test_plugin_error_carries_the_name() -> None:
    assert PluginError("broken", "algorithm:grpo").plugin == "algorithm:grpo"
