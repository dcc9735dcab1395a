"""The checkpoint store chooses, prunes, replaces and refuses as it promises."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstock.checkpoint import CheckpointCorruptError, CheckpointNotFoundError, CheckpointStore
from rollstock.lockfile import LockedError


def tensors_of(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "actor/model": {"weight": torch.full((64, 8), float(step)), "steps": torch.tensor(step)},
        "actor/optimizer": {"moment": torch.randn(64, generator=torch.Generator().manual_seed(step))},
    }


def save(store: CheckpointStore, step: int, score: float | None = None, **state: Any) -> Path:
    return store.save(step, tensors=tensors_of(step), state={"step": step, **state}, score=score)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, said: list[str]) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", notice=said.append)


@pytest.mark.parametrize("compression", ["zstd", "none"])
def test_what_is_saved_comes_back(tmp_path: Path, compression: Any) -> None:
    store = CheckpointStore(tmp_path, compression=compression)
    state = {
        "kl": {"coefficient": 0.1 + 0.2},
        "order": [3, 1, 2],
        "seed": 2**70,
        "note": None,
        "done": False,
        "x": 1e-320,
    }
    path = store.save(7, tensors=tensors_of(7), state=state, score=0.5)
    assert path == tmp_path / "step-000007"
    loaded = CheckpointStore(tmp_path).load()
    assert (loaded.step, loaded.path, loaded.score, loaded.state) == (7, path, 0.5, state)
    assert list(loaded.tensors) == ["actor/model", "actor/optimizer"]
    assert "actor/model" in loaded.tensors
    for part, named in tensors_of(7).items():
        found = loaded.tensors[part]
        assert list(found) == list(named)
        assert all(torch.equal(found[name], named[name]) and found[name].dtype == named[name].dtype for name in named)


def test_a_floating_point_state_keeps_infinity_and_nan(store: CheckpointStore) -> None:
    save(store, 1, low=float("-inf"), undefined=float("nan"))
    state = store.load().state
    assert state["low"] == float("-inf")
    assert state["undefined"] != state["undefined"]


@pytest.mark.parametrize(
    ("state", "path"),
    [({"a": (1, 2)}, "state.a"), ({"a": {3: "x"}}, "state.a"), ({"a": [torch.ones(1)]}, r"state.a\[0\]")],
)
def test_a_state_that_would_come_back_changed_is_refused(store: CheckpointStore, state: Any, path: str) -> None:
    with pytest.raises(TypeError, match=path):
        store.save(1, tensors={}, state=state, score=None)
    assert store.steps() == []


@pytest.mark.parametrize("part", ["Actor", "../escape", "actor//model", "/etc", "a.b", ""])
def test_a_part_name_that_is_no_plain_path_is_refused(store: CheckpointStore, part: str) -> None:
    with pytest.raises(ValueError, match="part name"):
        store.save(1, tensors={part: {}}, state={}, score=None)


def test_the_newest_is_loaded_and_any_step_can_be_asked_for(store: CheckpointStore) -> None:
    for step in (1, 2, 10):
        save(store, step)
    assert store.steps() == [1, 2, 10]
    assert store.load().step == 10
    assert store.load(2).tensors["actor/model"]["weight"][0, 0] == 2.0


def test_an_empty_store_and_an_unknown_step_are_clear_errors(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointNotFoundError, match="has no checkpoint"):
        store.load()
    save(store, 3)
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint of step 4; steps there: 3"):
        store.load(4)


def test_the_last_k_and_the_best_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step, score in enumerate([0.1, 0.9, 0.3, None, float("nan"), 0.2]):
        save(store, step, score)
    assert store.steps() == [1, 4, 5]
    assert store.best() == 1
    assert store.load(4).score is None


def test_without_keep_best_only_the_last_k_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1, keep_best=False)
    for step, score in enumerate([0.9, 0.1, 0.2]):
        save(store, step, score)
    assert store.steps() == [2]


def test_the_newest_among_equal_scores_is_the_best(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        save(store, step, 1.0 if step < 3 else 0.0)
    assert store.best() == 2


def flip(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 0x10
    path.write_bytes(data)


def test_pruning_never_removes_the_only_sound_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2, 3):
        save(store, step)
    store.release()
    flip(next((tmp_path / "step-000003").glob("actor.model*")), 100)
    flip(next((tmp_path / "step-000002").glob("actor.model*")), 100)
    again = CheckpointStore(tmp_path, keep=1)
    again.prune()
    assert again.load().step == 1
    save(again, 4)
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-000004"]


def test_pruning_removes_nothing_if_nothing_is_sound(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2):
        flip(save(store, step) / "state.json")
    store.release()
    CheckpointStore(tmp_path, keep=1).prune()
    assert len(list(tmp_path.glob("step-*"))) == 2


FILES = [
    "actor.model.safetensors.zst",
    "actor.optimizer.safetensors.zst",
    "state.json",
    "manifest.json",
    "manifest.json.sha256",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["first bit", "middle bit", "last bit", "truncated", "emptied", "longer", "missing"])
def test_damage_to_any_file_is_found_and_the_older_one_is_chosen_aloud(
    store: CheckpointStore, said: list[str], name: str, damage: str
) -> None:
    save(store, 1)
    path = save(store, 2) / name
    size = path.stat().st_size
    if damage == "missing":
        path.unlink()
    elif damage in ("truncated", "emptied"):
        path.write_bytes(path.read_bytes()[: size // 2 if damage == "truncated" else 0])
    elif damage == "longer":
        path.write_bytes(path.read_bytes() + b"\0")
    else:
        flip(path, {"first bit": 0, "middle bit": size // 2, "last bit": -1}[damage])
    assert store.load().step == 1
    assert any(name in line and "damaged" in line for line in said)
    assert any("chose the older checkpoint of step 1" in line for line in said)
    with pytest.raises(CheckpointCorruptError, match=f"(?s){name}.*steps that look whole: 1"):
        store.load(2)


def test_if_every_checkpoint_is_damaged_each_fault_is_named(store: CheckpointStore) -> None:
    for step in (1, 2):
        flip(save(store, step) / "state.json")
    with pytest.raises(CheckpointCorruptError, match=r"(?s)step-000002.*step-000001"):
        store.load()


def test_damage_after_loading_is_found_when_a_part_is_read(store: CheckpointStore) -> None:
    loaded = (save(store, 1), store.load())[1]
    for name in ("actor.model.safetensors.zst", "actor.optimizer.safetensors.zst"):
        flip(loaded.path / name, 40)
    for part in loaded.tensors:
        with pytest.raises(CheckpointCorruptError, match=r"actor\."):
            loaded.tensors[part]


def test_a_checkpoint_of_another_format_says_so(store: CheckpointStore) -> None:
    import hashlib

    path = save(store, 1)
    text = (path / "manifest.json").read_text().replace('"format": 1', '"format": 99')
    (path / "manifest.json").write_text(text)
    (path / "manifest.json.sha256").write_text(f"{hashlib.sha256(text.encode()).hexdigest()}  manifest.json\n")
    with pytest.raises(CheckpointCorruptError, match="format 99"):
        store.load()


def test_saving_a_step_again_replaces_it(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 5, note="old")
    save(store, 5, note="new")
    assert store.load(5).state["note"] == "new"
    assert [path.name for path in sorted(store.root.iterdir())] == [".lock", "step-000005"]


def test_a_replacement_killed_between_its_renames_loses_nothing(store: CheckpointStore, said: list[str]) -> None:
    path = save(store, 5)
    store.release()
    path.rename(store.root / ".old-step-000005")
    reader = CheckpointStore(store.root)
    assert reader.load().step == 5, "a reader finds it without changing anything"
    assert (store.root / ".old-step-000005").exists()
    store.acquire()
    assert store.load().path == path


def test_remains_of_a_kill_are_cleared_by_the_next_writer_only(store: CheckpointStore, said: list[str]) -> None:
    path = save(store, 1)
    store.release()
    shutil.copytree(path, store.root / ".tmp-step-000002-99")
    shutil.copytree(path, store.root / ".trash-step-000000")
    shutil.copytree(path, store.root / ".old-step-000001")
    assert CheckpointStore(store.root).steps() == [1]
    assert (store.root / ".tmp-step-000002-99").exists()
    store.acquire()
    assert [path.name for path in sorted(store.root.iterdir())] == [".lock", "step-000001"]
    assert any(".tmp-step-000002-99" in line for line in said)


def test_a_failure_while_writing_leaves_nothing(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rollstock.checkpoint.store.write_folder", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(store, 2)
    assert [path.name for path in sorted(store.root.iterdir())] == [".lock", "step-000001"]


def test_two_writers_are_refused_and_readers_are_not(store: CheckpointStore) -> None:
    save(store, 1)
    other = CheckpointStore(store.root)
    with pytest.raises(LockedError, match="checkpoint folder"):
        save(other, 2)
    assert other.load().step == 1
    store.release()
    save(other, 2)


def test_the_default_notice_is_a_logged_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (save(store, 2) / "state.json").unlink()
    with caplog.at_level(logging.WARNING):
        store.load()
    assert "chose the older checkpoint of step 1" in caplog.text


def test_the_manifest_records_sizes_checksums_and_the_score(store: CheckpointStore) -> None:
    path = save(store, 3, 0.25)
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["step"], manifest["score"], manifest["compression"]) == (3, 0.25, "zstd")
    for name, digest in manifest["files"].items():
        assert (path / name).stat().st_size == digest["size"]


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep must be at least 1"):
        CheckpointStore(tmp_path, keep=0)
    with pytest.raises(ValueError, match="zstd, none"):
        CheckpointStore(tmp_path, compression="gzip")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not negative"):
        save(CheckpointStore(tmp_path), -1)
