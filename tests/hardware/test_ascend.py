"""Ascend devices, as far as a machine without one can tell: a missing, broken or working torch-npu."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstock import Memory, UserError
from rollstock.hardware.ascend import Ascend, AscendConfig


@pytest.fixture
def chip(recorded: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """`torch.npu` of a machine with two NPUs."""
    api = recorded(set_compile_mode=("jit_compile",))
    monkeypatch.setattr(Ascend, "unavailable", lambda self: None)
    monkeypatch.setattr(Ascend, "api", lambda self: api)
    return api


def explain(site: Path, **environment: str) -> str:
    """What a fresh process with the packages in `site` says of the device, before it has imported torch."""
    code = "import sys; from rollstock.hardware.ascend import Ascend; assert 'torch' not in sys.modules; "
    code += "print(Ascend().unavailable())"
    inherited = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1", **environment}
    done = subprocess.run([sys.executable, "-c", code], env=inherited, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def install(site: Path, source: str) -> None:
    """A package torch_npu that torch loads by itself, as the real one is."""
    (site / "torch_npu").mkdir()
    (site / "torch_npu/__init__.py").write_text(textwrap.dedent(source))
    info = site / "torch_npu-2.7.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.7.1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")


NO_CANN = 'raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")\n'


def test_a_missing_package_is_named_with_the_extra_that_has_it() -> None:
    reason = str(Ascend().unavailable())
    assert "torch-npu is not installed" in reason
    assert "pip install 'rollstock[npu]'" in reason
    assert Ascend().count() == 0
    with pytest.raises(UserError, match="torch-npu is not installed"):
        Ascend().activate()


def test_without_cann_torch_itself_fails_and_the_way_out_is_named(tmp_path: Path) -> None:
    install(tmp_path, NO_CANN)
    reason = explain(tmp_path)
    assert "`import torch` itself fails" in reason
    assert "libhccl.so" in reason
    assert "CANN is missing, or its environment is not set" in reason
    assert "set TORCH_DEVICE_BACKEND_AUTOLOAD=0" in reason


def test_without_cann_and_without_autoload_the_package_is_what_cannot_be_loaded(tmp_path: Path) -> None:
    install(tmp_path, NO_CANN)
    reason = explain(tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "torch-npu 2.7.1 is installed but cannot be loaded (libhccl.so: cannot open" in reason
    assert "set_env.sh" in reason


def test_a_package_that_leaves_the_interpreter_is_survived(tmp_path: Path) -> None:
    install(tmp_path, "import sys\nsys.exit()\n")
    assert "gave up while loading CANN's libraries" in explain(tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "`import torch` itself fails" in explain(tmp_path)


def test_with_cann_s_environment_set_versions_are_suspected(tmp_path: Path) -> None:
    install(tmp_path, "raise AttributeError('no attribute _privateuse1')\n")
    reason = explain(tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0", ASCEND_TOOLKIT_HOME="/usr/local/Ascend")
    assert f"torch {torch.__version__.split('+')[0]}" in reason
    assert "torch-npu 2.7.1, which must agree in their first two numbers" in reason


WORKING = """
    import torch

    class npu:
        @staticmethod
        def is_available():
            return False

    def _autoload():
        torch.npu = npu

    _autoload()
"""


def test_no_device_and_hidden_devices_are_told_apart(tmp_path: Path) -> None:
    install(tmp_path, WORKING)
    assert "no NPU that this process can see; look at `npu-smi info`" in explain(tmp_path)
    hidden = explain(tmp_path, ASCEND_RT_VISIBLE_DEVICES="")
    assert "ASCEND_RT_VISIBLE_DEVICES is empty, which hides every NPU" in hidden


def test_a_device_that_is_there_is_available(tmp_path: Path) -> None:
    install(tmp_path, WORKING.replace("return False", "return True"))
    assert explain(tmp_path) == "None"


@pytest.mark.parametrize("on", [True, False])
def test_options_are_applied_through_torch_npu_s_interface(on: bool, chip: Any) -> None:
    limit = sys.getrecursionlimit()
    try:
        Ascend(AscendConfig(graph_mode=on, mix_precision=on, max_call_depth=limit + 500)).activate(1)
        assert chip.calls[-2:] == [("set_device", 1), ("set_compile_mode", ("jit_compile", on))]
        assert (chip.matmul.allow_hf32, chip.conv.allow_hf32) == (on, on)
        assert sys.getrecursionlimit() == limit + 500
        Ascend(AscendConfig(max_call_depth=100)).activate()
        assert sys.getrecursionlimit() == limit + 500  # never lowered
    finally:
        sys.setrecursionlimit(limit)


def test_without_mixed_precision_autocast_changes_nothing(chip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch, "autocast", lambda kind, dtype: asked.append((kind, dtype)))
    Ascend(AscendConfig(mix_precision=False)).autocast(torch.bfloat16)
    assert asked == []
    Ascend().autocast(torch.bfloat16)
    assert asked == [("npu", torch.bfloat16)]


def test_memory_seeds_and_waiting_go_through_the_chip(chip: Any) -> None:
    device = Ascend()
    assert device.memory(0) == Memory(total=1000, free=400, allocated=400, peak=450)
    device.seed(3)
    device.synchronize()
    device.release_memory()
    assert [call[0] for call in chip.calls[-3:]] == ["manual_seed_all", "synchronize", "empty_cache"]
    assert device.statistics() == {"utilization": 37.0}


def test_out_of_memory_is_recognised_in_old_and_new_versions() -> None:
    message = "NPU out of memory. Tried to allocate 72.00 MiB (NPU 0; 61.27 GiB total capacity)"
    assert Ascend().is_out_of_memory(RuntimeError(message))
    assert Ascend().is_out_of_memory(torch.OutOfMemoryError(message))


def test_names_for_processes() -> None:
    assert (Ascend().collective_backend, Ascend().visibility_variable) == ("hccl", "ASCEND_RT_VISIBLE_DEVICES")
