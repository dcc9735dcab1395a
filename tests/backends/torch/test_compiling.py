"""Layers that torch compiles give what they give without, and say what is missing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstock import Batch, ModelSpec, Totals, UserError
from rollstock.backends.torch import compiling
from rollstock.backends.torch.backend import TorchBackend
from rollstock.backends.torch.config import CompileConfig, TorchConfig

Make = Callable[..., TorchBackend]
needs_compiler = pytest.mark.skipif(
    compiling.missing_compiler(torch.device("cpu")) is not None, reason="needs a C++ compiler"
)


def test_without_a_compiler_the_message_says_what_to_install(make_backend: Make, monkeypatch: Any) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"^backend\.compile: on a CPU it needs the C\+\+ compiler no-such-compiler"):
        make_backend(compile=CompileConfig(enabled=True))
    make_backend(compile=CompileConfig())  # nobody asks for it


def test_lean_layers_have_no_modules_to_compile() -> None:
    with pytest.raises(ValueError, match="layers: lean does without them"):
        TorchConfig(compile=CompileConfig(enabled=True), layers="lean")


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("name", "fullgraph"), [("llama", False), ("llama", True), ("gpt2", False), ("qwen3_moe", False)]
)
def test_compiled_layers_update_as_others_do(
    name: str,
    fullgraph: bool,
    make_backend: Make,
    make_spec: Callable[..., ModelSpec],
    batch: Batch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # what another process left there may be half written
    torch._dynamo.reset()
    # A large eps: AdamW would make as much of a gradient that is 0 but for rounding as of any other.
    steps = {"learning_rate": 1.0, "eps": 1.0}
    plain = make_backend(make_spec(name), layers="modules", **steps)
    compiled = make_backend(make_spec(name), compile=CompileConfig(enabled=True, fullgraph=fullgraph), **steps)
    plans = [[list(range(7))], [[0, 1, 3], [2, 4, 5, 6]]]
    for cuts in plans[:1] if fullgraph else plans:  # with the attention, each plan is a compilation of its own
        found = [
            backend.update(
                batch,
                lambda micro: micro.loss(-micro.logprobs),
                outputs=["logprobs", "entropy"],
                temperature=0.7,
                micro_batches=cuts,
                totals=Totals.of(batch, response_limit=10),
            )
            for backend in (plain, compiled)
        ]
        assert found[0]["grad_norm"].value == pytest.approx(found[1]["grad_norm"].value, rel=1e-4)
        for (weight, mine), (_, theirs) in zip(plain.weights(), compiled.weights(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=weight)
    scores = [
        backend.forward(batch, ["logprobs"], temperature=1.0, micro_batches=cuts)["logprobs"]
        for backend in (plain, compiled)
    ]
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "something was compiled"
    assert [n for n, _ in plain.weights()] == [n for n, _ in compiled.weights()]
    torch._dynamo.reset()
