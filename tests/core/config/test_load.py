import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstock.config import (
    RunConfig,
    annotated,
    complete_config,
    load_config,
    load_run_config,
    origins_of,
    write_config,
)
from rollstock.config.dialect import dump
from rollstock.config.write import config_text
from rollstock.defaults import DEFAULT_PLUGINS
from rollstock.errors import ConfigError, PluginError
from rollstock.manager import make_manager

MINIMAL = """\
model: {path: some/model}
algorithm: grpo
environment:
  name: arithmetic
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load(text: str = "", *overrides: str) -> RunConfig:
        Path("demo.yaml").write_text(MINIMAL + text)
        return load_config("demo.yaml", overrides)

    return load


def test_a_config_needs_little(load) -> None:
    config = load()
    assert config.algorithm == {"name": "grpo"}
    assert config.environment == {"name": "arithmetic"}
    assert (config.train.steps, config.sampling.temperature) == (100, 1.0)
    assert (config.run.name, config.run.directory) == ("demo", "runs/demo")


def test_sections_that_are_not_named_have_the_default_plugins(load) -> None:
    config = load()
    for section, plugin in DEFAULT_PLUGINS.items():
        found = getattr(config, section)
        assert [s["name"] for s in found] == plugin if isinstance(plugin, list) else found["name"] == plugin


def test_options_without_a_name_are_the_default_plugins(load) -> None:
    config = load("backend: {learning_rate: 1e-4}\n")
    assert config.backend == {"name": "torch", "learning_rate": 1e-4}


def test_overrides_go_over_the_file_and_the_file_over_the_defaults(load) -> None:
    config = load("train: {steps: 5, seed: 1}\n", "train.seed=2")
    assert (config.train.steps, config.train.seed, config.train.epochs) == (5, 2, 1)


def test_a_later_override_goes_over_an_earlier_one(load) -> None:
    assert load("", "train.seed=2", "train.seed=3").train.seed == 3


def test_lists_are_overridden_by_the_number_of_an_item(load) -> None:
    config = load("rewards: [environment, {name: rule, weight: 0.5}]\n", "rewards.0.weight=2", "rewards.1=environment")
    assert config.rewards == [{"name": "environment", "weight": 2.0}, {"name": "environment", "weight": 1.0}]


def test_a_list_is_replaced_as_a_whole(load) -> None:
    assert load("", "trackers=[jsonl]").trackers == [{"name": "jsonl"}]
    assert load("", "trackers=[]").trackers == []


def test_another_plugins_name_drops_the_options_of_the_one_before(load) -> None:
    assert load("backend: {name: torch, lora: {rank: 4}}\n", "backend=other").backend == {"name": "other"}


def test_the_same_name_keeps_the_options(load) -> None:
    assert load("backend: {name: torch, compile: true}\n", "backend=torch").backend == {
        "name": "torch",
        "compile": True,
    }


def test_an_override_may_add_what_the_file_does_not_have(load) -> None:
    config = load("", "roles.critic.backend.learning_rate=1e-3", "algorithm.clip=0.3")
    assert config.role("critic").backend == {"learning_rate": 1e-3}
    assert config.algorithm == {"name": "grpo", "clip": 0.3}


@pytest.mark.parametrize(
    ("kind", "role", "text", "message"),
    [
        ("backend", "actor", "backend:\n  eps: 7\n", r"demo\.yaml:6: backend\.eps must be at most 1, not 7"),
        (
            "backend",
            "critic",
            "roles:\n  critic:\n    backend: {eps: 7}\n",
            r"demo\.yaml:7: roles\.critic\.backend\.eps ",
        ),
        (
            "rollout",
            "rollout",
            "roles:\n  rollout: {backend: {min_batch: 0}}\n",
            r"demo\.yaml:6: roles\.rollout\.backend\.",
        ),
    ],
)
def test_a_wrong_option_of_a_roles_backend_is_found_where_it_stands(load, kind, role, text, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make_manager().create(kind, load(text).engine_of(role))


def test_values_may_refer_to_others_and_to_the_environment(load, monkeypatch) -> None:
    monkeypatch.setenv("ROLLSTOCK_TEST_RATE", "1e-3")
    config = load(
        "run: {directory: 'runs/${train.seed}-${train.epochs}'}\ntrain: {seed: 7}\n"
        "backend: {learning_rate: '${oc.env:ROLLSTOCK_TEST_RATE}'}\n"
    )
    assert config.run.directory == "runs/7-1"
    assert config.backend["learning_rate"] == "1e-3"


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (
            "tain: {}\n",
            [],
            r"demo\.yaml:5: tain is not an option of the config\. Did you mean 'train'\? Known: train, ",
        ),
        ("train:\n  step: 3\n", [], r"demo\.yaml:6: train\.step is not an option of train\. Did you mean 'steps'"),
        ("train:\n  steps: many\n", [], r"demo\.yaml:6: train\.steps must be a whole number \(int\), not 'many'"),
        ("train:\n  steps: 0\n", [], r"demo\.yaml:6: train\.steps must be at least 1, not 0"),
        ("train: 3\n", [], r"demo\.yaml:5: train must be a mapping of options, not 3"),
        ("rewards: rule\n", [], r"demo\.yaml:5: rewards must be a list, not 'rule' \(str\): write \[rule\]"),
        ("rewards:\n- weight: 2\n", [], r"demo\.yaml:6: rewards\.0 must say which plugin it means"),
        (
            "rewards:\n- name: rule\n  weight: much\n",
            [],
            r"demo\.yaml:6: rewards\.0 has a weight that is no number: 'much'",
        ),
        ("device: 3\n", [], r"demo\.yaml:5: device must be a plugin's name or a mapping with one, not 3"),
        ("sampling: {top_p: 0}\n", [], r"demo\.yaml:5: sampling is not valid: `top_p` 0 would keep no token"),
        ("sampling: {stop: ['']}\n", [], r"sampling is not valid: `stop` has an empty text"),
        (
            "sampling: {min_new_tokens: 9, max_new_tokens: 8}\n",
            [],
            r"sampling is not valid: `min_new_tokens` 9 is more than `max_new_tokens` 8",
        ),
        ("evaluation: {greedy: false, samples: 0}\n", [], r"evaluation is not valid: there is nothing to evaluate"),
        ("sampling:\n  overlong_prompt: skp\n", [], r"demo\.yaml:6: .* Did you mean 'skip'"),
        (
            "roles: {critc: {count: 2}}\n",
            [],
            r"demo\.yaml:5: roles\.critc: this run has no such role\. Did you mean 'critic'",
        ),
        (
            "run: {name: '${nowhere.at.all}'}\n",
            [],
            r"demo\.yaml:5: run\.name: Interpolation key 'nowhere\.at\.all' not found",
        ),
        ("run: {name: '${oc.env:ROLLSTOCK_NOT_SET}'}\n", [], r"demo\.yaml:5: run\.name: .*ROLLSTOCK_NOT_SET"),
        ("run: {name: '${'}\n", [], r"demo\.yaml"),
        ("run: {name: '???'}\n", [], r"demo\.yaml:5: run\.name is left open \(\?\?\?\): give it"),
        ("", ["train.stepz=3"], r"^override: train\.stepz is not an option of train\. Did you mean 'steps'"),
        ("", ["train.steps=x"], r"^override: train\.steps must be a whole number"),
        (
            "",
            ["trackers.2.name=x"],
            r"override 'trackers\.2\.name=x': trackers is a list, and its items are numbered 0 to 1, not '2'",
        ),
        ("", ["extensions.0=x"], r"extensions is a list, and its items are numbered none, it is empty|extensions"),
        ("", ["trackers.first=x"], r"trackers is a list, .* not 'first'"),
        (
            "train: {steps: 3}\n",
            ["train.steps.x=1"],
            r"override 'train\.steps\.x=1': train\.steps is 3, and has no options",
        ),
        ("", ["train.steps"], r"'train\.steps' is no override: write path=value"),
        ("", ["=3"], r"'=3' is no override"),
        ("", ["train.steps="], r"has no value: write train\.steps=null for none"),
        ("", ["train.steps=[1"], r"the value of the override 'train\.steps=\[1' is not valid YAML"),
        (
            "rewards: {name: rule}\n",
            [],
            r"demo\.yaml:5: rewards must be a list, not \{'name': 'rule'\} \(dict\): write \[\{'name': 'rule'\}\]",
        ),
        ("trackers: null\n", [], r"demo\.yaml:5: trackers must be a list, not none: write \[\]"),
        ("sampling: {stop: {a: 1}}\n", [], r"demo\.yaml:5: sampling\.stop must be a list, not \{'a': 1\}"),
        ("roles: {actor: [1]}\n", [], r"demo\.yaml:5: roles\.actor must be a mapping of options, not \[1\]"),
        ("device: null\n", [], r"demo\.yaml:5: device must be a plugin's name or a mapping with one, not none"),
        ("rewards: [{name: rule, weight: 1" + "0" * 400 + "}]\n", [], r"rewards\.0 has a weight that is no number"),
        ("run: {name: " + "[" * 150 + "]" * 150 + "}\n", [], r"demo\.yaml: mappings and lists .* too deeply"),
        ("", ["run.name=" + "[" * 2000 + "]" * 2000], r"the override run\.name: mappings and lists .* too deeply"),
        ("", ["train={~: 3}"], r"the override 'train=\{~: 3\}' cannot be used: Incompatible key type 'NoneType'"),
        ("", ["train.steps=" + "9" * 5000], r"is not valid YAML: the value cannot be read as int"),
        ("", ["evaluation.solved_at=.nan"], r"evaluation\.solved_at must be a finite number \(float\), not nan"),
        (
            "",
            ["evaluation.solved_at=1" + "0" * 400],
            r"evaluation\.solved_at must be a finite number \(float\), not 1000",
        ),
        ("", ["model=null"], r"override: model must be a mapping of options, not none"),
        ("", ["model={}"], r"override: model is not valid: give either `path`"),
        ("", ["model={config: {hidden_size: 3}}"], r"`config` must say its `model_type`"),
    ],
)
def test_mistakes_are_named_with_their_place(load, text: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("section", ["model", "algorithm", "environment"])
def test_what_has_no_default_must_be_given(tmp_path: Path, section: str) -> None:
    lines = {"model": "model: {path: x}", "algorithm": "algorithm: grpo", "environment": "environment: arithmetic"}
    path = tmp_path / "demo.yaml"
    path.write_text("\n".join(line for name, line in lines.items() if name != section))
    with pytest.raises(ConfigError, match=rf"demo\.yaml: {section} is required: it is a (plugin: |mapping of )"):
        load_config(path)


def test_every_value_says_where_it_came_from(load) -> None:
    config = load("rewards:\n- rule\nbackend: {learning_rate: 1e-4}\n", "train.seed=3", "trackers=[jsonl]")
    origins = origins_of(config)
    assert origins["model.path"] == "demo.yaml:1"
    assert origins["algorithm.name"] == "demo.yaml:2"
    assert origins["environment.name"] == "demo.yaml:4"
    assert origins["rewards.0.name"] == "demo.yaml:6"
    assert (origins["backend.name"], origins["backend.learning_rate"]) == ("default", "demo.yaml:7")
    assert (origins["train.seed"], origins["train.steps"]) == ("override", "default")
    assert origins["trackers.0.name"] == "override"


def test_sections_of_plugins_remember_their_place(load) -> None:
    config = load("rewards:\n- {name: rule, case: 1}\n", "backend.learning_rate=2")
    assert (config.rewards[0].place, config.rewards[0].origins["case"]) == ("rewards.0", "demo.yaml:6")
    assert (config.backend.place, config.backend.origins["learning_rate"]) == ("backend", "override")


def test_the_annotated_config_is_the_config(load, tmp_path: Path) -> None:
    config = load("run: {name: 'two # lines'}\n", "train.seed=3")
    text = annotated(config)
    assert re.search(r"^  seed: 3 +# override$", text, re.MULTILINE)
    assert re.search(r"^  name: 'two # lines' +# demo\.yaml:5$", text, re.MULTILINE)
    (tmp_path / "again.yaml").write_text(text)
    assert load_run_config(tmp_path / "again.yaml") == config


def test_a_written_config_is_read_back_as_it_was(load, tmp_path: Path) -> None:
    config = complete_config(load("run: {name: 'cost ${train.seed} \\${x}'}\n"), make_manager())
    write_config(config, tmp_path / "config.yaml")
    again = load_run_config(tmp_path / "config.yaml")
    assert again == config
    assert config_text(again) == config_text(config)
    assert complete_config(again, make_manager()) == config


@settings(max_examples=40)
@given(st.text(st.sampled_from(["$", "{", "}", "\\", "a", ":", " ", "?", "\n"]), min_size=1, max_size=12))
def test_texts_that_look_like_interpolations_survive_writing_and_reading(tmp_path_factory, text: str) -> None:
    if text.strip() == "???":
        return  # a value that is left open
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(MINIMAL + dump({"run": {"name": "x", "directory": "d"}}))
    config = load_run_config(path)
    config.run.name = text
    write_config(config, path)
    assert load_run_config(path).run.name == text


def test_completing_fills_in_the_options_of_every_plugin(load) -> None:
    config = complete_config(
        load("algorithm: {name: grpo, clip: 0.3}\n".replace("algorithm", "extensions: [overlong_penalty]\n#")),
        make_manager(),
    )
    assert config.algorithm["clip"] == 0.2
    assert config.backend["learning_rate"] > 0
    assert config.rewards[0]["weight"] == 1.0
    assert set(config.extensions[0]) > {"name"}


def test_completing_refuses_a_plugins_option_with_file_and_line(load) -> None:
    with pytest.raises(
        ConfigError, match=r"demo\.yaml:5: backend\.learning_rte is not an option of plugin backend:torch"
    ):
        complete_config(load("backend: {learning_rte: 1}\n"), make_manager())


def test_completing_refuses_an_unknown_plugin_with_file_and_line(load) -> None:
    with pytest.raises(PluginError, match=r"demo\.yaml:6: there is no tracker 'consol'\. Did you mean 'console'"):
        complete_config(load("trackers:\n- consol\n"), make_manager())


@pytest.mark.parametrize("role", ["actor", "critic", "reference", "rollout"])
def test_the_options_that_a_role_has_of_its_own_are_checked(load, role: str) -> None:
    config = load(f"roles:\n  {role}:\n    backend: {{nonsense: 3}}\n")
    with pytest.raises(
        ConfigError, match=rf"demo\.yaml:7: roles\.{role}\.backend\.nonsense is not an option of plugin"
    ):
        complete_config(config, make_manager())


def test_the_reward_role_has_no_backend(load) -> None:
    with pytest.raises(ConfigError, match=r"roles\.reward\.backend: the reward role has no backend"):
        complete_config(load("roles: {reward: {backend: {x: 1}}}\n"), make_manager())


def test_a_value_that_the_file_leaves_open_is_given_by_an_override(load) -> None:
    assert load("run: {name: '???'}\n", "run.name=mine").run.name == "mine"
