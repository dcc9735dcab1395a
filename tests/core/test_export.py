"""An exported model loads in plain transformers and is the checkpoint's policy; its card tells how it was trained."""

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollstock.checkpoint import CheckpointStore
from rollstock.cli import main
from rollstock.config import load_config
from rollstock.errors import RunError, UserError
from rollstock.export import export
from rollstock.launch import train

CONFIG = """
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
           num_key_value_heads: 1, max_position_embeddings: 32, tie_word_embeddings: true}
  tokenizer: {characters: "0123456789+="}
algorithm: {name: grpo, group_size: 4}
environment: {name: arithmetic, chat: false, prompt: "{a}{op}{b}="}
sampling: {max_new_tokens: 3}
train: {steps: 4, prompts_per_step: 4, seed: 3}
backend: {name: torch, learning_rate: 1.0e-2}
evaluation: {prompts: 4, every: 2}
checkpoint: {every_steps: 2}
trackers: [jsonl]
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that trains a tiny model with the given overrides, once each, and returns the run directory."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.yaml").write_text(CONFIG)
    made: dict[tuple[str, ...], Path] = {}

    def run(*overrides: str) -> Path:
        if overrides not in made:
            path = folder / f"run-{len(made)}"
            train(load_config(folder / "tiny.yaml", [*overrides, f"run.directory={path}"]))
            made[overrides] = path
        return made[overrides]

    return run


@pytest.fixture
def run(trained: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a trained run that a test may damage."""
    return Path(shutil.copytree(trained(), tmp_path / "run"))


def test_plain_transformers_loads_the_weights_of_the_newest_checkpoint(run: Path, tmp_path: Path) -> None:
    out = export(run, tmp_path / "out" / "model")
    model = AutoModelForCausalLM.from_pretrained(out)
    checkpoint = CheckpointStore(run / "checkpoints").load()
    saved = checkpoint.tensors["actor/model"]
    found = model.state_dict()
    assert checkpoint.step == 4
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("1+1=", return_tensors="pt").input_ids
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)
    assert generated.shape[1] <= ids.shape[1] + 2
    assert not list(tmp_path.glob("out/.*")), "nothing is left beside it"


def test_steps_best_and_last_choose_the_checkpoint(run: Path, tmp_path: Path) -> None:
    store = CheckpointStore(run / "checkpoints")
    best = store.best()
    for name, step, expected in (("a", 2, 2), ("b", "last", 4), ("c", "best", best)):
        out = export(run, tmp_path / name, step=step)  # type: ignore[arg-type]
        model = AutoModelForCausalLM.from_pretrained(out)
        weight = store.load(expected).tensors["actor/model"]["model.norm.weight"]
        assert torch.equal(model.state_dict()["model.norm.weight"], weight)
        assert f"checkpoint: step {expected} of 4" in (out / "README.md").read_text()


def test_adapters_are_merged(trained: Callable[..., Path], tmp_path: Path) -> None:
    run = trained("backend.lora.rank=4")
    out = export(run, tmp_path / "out")
    saved = CheckpointStore(run / "checkpoints").load().tensors["actor/model"]
    model = AutoModelForCausalLM.from_pretrained(out)
    layer = "model.layers.0.self_attn.q_proj"
    down, up = saved[f"lora.{layer}.A"], saved[f"lora.{layer}.B"]
    assert up.abs().max() > 0, "training has moved the adapter"
    moved = model.state_dict()[f"{layer}.weight"] - saved[f"{layer}.weight"]
    product = up @ down
    scale = (moved * product).sum() / (product * product).sum()
    torch.testing.assert_close(moved, scale * product, atol=1e-6, rtol=1e-4)
    assert scale > 0
    assert not any("lora" in name for name in model.state_dict())


def test_a_critics_head_and_weights_stay_behind(trained: Callable[..., Path], tmp_path: Path) -> None:
    run = trained("algorithm={name: ppo}")
    out = export(run, tmp_path / "out")
    assert "critic/model" in CheckpointStore(run / "checkpoints").load().tensors
    _, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["unexpected_keys"]
    assert not report["missing_keys"]


def test_weights_can_be_halved_and_the_config_says_so(run: Path, tmp_path: Path) -> None:
    out = export(run, tmp_path / "out", dtype="bfloat16")
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == torch.bfloat16
    with pytest.raises(UserError, match="float32, bfloat16, float16"):
        export(run, tmp_path / "other", dtype="int4")  # type: ignore[arg-type]


@pytest.mark.parametrize("lora", [[], ["backend.lora.rank=4"]])
def test_the_base_model_is_not_needed_again(trained: Callable[..., Path], tmp_path: Path, lora: list[str]) -> None:
    base = export(trained(), tmp_path / "base")
    run = trained(f"model={{path: {base}}}", "train.steps=1", *lora)
    here = export(run, tmp_path / "here")
    base.rename(tmp_path / "gone")
    there = export(run, tmp_path / "there")
    first, second = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (here, there))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_nothing_is_overwritten(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export(run, tmp_path / "out")
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    with pytest.raises(UserError, match="not an empty directory"):
        export(run, tmp_path / "out")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="not an empty directory"):
        export(run, tmp_path / "file")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before


def test_a_place_that_cannot_be_written_is_the_users_to_change(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"nothing of it is left: .*; choose another --to"):
        export(run, tmp_path / "file" / "out")


@pytest.fixture
def small_files(run: Path) -> Iterator[None]:
    """Once the run is there, no file may grow over 30 kB, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("small_files")
def test_weights_that_find_no_room_are_a_failure_in_words_and_leave_nothing(run: Path, tmp_path: Path) -> None:
    to = tmp_path / "new" / "model"
    with pytest.raises(RunError, match=f"the export to {to} failed, and nothing of it is left: File too large$"):
        export(run, to)
    assert not to.parent.exists()


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda run: (run / "model" / "config.json").unlink(), UserError, r"has no config\.json"),
        (lambda run: shutil.rmtree(run / "checkpoints"), UserError, "has no checkpoint"),
        (lambda run: (run / "config.yaml").unlink(), UserError, "holds no run"),
    ],
)
def test_what_is_missing_is_named(
    run: Path, tmp_path: Path, damage: Callable[[Path], Any], error: type[Exception], message: str
) -> None:
    damage(run)
    with pytest.raises(error, match=message):
        export(run, tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


def test_a_step_that_is_none_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a number nor best nor last"):
        export(run, tmp_path / "out", step="latest")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no checkpoint of step 3; steps there: 2, 4"):
        export(run, tmp_path / "out", step=3)


def test_a_checkpoint_without_scores_has_no_best_and_one_without_a_policy_is_refused(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    CheckpointStore(run / "checkpoints").save(1, tensors={"x": {}}, state={}, score=None)
    with pytest.raises(UserError, match="has a score"):
        export(run, tmp_path / "out", step="best")
    with pytest.raises(RunError, match="holds no policy: its parts are x"):
        export(run, tmp_path / "out")


def test_the_card_tells_how_it_was_trained_and_no_secret(run: Path, tmp_path: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["environment"]["system"] = "hf_abcdefghijklmnopqrstuvwx"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    card = (export(run, tmp_path / "out", step=2) / "README.md").read_text()
    assert "hf_abcdefgh" not in card
    for told in ("`grpo` on `arithmetic`", "seed: 3", "| 1 | ", "| 2 | ", "eval/greedy/solved", "group_size: 4"):
        assert told in card
    assert "| 4 | " not in card, "nothing of what came after the exported step"


def test_the_command_line_exports_the_best(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), "--to", str(tmp_path / "out"), "--step", "best", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(tmp_path / "out")}
    assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 2
    assert "not an empty directory" in capsys.readouterr().err
    assert main(["export", str(run), "--to", str(tmp_path / "other"), "--step", "soon"]) == 2
