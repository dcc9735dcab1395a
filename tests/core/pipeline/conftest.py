"""A pipeline without a model: an engine whose tokens are a function of seed and place, and a run that only counts."""

import dataclasses
import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from rollstock import Batch, Completion, Environment, GenerationResult, NoOptions, Sampling, Task, WorkerGroup
from rollstock.episodes import Player
from rollstock.interrupt import Interrupt
from rollstock.pipeline.choice import make_pipeline
from rollstock.roles.reward import Scores
from rollstock.tokens import character_tokenizer

LONGEST = 12


class Endless(Environment[NoOptions]):
    """Tasks without end, of one turn."""

    def num_tasks(self, split):
        return None

    def task(self, split, index):
        return Task(id=str(index), prompt="ab")


class Engine(WorkerGroup):
    """Generates: token and length of a response depend on the seed alone, how long that takes on chance."""

    role = "rollout"
    size = 1

    def __init__(self, *, pause: float = 0.0) -> None:
        self.version = 0
        self.pause = pause
        self.calls: list[list[Any]] = []
        self.fails_at = -1

    def call(self, method, *args, **kwargs):
        assert method == "generate", method
        requests, _sampling = args
        if len(self.calls) == self.fails_at:
            raise ValueError("the engine broke")
        self.calls.append(requests)
        completions = []
        for request in requests:
            length = 2 + random.Random(request.seed).randrange(1, LONGEST + 1)  # places, of which the prompt has two
            places = range(len(request.prompt), min(length, len(request.prompt) + request.max_new_tokens))
            tokens = [1 + random.Random(request.seed + place).randrange(5) for place in places]
            completions.append(
                Completion(
                    tokens=tokens,
                    logprobs=[-0.125 * token for token in tokens],
                    finish_reason="stop" if len(request.prompt) + len(tokens) == length else "length",
                    versions=[self.version] * len(tokens),
                )
            )
        time.sleep(random.random() * self.pause)
        return GenerationResult(completions)

    def submit(self, method, *args, **kwargs):
        raise AssertionError("nobody needs it")


class Judge(WorkerGroup):
    """Scores a sample by its text, slowly."""

    role = "reward"
    size = 1

    def __init__(self, *, pause: float = 0.0) -> None:
        self.pause = pause
        self.scored: list[list[Any]] = []

    def call(self, method, *args, **kwargs):
        if method == "close":
            return None
        samples = args[0]
        self.scored.append(samples)
        time.sleep(random.random() * self.pause)
        totals = [float(len(sample.response)) for sample in samples]
        return Scores(totals, [{"length": total} for total in totals])

    def submit(self, method, *args, **kwargs):
        raise AssertionError("nobody needs it")


@dataclasses.dataclass
class Toy:
    """A run of so many steps, as far as a pipeline sees it, which notes what it was given."""

    run: Any
    engine: Engine
    judge: Judge

    @property
    def pipeline(self) -> Any:
        return self.run.pipeline

    def step(self) -> Batch:
        """One step of the loop, without training."""
        run, pipeline = self.run, self.run.pipeline
        run.step = run.progress.step + 1
        tasks = pipeline.next_tasks(run)
        episodes, _metrics = pipeline.play(run, tasks)
        pipeline.check_played()
        batch = Batch.from_trajectories([episode.trajectory() for episode in episodes])
        scores = pipeline.score(run, [row["sample"] for row in batch.metadata])
        batch["scores"] = batch.scores.new_tensor(scores.totals)
        run.ages.append(pipeline.age(batch, run.version))
        self.sync()
        run.progress.step, run.progress.position = run.step, run.position
        run.measured.append(pipeline.metrics())
        pipeline.finish_step()
        return batch

    def sync(self) -> None:
        with self.pipeline.updating():
            self.run.version += 1
            self.engine.version = self.run.version


@pytest.fixture
def toy():
    """Makes toys: `toy("async", max_staleness=2, steps=5)`; their threads end with the test."""
    made: list[Toy] = []

    def make(mode: str, *, steps: int = 5, prompts: int = 2, samples: int = 2, pause: float = 0.0, **options) -> Toy:
        from rollstock.schema import PipelineSection

        engine, judge = Engine(pause=pause), Judge(pause=pause)
        roles: dict[str, Any] = {"rollout": engine, "reward": judge}
        tokenizer = character_tokenizer("abcxyz?")
        environment = Endless()
        player = Player(
            lambda requests, how: roles["rollout"].call("generate", requests, how),
            environment,
            tokenizer,
            max_prompt_tokens=None,
            overlong="error",
        )
        config = SimpleNamespace(
            train=SimpleNamespace(prompts_per_step=prompts, steps=steps),
            pipeline=PipelineSection(mode=mode, **options),
        )
        run = SimpleNamespace(
            config=config,
            player=player,
            roles=roles,
            progress=SimpleNamespace(step=0, position=0),
            step=0,
            position=0,
            version=0,
            seed=0,
            sampling=Sampling(max_new_tokens=LONGEST),
            algorithm=SimpleNamespace(samples_per_prompt=samples),
            tasks=SimpleNamespace(train=lambda position: environment.task("train", position)),
            pipeline=make_pipeline(config, player, tokenizer, roles, Interrupt()),
            ages=[],
            measured=[],
        )
        made.append(Toy(run, engine, judge))
        run.pipeline.begin(run)
        made[-1].sync()
        return made[-1]

    yield make
    for each in made:
        each.pipeline.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollstock-")]
