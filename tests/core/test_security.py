"""What a user downloads is data and never code, plugins run only where a config names them, and secrets stay secret.

Beside these: Ray's sockets are looked at in tests/plugins/executors/test_ray_runs.py, a reward server's addresses in
tests/plugins/rewards/test_remote.py.
"""

import ast
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstock import ConfigError, Extension, RollstockError, hookimpl, option
from rollstock.checkpoint import CheckpointCorruptError, CheckpointStore
from rollstock.checkpoint.folder import MANIFEST, SEAL
from rollstock.cli import main
from rollstock.config import load_config
from rollstock.launch import resume, train
from rollstock.manager import make_manager
from rollstock.testing import installed

from ..conftest import SMALL_RUN
from .conftest import Site

ROOT = Path(__file__).parents[2]
FOLDERS = ("core", "algorithms", "backends", "hardware", "plugins")
# Calls that can run what they read.
READS_CODE = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "marshal.load", "marshal.loads", "shelve.open"),
    *("joblib.load", "dill.load", "dill.loads", "cloudpickle.load", "cloudpickle.loads", "numpy.load", "np.load"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec", "pandas.read_pickle", "torch.jit.load"),
}
# Messages between processes that this one started, through pipes and object stores of its own: no files.
BETWEEN_PROCESSES = {
    "core/sandbox/protocol.py",
    "core/sandbox/worker.py",
    "core/sandbox/outcome.py",
    "plugins/executors/_parcel.py",
}
OF_ITS_OWN = "core/testing/"
"""The kits pickle what they have made themselves, and read it back at once."""
MARK = "somebody-was-here"


def calls() -> Iterator[tuple[str, ast.Call, str]]:
    """Every call in the code of this project: file, node, and what is called."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    yield str(path.relative_to(ROOT)), node, ast.unparse(node.func)


def test_no_code_reads_what_could_be_code() -> None:
    found = {(path, name) for path, _, name in calls() if name in READS_CODE and not path.startswith(OF_ITS_OWN)}
    assert {path for path, _ in found} == BETWEEN_PROCESSES
    assert {name for _, name in found} == {"pickle.loads"}


def test_no_code_trusts_code_that_comes_with_a_model() -> None:
    for path, node, name in calls():
        for keyword in node.keywords:
            if keyword.arg == "trust_remote_code":
                assert ast.unparse(keyword.value) == "False", f"{path}:{node.lineno}: {name}"
            if keyword.arg in ("weights_only", "use_safetensors"):
                assert ast.unparse(keyword.value) == "True", f"{path}:{node.lineno}: {name}"


class Bomb:
    """Leaves a mark where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.target = str(folder / MARK)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.target,)


def bomb(folder: Path) -> bytes:
    return pickle.dumps(Bomb(folder))


def test_the_bomb_works(tmp_path: Path) -> None:
    pickle.loads(bomb(tmp_path))
    assert (tmp_path / MARK).exists()


def model_folder(path: Path) -> dict[str, Any]:
    """A folder with the config and tokenizer of a model, and its config; the weights are left to others."""
    from rollstock.testing.models import tiny_model, tiny_tokenizer

    path.mkdir()
    tiny_tokenizer().save_pretrained(path)
    config = {**tiny_model().config, "vocab_size": len(tiny_tokenizer()), "architectures": ["LlamaForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config))
    return config


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_pickle_among_a_models_files_is_refused_and_never_run(
    small_run: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    model_folder(tmp_path / "model")
    (tmp_path / "model" / name).write_bytes(bomb(tmp_path))
    config = small_run(tmp_path / "run", model={"path": str(tmp_path / "model")})
    with pytest.raises(RollstockError, match=r"model\.path"):
        train(config)
    assert not (tmp_path / MARK).exists()


def test_code_beside_a_model_is_not_run(small_run: Callable[..., Any], tmp_path: Path) -> None:
    config = model_folder(tmp_path / "model")
    config |= {
        "model_type": "special",
        "auto_map": {"AutoConfig": "special.SpecialConfig", "AutoModelForCausalLM": "special.Special"},
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "special.py").write_text(f"import os\nos.mkdir({str(tmp_path / MARK)!r})\n")
    (tmp_path / "model" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(RollstockError):
        train(small_run(tmp_path / "run", model={"path": str(tmp_path / "model")}))
    assert not (tmp_path / MARK).exists()


def test_a_chat_template_cannot_reach_beyond_its_text(tmp_path: Path) -> None:
    from rollstock.testing.models import tiny_tokenizer
    from rollstock.tokens import encode_prompt

    tokenizer = tiny_tokenizer()
    reach = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    tokenizer.chat_template = reach
    with pytest.raises(Exception, match="unsafe|is undefined|has no"):
        encode_prompt(tokenizer, [{"role": "user", "content": "1"}])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step."""
    from rollstock.testing import tiny_config

    path = tmp_path_factory.mktemp("security") / "run"
    train(tiny_config(path, SMALL_RUN, ["train.steps=1", "checkpoint.compression=none"]))
    return path


def replace(checkpoint: Path, name: str, content: bytes) -> None:
    """Put something else into a checkpoint, and seal it anew as somebody would who means harm."""
    import hashlib

    (checkpoint / name).write_bytes(content)
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    text = json.dumps(manifest).encode()
    (checkpoint / MANIFEST).write_bytes(text)
    (checkpoint / SEAL).write_text(f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n")


def test_a_pickle_in_a_checkpoint_is_refused_and_never_run(finished: Path, tmp_path: Path) -> None:
    import shutil

    run = tmp_path / "run"
    shutil.copytree(finished, run)
    replace(run / "checkpoints/step-000001", "actor.model.safetensors", bomb(tmp_path))
    checkpoint = CheckpointStore(run / "checkpoints").load()
    with pytest.raises(CheckpointCorruptError):
        checkpoint.tensors["actor/model"]
    assert main(["export", str(run), "--to", str(tmp_path / "out")]) != 0
    replace(run / "checkpoints/step-000001", "state.json", bomb(tmp_path))
    with pytest.raises(ValueError):  # noqa: PT011  # whatever a JSON reader says of bytes
        CheckpointStore(run / "checkpoints").load()
    assert not (tmp_path / MARK).exists()


def read(environment: Any) -> list[str]:
    """The prompts of an environment."""
    environment.setup(0)
    return sorted(environment.task("train", i).prompt for i in range(environment.num_tasks("train")))


def test_a_pickle_in_place_of_tasks_is_refused_and_never_run(tmp_path: Path) -> None:
    for name in ("tasks.jsonl", "tasks.parquet"):
        (tmp_path / name).write_bytes(bomb(tmp_path))
        environment = make_manager().create("environment", {"name": "jsonl", "path": str(tmp_path / name)})
        with pytest.raises(RollstockError, match="tasks"):
            read(environment)
    assert not (tmp_path / MARK).exists()


def test_tasks_are_data_whatever_they_hold(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"__import__('os').mkdir({str(tmp_path / MARK)!r})", "answer": "{{ 7 * 7 }}"},
        {"prompt": "${oc.env:HOME}", "answer": "1", "__reduce__": ["os.system", "true"]},
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"name": "jsonl", "path": str(tmp_path / "tasks.jsonl"), "heldout_fraction": 0.0, "chat": False}
    environment = make_manager().create("environment", options)
    assert read(environment) == sorted(row["prompt"] for row in rows)
    assert not (tmp_path / MARK).exists()


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.mkdir [{target}]", "!!python/name:os.system"])
def test_a_config_cannot_name_code_of_python(tmp_path: Path, tag: str) -> None:
    (tmp_path / "evil.yaml").write_text("run: " + tag.replace("{target}", str(tmp_path / MARK)) + "\n")
    with pytest.raises(ConfigError):
        load_config(tmp_path / "evil.yaml")
    assert not (tmp_path / MARK).exists()


def test_plugins_that_no_config_names_are_never_imported(
    site: Site, small_run: Callable[..., Any], tmp_path: Path
) -> None:
    code = f"import os\nos.mkdir({str(tmp_path / MARK)!r})\n"
    kinds = ("algorithm", "reward", "environment", "tracker", "extension", "backend", "executor")
    site.install("acme", {f"{kind}:unwanted": "acme_unwanted" for kind in kinds}, {"acme_unwanted": code})
    assert main(["plugins"]) == 0
    assert main(["plugins", "show", "reward:unwanted"]) == 0
    train(small_run(tmp_path / "run", "train.steps=1"))
    assert not (tmp_path / MARK).exists()
    with pytest.raises(RollstockError):  # it is no plugin, but it is imported where it is named
        train(small_run(tmp_path / "other", rewards=["unwanted"]))
    assert (tmp_path / MARK).exists()


KEY = "very-secret-key-of-no-known-shape"


def uploader() -> type[Extension[Any]]:
    from dataclasses import dataclass

    @dataclass(kw_only=True)
    class Options:
        api_key: str = option("", "key of the service")
        headers: dict[str, Any] = option({}, "sent along")
        fails: bool = option(False, "whether the service refuses")

    class Uploader(Extension[Options]):
        """Tells its key to everyone, in every way it can."""

        seen: list[str] = []  # noqa: RUF012  # shared on purpose

        @hookimpl
        def rollstock_step_end(self, run: Any, step: int, metrics: Any) -> None:
            import logging

            self.seen.append(self.config.api_key)
            run.trackers.message(f"uploading with {self.config.api_key}")
            logging.getLogger("rollstock.uploader").warning("headers are %s", self.config.headers)
            if self.config.fails:
                raise RuntimeError(f"the service refuses {self.config.api_key}")

    return Uploader


def everything_in(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path, path.read_bytes()


def test_keys_are_in_no_file_of_a_run_and_a_run_that_names_a_variable_can_be_resumed(
    small_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_logging: None
) -> None:
    monkeypatch.setenv("UPLOADER_KEY", KEY)
    monkeypatch.setattr("sys.argv", ["rollstock", "train", f"extensions=[{{name: uploader, api_key: {KEY}}}]"])
    run, made = tmp_path / "run", uploader()
    section = {"name": "uploader", "api_key": KEY, "headers": {"Authorization": f"Bearer {KEY}"}}
    steps = ["train.steps=2", "checkpoint.every_steps=1", "trackers=[jsonl]"]
    with installed("extension", "uploader", made):
        train(small_run(run, *steps, extensions=[{**section, "headers": {}}]))
        assert main(["report", str(run)]) == 0
        assert "${oc.env:UPLOADER_KEY}" in (run / "config.yaml").read_text()
        assert resume(run, step=1).step == 2
        assert made.seen == [KEY] * 3  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError):
            train(small_run(tmp_path / "other", *steps, extensions=[{**section, "fails": True}]))
        with pytest.raises(ConfigError, match=r"extensions\.0\.headers\.Authorization was a secret, which is not kept"):
            resume(tmp_path / "other")
    leaks = [path for path, content in everything_in(tmp_path) if KEY.encode() in content]
    assert leaks == []
    assert "uploading with ********" in (run / "logs" / "controller.log").read_text()


def test_options_without_a_secrets_name_stay_as_they_are(small_run: Callable[..., Any], tmp_path: Path) -> None:
    train(
        small_run(
            tmp_path / "run", "train.steps=1", "run.name=a ******** name", "sampling.stop=['a sk-abcdefghijklmnop']"
        )
    )
    assert resume_config(tmp_path / "run").sampling.stop == ["a sk-abcdefghijklmnop"]
    assert resume_config(tmp_path / "run").run.name == "a ******** name"


def resume_config(run: Path) -> Any:
    from rollstock.config import load_run_config

    return load_run_config(run / "config.yaml")
