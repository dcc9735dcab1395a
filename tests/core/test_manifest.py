"""The manifest says what a run was made with, and no secret."""

import json
import subprocess
from pathlib import Path

import pytest

from rollstock import manifest as manifests
from rollstock.manifest import build_manifest, changes_since, describe_git, record_resume, write_manifest
from rollstock.secrets import MASK

PLUGINS = [{"kind": "algorithm", "name": "grpo", "distribution": "rollstock", "version": "0.1.0"}]


def build() -> dict[str, object]:
    return build_manifest(
        plugins=PLUGINS, seed=3, data={"train": "abc"}, command=["rollstock", "train", "x.api_key=s3cret"]
    )


def test_it_names_versions_plugins_hardware_data_seed_and_command() -> None:
    manifest = build()
    assert manifest["command"] == ["rollstock", "train", f"x.api_key={MASK}"]
    assert manifest["plugins"] == PLUGINS
    assert manifest["seed"] == 3
    assert manifest["data"] == {"train": "abc"}
    assert {"pytest", "torch", "rollstock"} <= set(manifest["packages"])  # type: ignore[call-overload]
    hardware = manifest["hardware"]
    assert hardware["num_cores"] >= 1  # type: ignore[index]
    assert hardware["memory_bytes"] > 2**28  # type: ignore[index]
    assert json.loads(json.dumps(manifest)) == manifest


def test_the_environment_is_recorded_without_its_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("HF_TOKEN", "topsecret1")
    monkeypatch.setenv("ROLLSTOCK_PASSWORD", "topsecret2")
    monkeypatch.setenv("WANDB_API_KEY", "topsecret3")
    manifest = build()
    write_manifest(tmp_path / "manifest.json", manifest)
    assert manifest["environment"]["OMP_NUM_THREADS"] == "2"  # type: ignore[index]
    text = (tmp_path / "manifest.json").read_text()
    assert "topsecret" not in text
    assert "s3cret" not in text


def test_a_git_commit_is_found_and_its_absence_is_none(tmp_path: Path) -> None:
    assert describe_git(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "a").write_text("1")
    subprocess.run([*git, "add", "a"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "a"], check=True)
    found = describe_git(tmp_path)
    assert found is not None
    assert len(found["commit"]) == 40
    assert found["clean"] is True
    (tmp_path / "a").write_text("2")
    assert describe_git(tmp_path) == {**found, "clean": False}


def test_a_resume_is_recorded_with_what_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    manifest = build()
    assert changes_since(manifest) == []
    manifest["packages"]["torch"] = "0.0.1"  # type: ignore[index]
    manifest["packages"]["gone"] = "1.0"  # type: ignore[index]
    write_manifest(path, manifest)
    changes = record_resume(path, 12, command=["rollstock", "resume", "x"])
    assert any(change.startswith("torch ") and change.endswith(", was 0.0.1") for change in changes)
    assert "gone not installed, was 1.0" in changes
    resumed = json.loads(path.read_text())["resumed"]
    assert [(entry["step"], entry["changed"]) for entry in resumed] == [(12, changes)]
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize("damage", [None, "{half", "[]", "{}"])
def test_a_lost_manifest_does_not_stop_a_resume(tmp_path: Path, damage: str | None) -> None:
    path = tmp_path / "manifest.json"
    if damage is not None:
        path.write_text(damage)
    assert record_resume(path, 3) == []
    written = json.loads(path.read_text())
    assert "lost" in written["note"]
    assert written["resumed"][0]["step"] == 3


def test_a_machine_without_proc_still_has_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "Path", lambda _: Path("/nowhere/at/all"))
    assert manifests._processor()
