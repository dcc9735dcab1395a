"""What in a config will hurt is found before it starts, in the config's own words."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollstock.cli import main
from rollstock.config import load_config
from rollstock.doctor import Finding, diagnose
from rollstock.doctor import training as training_checks
from rollstock.doctor.config import examine_config
from rollstock.doctor.finding import sorted_findings
from rollstock.doctor.training import usual_learning_rate

CONFIG = """
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
           num_key_value_heads: 1, max_position_embeddings: 32}
  tokenizer: {characters: "0123456789+="}
algorithm: {name: grpo, group_size: 4}
environment: {name: arithmetic, chat: false, prompt: "{a}{op}{b}="}
sampling: {max_new_tokens: 3}
train: {steps: 4, prompts_per_step: 4}
backend: {name: torch, learning_rate: 1.0e-3}
evaluation: {prompts: 4, every: 2}
"""


@pytest.fixture
def examine(tmp_path: Path) -> Callable[..., dict[str, Finding]]:
    """A function that examines the tiny config with overrides; findings by subject, the worst of each."""
    (tmp_path / "tiny.yaml").write_text(CONFIG)

    def run(*overrides: str, directory: str = "run") -> dict[str, Finding]:
        config = load_config(tmp_path / "tiny.yaml", [*overrides, f"run.directory={tmp_path / directory}"])
        found: dict[str, Finding] = {}
        for finding in sorted_findings(examine_config(config)):
            found.setdefault(finding.subject, finding)
        return found

    return run


Examine = Callable[..., dict[str, Finding]]


def test_a_sound_config_has_nothing_to_mend(examine: Examine) -> None:
    found = examine()
    assert {finding.severity for finding in found.values()} == {"ok"}
    assert "4 prompts x 4 samples = 16 trajectories" in found["batch"].message
    assert "of 100 that were looked at the longest has 4 tokens" in found["prompts"].message
    assert {"memory of the run", "checkpoint", "backend.learning_rate", "tasks"} <= set(found)


@pytest.mark.parametrize(
    ("override", "subject", "severity", "words"),
    [
        ("train.mini_batches=3", "train.mini_batches", "warning", "do not divide into 3"),
        (
            "roles.actor.count=3",
            "config",
            "error",
            "roles.actor.count: 3 workers would each train a model of their own",
        ),
        ("roles.rollout.count=3", "roles.rollout.count", "warning", "16 trajectories do not divide among 3"),
        ("roles.rollout.devices=[1]", "roles.rollout.devices", "error", "[1] cannot be had"),
        ("roles.rollout.count=17", "roles.rollout.count", "error", "17 workers for 16"),
        ("train.critic_warmup=1", "train.critic_warmup", "warning", "has no critic"),
        ("sampling.temperature=0.1", "sampling.temperature", "warning", "nearly the same"),
        ("sampling.top_p=0.9", "sampling.top_p", "warning", "tail cut off"),
        ("sampling.top_k=5", "sampling.top_k", "warning", "tail cut off"),
        ("evaluation.every=9", "evaluation.every", "warning", "9 is more than the 4 steps"),
        ("evaluation.every=0", "checkpoint.keep_best", "info", "the best checkpoint is the last"),
        ("checkpoint.every_minutes=0", "checkpoint", "warning", "at the end only"),
        ("backend.warmup_updates=40", "backend.warmup_updates", "warning", "makes only 4"),
        ("train.prompts_per_step=200", "train.prompts_per_step", "warning", "only 80 tasks"),
        ("backend.learning_rate=5", "backend.learning_rate", "warning", "5 for a model of"),
        ("backend.learning_rate=1e-9", "backend.learning_rate", "warning", "is usual"),
        ("backend.learning_rate=0", "backend.learning_rate", "error", "trains nothing"),
        ("sampling.max_new_tokens=30", "sampling.max_new_tokens", "error", "more than the 32 positions"),
        ("sampling.max_prompt_tokens=3", "sampling.max_prompt_tokens", "error", "100 of 100 prompts"),
        ("environment.prompt='{a} {op} {b}'", "prompts", "error", "in task"),
        ("environment.chat=true", "prompts", "error", "chat template"),
        ("model.config.num_attention_heads=5", "model", "error", "cannot lay it out"),
        ("algorithm.name=grop", "algorithm", "error", "Did you mean 'grpo'"),
        ("algorithm.clop=0.3", "algorithm", "error", "clip"),
        ("sampling.temperature=0", "config", "error", "advantage is 0"),
        ("train.mini_batches=5", "config", "error", "groups are not cut"),
        ("device.name=ascend", "device", "error", "ascend"),
    ],
)
def test_what_will_hurt_is_found(examine: Examine, override: str, subject: str, severity: str, words: str) -> None:
    finding = examine(override)[subject]
    assert finding.severity == severity
    assert words in finding.message


def test_overlong_prompts_that_are_to_be_skipped_are_a_warning(examine: Examine) -> None:
    finding = examine("sampling.max_prompt_tokens=3", "sampling.overlong_prompt=skip")["sampling.max_prompt_tokens"]
    assert finding.severity == "warning"
    assert "left out" in finding.message


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    """Overrides that train on pairs, of which one response in ten is a long one."""
    rows = [{"prompt": f"{n}+1=", "good": "1" * (9 if n % 10 == 0 else 2), "bad": "2"} for n in range(100)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{{name: jsonl, path: {tmp_path}/pairs.jsonl, chat: false, chosen: good, rejected: bad}}"


def test_offline_the_datas_own_responses_are_measured_and_nothing_is_said_of_sampling(
    examine: Examine, pairs: str
) -> None:
    options = ("algorithm=dpo", f"environment={pairs}", "sampling.temperature=0.1", "sampling.top_k=5")
    found = examine(*options, "sampling.max_new_tokens=10")
    assert not [finding for finding in found.values() if finding.severity == "error"]
    assert not {"sampling.temperature", "sampling.top_k"} & found.keys()
    assert "longest has 10 tokens" in found["responses"].message
    assert "with 2 of their own responses each" in found["batch"].message
    assert "key-value cache" not in found["memory of the run"].message
    short = examine(*options, "sampling.max_new_tokens=4")["sampling.max_new_tokens"]
    assert short.severity == "warning"
    assert "10 have more than 4 and are cut" in short.message
    assert short.advice == "raise it to 10"


def test_offline_data_without_responses_is_an_error(examine: Examine) -> None:
    finding = examine("algorithm=sft")["prompts"]
    assert finding.severity == "error"
    assert "holds no responses" in finding.message


def test_a_reward_model_is_looked_for_and_counted_in_memory(examine: Examine, tmp_path: Path) -> None:
    missing = examine(f"rewards=[environment, {{name: model, path: {tmp_path}/judge}}]")["rewards.1.path"]
    assert (missing.severity, missing.message) == (
        "warning",
        f"there is no {tmp_path}/judge on this machine, where the reward 'model' may look for it",
    )
    (tmp_path / "judge").mkdir()
    weights = {"a": torch.zeros(3 << 20, 4, dtype=torch.int8), "b": torch.zeros(4 << 20, dtype=torch.int8)}
    save_file(weights, tmp_path / "judge" / "model.safetensors")
    (tmp_path / "judge" / "broken.safetensors").write_bytes(b"no tensors")
    for dtype, size in {"float32": "64 MiB", "bfloat16": "32 MiB"}.items():
        found = examine(f"rewards=[{{name: model, path: {tmp_path}/judge, dtype: {dtype}}}]")
        assert "rewards.0.path" not in found
        assert f"reward models {size}" in found["memory of the run"].message
    offline = examine(f"rewards=[{{name: model, path: {tmp_path}/other}}]", "algorithm=sft")
    assert "rewards.0.path" not in offline  # nobody is asked for a score


def test_a_run_without_any_evaluation_is_mentioned(examine: Examine) -> None:
    found = examine("evaluation.every=0", "evaluation.at_start=false", "evaluation.at_end=false")
    assert found["evaluation"].severity == "info"


def test_a_critic_that_warms_up_for_the_whole_run_never_trains_the_actor(examine: Examine) -> None:
    found = examine("algorithm={name: ppo}", "train.critic_warmup=4")
    assert found["train.critic_warmup"].is_bad


def test_every_broken_section_is_reported_not_only_the_first(examine: Examine) -> None:
    found = examine("rewards=[nope]", "executor.name=rya", "trackers=[{name: jsonl, colour: red}]")
    assert {"rewards.0", "executor", "trackers.0"} <= {name for name, finding in found.items() if finding.is_bad}


def test_an_occupied_directory_is_told_with_the_ways_out(examine: Examine, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for name in ("config.yaml", "manifest.json"):
        (tmp_path / "old" / name).write_text("{}")
    finding = examine(directory="old")["run.directory"]
    assert finding.severity == "warning"
    assert "--overwrite" in finding.message
    assert sorted(path.name for path in (tmp_path / "old").iterdir()) == ["config.yaml", "manifest.json"]


@pytest.mark.parametrize(("free", "severity"), [(1000, "error"), (600_000, "warning"), (10**9, "ok")])
def test_room_for_checkpoints(examine: Examine, monkeypatch: pytest.MonkeyPatch, free: int, severity: str) -> None:
    usage = training_checks.shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr(training_checks.shutil, "disk_usage", lambda _: usage)
    found = examine()
    assert {found[name].severity for name in ("checkpoint", "checkpoint.keep") if name in found} == {severity}


def test_the_usual_learning_rate_falls_with_size_and_is_higher_for_adapters() -> None:
    assert usual_learning_rate(7_000_000_000, adapters=False) == pytest.approx(1e-6)
    assert usual_learning_rate(135_000_000, adapters=False) == pytest.approx(1.3e-5, rel=0.05)
    assert usual_learning_rate(7_000_000_000, adapters=True) == pytest.approx(1e-5)
    assert usual_learning_rate(10, adapters=True) == 1e-2


def test_findings_come_worst_first_and_once() -> None:
    ok, bad = Finding("ok", "a", "fine"), Finding("error", "b", "broken")
    assert sorted_findings([ok, bad, ok]) == [bad, ok]


def test_diagnose_covers_machine_packages_plugins_and_config(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    config = load_config(tmp_path / "tiny.yaml", [f"run.directory={tmp_path / 'run'}"])
    subjects = {finding.subject for finding in diagnose(config)}
    assert {"processor", "memory", "packages", "plugins", "batch"} <= subjects
    assert "batch" not in {finding.subject for finding in diagnose()}


def test_the_command_prints_findings_and_its_exit_code_tells_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(CONFIG)
    assert main(["doctor", "tiny.yaml"]) == 0
    assert "trajectories a step" in capsys.readouterr().out
    assert main(["doctor", "tiny.yaml", "backend.learning_rate=0", "--json"]) == 2
    assert '"subject": "backend.learning_rate"' in capsys.readouterr().out
    assert not Path("runs").exists(), "nothing is written"
