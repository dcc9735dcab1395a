"""How the cost of a step grows: the controller's with the size of a batch, a whole step's with every size of a config.

    python benchmarks/scaling.py controller          up to 4,096 trajectories of 8,192 tokens; a minute, 5 GiB
    python benchmarks/scaling.py step                the tiny model: batch, response length, group size; ten seconds
    python benchmarks/scaling.py plugins             installed and loaded plugins; half a minute
    python benchmarks/scaling.py all --pictures docs/images

`controller` takes steps of real runs in which nothing but the models is missing: the rollout engine answers at once
with random tokens, the backend with tensors of the right shapes. Everything else is rollstock's own: tasks, episodes,
batches, dispatch to eight workers a role, reward processes, micro-batches, advantages, metrics, files. The time inside
of the two is taken off; what scoring takes of this process is listed on its own. The last line of a table has the
exponents of the last three sizes: 1.00 is linear.

All times are of this process's one thread, as the system counts them, so that neighbours disturb them little.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH keeps it out

import outputs
import torch
from curves import Curve, picture

from rollstock import (
    Backend,
    BackendState,
    Completion,
    Extension,
    GenerationResult,
    Metric,
    NoOptions,
    Rollout,
    hookimpl,
)
from rollstock.launch import train
from rollstock.plugins.executors.local import Local
from rollstock.testing import installed, tiny_config

WORKERS = 8
GROUP = 8
LETTERS = "".join(chr(0x4E00 + i) for i in range(20_000))
ENGINE = {"seconds": 0.0}
"""Time that was spent inside of what stands for models."""

STAGES = ("generate", "score", "select", "prepare", "advantages", "update", "sync")

ENVIRONMENT = '''"""Tasks without an end, whose answers nobody knows."""

from rollstock import Environment, NoOptions, Task, hookimpl


class Endless(Environment[NoOptions]):
    def num_tasks(self, split):
        return None

    def task(self, split, index):
        return Task(id=f"{split}-{index}", prompt=chr(0x4E00 + index % 20_000) * 64)

    def score(self, sample):
        return float(ord(sample.response[0]) % 2)


@hookimpl
def rollstock_environment():
    return Endless
'''


@contextmanager
def _inside() -> Iterator[None]:
    began = time.process_time()
    try:
        yield
    finally:
        ENGINE["seconds"] += time.process_time() - began


class InstantRollout(Rollout[NoOptions]):
    """Answers with as many random tokens as may be."""

    def setup(self, model: Any, device: Any, tokenizer: Any) -> None:
        self._version = 0

    def generate(self, requests: Any, sampling: Any) -> GenerationResult:
        with _inside():
            length = sampling.max_new_tokens
            return GenerationResult([self._completion(request.seed, length) for request in requests])

    def _completion(self, seed: int, length: int) -> Completion:
        generator = torch.Generator().manual_seed(seed)
        return Completion(
            tokens=torch.randint(3, 20_000, (length,), generator=generator).tolist(),
            logprobs=(-torch.rand(length, generator=generator)).tolist(),
            finish_reason="length",
            versions=[self._version] * length,
        )

    def load_weights(self, weights: Any, version: int, *, alias: bool = False) -> None:
        self._version = version

    def fingerprint(self) -> str:
        return "instant"


class InstantBackend(Backend[NoOptions]):
    """Says 0 of every token, and learns nothing."""

    trains_together = True

    def setup(self, model: Any, device: Any, *, trainable: bool, total_updates: int) -> None: ...

    def forward(self, batch: Any, columns: Any, *, temperature: float, micro_batches: Any) -> Any:
        with _inside():
            return {name: torch.zeros(batch.num_tokens) for name in columns}

    def update(self, batch: Any, loss: Any, **_: Any) -> Any:
        return {"grad_norm": Metric(1.0)}

    def weights(self) -> Any:
        return iter(())

    def fingerprint(self) -> str:
        return "instant"

    def state(self) -> BackendState:
        return BackendState()

    def load_state(self, state: Any) -> None: ...

    def save_config(self, path: Path) -> None: ...


class Several(Local):
    """Many workers of a role in this process, so that batches are scattered and gathered."""

    shares_memory = False  # type: ignore[assignment]  # several workers of one model would have processes of their own


class Clock(Extension[NoOptions]):
    """Notes how much of a core each stage took, without what was spent inside of engines."""

    rows: list[dict[str, float]] = []  # noqa: RUF012  # of the process, since a run makes its own instance

    def _timed(self, name: str) -> Iterator[None]:
        began, inside = time.process_time(), ENGINE["seconds"]
        if name == "generate":
            self.row = {"between": 0.0}
        else:
            self.row["between"] += began - self.ended
        result = yield
        self.ended = time.process_time()
        self.row[name] = self.ended - began - (ENGINE["seconds"] - inside)
        return result

    @hookimpl(wrapper=True, tryfirst=True)
    def rollstock_generate(self, run: Any, tasks: Any) -> Any:
        return (yield from self._timed("generate"))

    @hookimpl(wrapper=True, tryfirst=True)
    def rollstock_score(self, run: Any, batch: Any) -> Any:
        return (yield from self._timed("score"))

    @hookimpl(wrapper=True, tryfirst=True)
    def rollstock_select(self, run: Any, batch: Any) -> Any:
        return (yield from self._timed("select"))

    @hookimpl(wrapper=True, tryfirst=True)
    def rollstock_prepare(self, run: Any, batch: Any) -> Any:
        return (yield from self._timed("prepare"))

    @hookimpl(wrapper=True, tryfirst=True)
    def rollstock_advantages(self, run: Any, batch: Any) -> Any:
        return (yield from self._timed("advantages"))

    @hookimpl(wrapper=True, tryfirst=True)
    def rollstock_update(self, run: Any, batch: Any) -> Any:
        return (yield from self._timed("update"))

    @hookimpl(wrapper=True, tryfirst=True)
    def rollstock_sync(self, run: Any) -> Any:
        if not run.step:  # before the first step there is nothing to measure
            return (yield)
        return (yield from self._timed("sync"))

    @hookimpl(trylast=True)
    def rollstock_step_end(self, run: Any, step: int, metrics: Any) -> None:
        self.row["finish"] = time.process_time() - self.ended
        Clock.rows.append({name: self.row[name] for name in (*STAGES, "finish", "between")})


def sections(name: str, **others: Any) -> dict[str, Any]:
    """A run without models."""
    return {
        "model": {
            "config": {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
                       "num_attention_heads": 1, "num_key_value_heads": 1},
            "tokenizer": {"characters": LETTERS},
        },
        "algorithm": {"name": "grpo", "group_size": GROUP, "kl_coef": 0.1},
        "environment": {"name": "endless"},
        "rewards": ["environment"],
        "backend": {"name": "instant"},
        "rollout": {"name": "instant"},
        "executor": {"name": "several"},
        "extensions": [{"name": "clock"}],
        "trackers": ["jsonl"],
        "roles": {role: {"count": WORKERS} for role in ("actor", "reference", "rollout")},
        "evaluation": {"at_start": False, "at_end": False},
        "checkpoint": {"every_minutes": 0},
        **others,
    }  # fmt: skip


@contextmanager
def instant() -> Iterator[None]:
    """Have what stands for models installed."""
    with ExitStack() as stack:
        for kind, name, plugin in (
            ("rollout", "instant", InstantRollout),
            ("backend", "instant", InstantBackend),
            ("executor", "several", Several),
            ("extension", "clock", Clock),
            ("environment", "endless", ENVIRONMENT),
        ):
            stack.enter_context(installed(kind, name, plugin))
        yield


def controller(num: int, tokens: int, steps: int = 2) -> dict[str, float]:
    """Seconds of each stage of a step of `num` trajectories of so many tokens, the median of all steps but the
    first."""
    Clock.rows = []
    with instant(), tempfile.TemporaryDirectory() as folder:
        made = sections("instant", sampling={"max_new_tokens": tokens})
        made["train"] = {"steps": steps, "prompts_per_step": num // GROUP, "mini_batches": 1}
        train(tiny_config(Path(folder) / "run", made))
    rows = Clock.rows[1:] or Clock.rows
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def own(row: dict[str, float]) -> float:
    """The controller's part: all but the way to the reward processes and back."""
    return sum(seconds for name, seconds in row.items() if name != "score")


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The slope of the last three points, both axes logarithmic: 1 where twice the size costs twice as much."""
    if len(sizes) < 2:
        return math.nan
    xs, ys = ([math.log(value) for value in values[-3:]] for values in (sizes, costs))
    return statistics.linear_regression(xs, ys).slope


def peak_gib() -> float:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure_controller(largest: int, tokens: int) -> list[Curve]:
    """Print the table of the controller, and return its curves."""
    sizes = [size for size in (128, 256, 512, 1024, 2048, 4096) if size <= largest]
    rows = []
    for size in sizes:
        row = controller(size, tokens, steps=2 if size <= 1024 else 1)
        rows.append(row)
        if size == sizes[0]:
            print(
                f"{'trajectories':>12}", *(f"{name:>10}" for name in row), f"{'controller':>11}{'us/1k':>8}{'GiB':>7}"
            )
        per = own(row) / size / tokens * 1e9
        print(f"{size:>12}", *(f"{seconds:>10.4f}" for seconds in row.values()),
              f"{own(row):>11.3f}{per:>8.1f}{peak_gib():>7.2f}", flush=True)  # fmt: skip
    slopes = {name: exponent(sizes, [row[name] for row in rows]) for name in rows[0]}
    print(f"{'exponent':>12}", *(f"{slope:>10.2f}" for slope in slopes.values()),
          f"{exponent(sizes, [own(row) for row in rows]):>11.2f}")  # fmt: skip
    names = sorted(rows[0], key=lambda name: -rows[-1][name])[:4]
    curves = [Curve("controller", sizes, [own(row) for row in rows])]
    return [*curves, *(Curve(name, sizes, [row[name] for row in rows]) for name in names if name != "score")]


def tiny_step(prompts: int, tokens: int, group: int) -> float:
    """Seconds of a step of the tiny model, responses of exactly so many tokens; the median of two after one."""
    Clock.rows = []
    with installed("extension", "clock", Clock), tempfile.TemporaryDirectory() as folder:
        made = {
            "algorithm": {"name": "grpo", "group_size": group},
            "extensions": [{"name": "clock"}],
            "sampling": {"max_new_tokens": tokens, "min_new_tokens": tokens},
            "train": {"steps": 3, "prompts_per_step": prompts},
            "evaluation": {"at_start": False, "at_end": False},
            "checkpoint": {"every_minutes": 0},
            "trackers": ["jsonl"],
        }
        train(tiny_config(Path(folder) / "run", made, ["model.config.max_position_embeddings=1024"]))
    return statistics.median(sum(row.values()) for row in Clock.rows[1:])


def measure_steps() -> list[Curve]:
    """Print how a step of the tiny model grows with each of its sizes, the others fixed."""
    ways = {
        "prompts a step": ([4, 8, 16, 32, 64], lambda size: tiny_step(size, 16, 8)),
        "tokens a response": ([16, 32, 64, 128, 256], lambda size: tiny_step(8, size, 8)),
        "samples a prompt": ([4, 8, 16, 32, 64], lambda size: tiny_step(8, 16, size)),
    }
    curves = []
    for name, (sizes, measure) in ways.items():
        seconds = [measure(size) for size in sizes]
        print(f"{name:>18}", *(f"{size:>8}" for size in sizes), " exponent")
        print(f"{'seconds':>18}", *(f"{value:>8.3f}" for value in seconds), f"{exponent(sizes, seconds):>9.2f}",
              flush=True)  # fmt: skip
        curves.append(Curve(name, sizes, seconds))
    return curves


class Bystander(Extension[NoOptions]):
    """Wraps every stage, and does nothing."""

    @hookimpl(wrapper=True)
    def rollstock_generate(self, run: Any, tasks: Any) -> Any:
        return (yield)

    @hookimpl(wrapper=True)
    def rollstock_score(self, run: Any, batch: Any) -> Any:
        return (yield)

    @hookimpl(wrapper=True)
    def rollstock_select(self, run: Any, batch: Any) -> Any:
        return (yield)

    @hookimpl(wrapper=True)
    def rollstock_prepare(self, run: Any, batch: Any) -> Any:
        return (yield)

    @hookimpl(wrapper=True)
    def rollstock_advantages(self, run: Any, batch: Any) -> Any:
        return (yield)

    @hookimpl(wrapper=True)
    def rollstock_update(self, run: Any, batch: Any) -> Any:
        return (yield)

    @hookimpl(wrapper=True)
    def rollstock_sync(self, run: Any) -> Any:
        return (yield)


def with_plugins(num_loaded: int, num_installed: int) -> tuple[float, float]:
    """Seconds of a step of 64 short trajectories without models, and of the start of the run, with so many extensions
    around its stages, of so many plugins that are installed."""
    Clock.rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(instant())
        stack.enter_context(installed("extension", "bystander", Bystander))
        for number in range(num_installed):
            info = folder / f"other_{number}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: other-{number}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[rollstock.extension]\nother_{number} = other_{number}\n")
        sys.path.insert(0, str(folder))
        made = sections("instant", sampling={"max_new_tokens": 16})
        made["extensions"] = [{"name": "clock"}, *[{"name": "bystander"}] * num_loaded]
        made["train"] = {"steps": 12, "prompts_per_step": 8}
        began = time.process_time()
        try:
            train(tiny_config(folder / "run", made))
        finally:
            sys.path.remove(str(folder))
        whole = time.process_time() - began
    return statistics.median(own(row) for row in Clock.rows[1:]), whole - sum(sum(row.values()) for row in Clock.rows)


def measure_plugins() -> list[Curve]:
    """Print what installed and loaded plugins cost."""
    loaded, installed_ = [0, 10, 50, 100], [0, 50, 100, 200]
    with_plugins(0, 0)
    # In turn, three times: what the machine does meanwhile falls on all of them.
    rounds = [([with_plugins(n, 0)[0] for n in loaded], [with_plugins(0, n) for n in installed_]) for _ in range(3)]
    steps = [statistics.median(values) for values in zip(*(steps for steps, _ in rounds), strict=True)]
    starts = [
        (statistics.median(step for step, _ in found), statistics.median(start for _, start in found))
        for found in zip(*(starts for _, starts in rounds), strict=True)
    ]
    print(f"{'extensions loaded':>26}", *(f"{count:>8}" for count in loaded))
    print(f"{'ms a step':>26}", *(f"{1e3 * seconds:>8.2f}" for seconds in steps))
    each = 1e6 * (steps[-1] - steps[0]) / loaded[-1]
    print(f"{'us a step for each':>26} {each:>8.1f}  (7 stages wrapped by each)")
    print(f"{'plugins installed':>26}", *(f"{count:>8}" for count in installed_))
    print(f"{'ms a step':>26}", *(f"{1e3 * step:>8.2f}" for step, _ in starts))
    print(f"{'s to start and end a run':>26}", *(f"{start:>8.2f}" for _, start in starts), flush=True)
    return [Curve("extensions loaded, ms a step", loaded, [1e3 * value for value in steps])]


def main() -> None:
    """Print the tables that are asked for, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["controller", "step", "plugins", "all"])
    parser.add_argument("--largest", type=int, default=4096, help="most trajectories of `controller`")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of each of them")
    parser.add_argument("--pictures", type=outputs.folder, help="a folder for SVG pictures")
    parser.add_argument("--json", type=outputs.file, help="a file for the numbers")
    options = parser.parse_args()
    found: dict[str, list[Curve]] = {}
    if options.what in ("controller", "all"):
        found["controller"] = measure_controller(options.largest, options.tokens)
    if options.what in ("step", "all"):
        found["step"] = measure_steps()
    if options.what in ("plugins", "all"):
        found["plugins"] = measure_plugins()
    titles = {
        "controller": (f"Controller: seconds of a step, by trajectories of {options.tokens:,} tokens", "trajectories"),
        "step": ("A whole step of the tiny model: seconds, by each of its sizes", "size"),
        "plugins": ("Without models: milliseconds of a step, by extensions around its stages", "extensions"),
    }
    if options.pictures:
        for name, curves in found.items():
            title, label = titles[name]
            path = options.pictures / f"scaling-{name}.svg"
            path.write_text(picture(curves, title=title, label=label, logarithmic=name != "plugins"), encoding="utf-8")
            print(f"wrote {path}")
    if options.json:
        plain = {name: {curve.label: [curve.sizes, curve.values] for curve in curves} for name, curves in found.items()}
        options.json.write_text(json.dumps(plain, indent=1))


if __name__ == "__main__":
    main()
