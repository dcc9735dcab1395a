"""A run as trackers see it."""

import pytest

from rollstock import RunInfo


@pytest.fixture
def info(tmp_path):
    """Makes the description of a run in a directory of its own."""

    def make(resumed_at=None, num_steps=6, **config):
        return RunInfo(
            name="demo",
            directory=tmp_path,
            config={"run": {"name": "demo"}, **config},
            num_steps=num_steps,
            resumed_at=resumed_at,
        )

    return make


@pytest.fixture
def rows():
    """Trajectories of a step, as the core hands them over."""

    def make(step, count=3):
        return [
            {
                "step": step,
                "group": i,
                "task_id": f"t{i}",
                "prompt": f"What is {i} + 1?",
                "response": f"{i + 1}\n[bold]|x|[/bold]",
                "reward": None if i == 2 else float(i),
                "rewards": {"environment": float(i)},
                "finish_reason": "stop",
                "num_tokens": 2,
                "advantage": 0.5,
            }
            for i in range(count)
        ]

    return make
