"""The whole contract between rollstock and its plugins.

First the providers, one for each kind of plugin: the six that give the framework its shape, then those that a run also
needs. A provider is implemented by the module that an entry point names, and returns the class that a config then makes
an instance of. Then the stages and listeners, in the order in which a run fires them. A stage is a first-result hook:
the core's own implementation comes last, so that a plugin may answer in its place, or wrap it with
`@hookimpl(wrapper=True)`. Hooks fire per step, never per token. The thread of the run calls them all, but for those
that tell of workers: where generation runs ahead of training, the core's generate and score stages find done what other
threads did.

What an instance of a kind must do is in `rollstock.interfaces`. Stages and listeners may be implemented by any plugin,
as functions of its module or as methods of its class (which then see `self.config`); they fire only if the config names
the plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rollstock.batch import Batch
    from rollstock.interfaces.algorithm import Algorithm
    from rollstock.interfaces.backend import Backend
    from rollstock.interfaces.compressor import Compressor
    from rollstock.interfaces.device import Device
    from rollstock.interfaces.environment import Environment, Task
    from rollstock.interfaces.executor import Executor
    from rollstock.interfaces.extension import Extension
    from rollstock.interfaces.reward import Reward
    from rollstock.interfaces.rollout import Rollout
    from rollstock.interfaces.router import Router
    from rollstock.interfaces.scheduler import Scheduler
    from rollstock.interfaces.tracker import Tracker
    from rollstock.interfaces.transport import Transport
    from rollstock.metrics import Metrics
    from rollstock.run import Run

hookspec = pluggy.HookspecMarker("rollstock")
hookimpl = pluggy.HookimplMarker("rollstock")


# Providers: the six that give the framework its shape


@hookspec
def rollstock_algorithm() -> type[Algorithm[Any]]:
    """Give the algorithm class of this module.

    Called once in every process that needs the algorithm, after the module is imported because a config names it. The
    return value is a subclass of `rollstock.Algorithm`; anything else (an instance, None) is refused with the plugin's
    name.

    Example:

        @hookimpl
        def rollstock_algorithm() -> type[Algorithm]:
            return GRPO
    """


@hookspec
def rollstock_backend() -> type[Backend[Any]]:
    """Give the backend class of this module: a subclass of `rollstock.Backend`, which holds a model and trains it.

    Called once in every process that trains or scores with a model. Anything but such a class is refused with the
    plugin's name.

    Example:

        @hookimpl
        def rollstock_backend() -> type[Backend]:
            return TorchBackend
    """


@hookspec
def rollstock_router() -> type[Router[Any]]:
    """Give the router class of this module: a subclass of `rollstock.Router`, which chooses experts for tokens.

    Called once in every process that holds a mixture-of-experts model. Anything but such a class is refused with the
    plugin's name.

    Example:

        @hookimpl
        def rollstock_router() -> type[Router]:
            return TopK
    """


@hookspec
def rollstock_compressor() -> type[Compressor[Any]]:
    """Give the compressor class of this module: a subclass of `rollstock.Compressor`, which shrinks tensors for a
    network.

    Called once in every process that sends gradients or weights. Anything but such a class is refused with the plugin's
    name.

    Example:

        @hookimpl
        def rollstock_compressor() -> type[Compressor]:
            return Int8
    """


@hookspec
def rollstock_device() -> type[Device[Any]]:
    """Give the device class of this module: a subclass of `rollstock.Device`, the only code that talks to a chip.

    Called once in every process that computes, before any tensor is made. The class must import without the chip:
    `Device.unavailable` says what is missing. Anything but such a class is refused with the plugin's name.

    Example:

        @hookimpl
        def rollstock_device() -> type[Device]:
            return CPU
    """


@hookspec
def rollstock_scheduler() -> type[Scheduler[Any]]:
    """Give the scheduler class of this module: a subclass of `rollstock.Scheduler`, which decides sizes and places.

    Called once in the controller and in every worker that cuts batches. Anything but such a class is refused with the
    plugin's name.

    Example:

        @hookimpl
        def rollstock_scheduler() -> type[Scheduler]:
            return DynamicBatch
    """


# Providers: the kinds that a run also needs


@hookspec
def rollstock_rollout() -> type[Rollout[Any]]:
    """Give the rollout class of this module: a subclass of `rollstock.Rollout`, which generates with the current
    weights.

    Called once in every process that generates. Anything but such a class is refused with the plugin's name.

    Example:

        @hookimpl
        def rollstock_rollout() -> type[Rollout]:
            return Native
    """


@hookspec
def rollstock_environment() -> type[Environment[Any]]:
    """Give the environment class of this module: a subclass of `rollstock.Environment`, which hands out tasks and
    scores.

    Called once in the controller and in every reward process. Anything but such a class is refused with the plugin's
    name.

    Example:

        @hookimpl
        def rollstock_environment() -> type[Environment]:
            return Arithmetic
    """


@hookspec
def rollstock_reward() -> type[Reward[Any]]:
    """Give the reward class of this module: a subclass of `rollstock.Reward`, which scores trajectories.

    Called once in every reward process; a config may name several rewards. Anything but such a class is refused with
    the plugin's name.

    Example:

        @hookimpl
        def rollstock_reward() -> type[Reward]:
            return Rule
    """


@hookspec
def rollstock_executor() -> type[Executor[Any]]:
    """Give the executor class of this module: a subclass of `rollstock.Executor`, which starts workers and calls them.

    Called once, in the controller. Anything but such a class is refused with the plugin's name.

    Example:

        @hookimpl
        def rollstock_executor() -> type[Executor]:
            return Local
    """


@hookspec
def rollstock_transport() -> type[Transport[Any]]:
    """Give the transport class of this module: a subclass of `rollstock.Transport`, which moves bytes between
    processes.

    Called once in every process that sends or receives. Anything but such a class is refused with the plugin's name.

    Example:

        @hookimpl
        def rollstock_transport() -> type[Transport]:
            return SharedMemory
    """


@hookspec
def rollstock_tracker() -> type[Tracker[Any]]:
    """Give the tracker class of this module: a subclass of `rollstock.Tracker`, which records metrics and samples.

    Called once, in the controller; a config may name several trackers. Anything but such a class is refused with the
    plugin's name.

    Example:

        @hookimpl
        def rollstock_tracker() -> type[Tracker]:
            return Console
    """


@hookspec
def rollstock_extension() -> type[Extension[Any]]:
    """Give the extension class of this module: a subclass of `rollstock.Extension`, whose methods are the hooks below.

    Called once, in the controller; extensions wrap in the order in which the config names them, the first outermost.
    Anything but such a class is refused with the plugin's name.

    Example:

        @hookimpl
        def rollstock_extension() -> type[Extension]:
            return OverlongPenalty
    """


# The life of a run, in firing order


@hookspec
def rollstock_run_start(run: Run) -> None:
    """A run begins, or goes on from a checkpoint.

    Called once, after every worker is built and state is restored, before the first evaluation and step. `run` gives
    the config, the directory, the roles and the step to begin at. Return values are not used. An exception ends the
    run.

    Example:

        @hookimpl
        def rollstock_run_start(run):
            print("writing to", run.directory)
    """


@hookspec(firstresult=True)
def rollstock_generate(run: Run, tasks: Sequence[Task]) -> Batch | None:
    """Stage 1: play every task with the current policy.

    Called once a step, and again with more tasks when `rollstock_select` left too few. `tasks` are distinct; each is to
    be sampled `run.algorithm.samples_per_prompt` times, side by side, with one group id. The first result that is not
    None is the batch; None passes on to the next implementation, and at last to the core's, which asks the rollout role
    and the environment, or, where the algorithm is offline, takes the responses that the tasks hold. Ahead of training
    (`pipeline.mode`) it waits for what was generated since the tasks were chosen, and must not be replaced.

    Example:

        @hookimpl(wrapper=True)
        def rollstock_generate(run, tasks):
            batch = yield
            print(len(batch), "trajectories")
            return batch
    """


@hookspec(firstresult=True)
def rollstock_score(run: Run, batch: Batch) -> bool | None:
    """Stage 2: fill the sequence columns `scores` (float) and `scored` (bool; False where every reward abstained).

    Called once for each generated batch. Return True when the batch is scored; None passes on, at last to the core's
    implementation, which asks the reward role. Where the algorithm is offline, it leaves the scores that responses have
    by their ranks. A wrapper may change `scores` afterwards.

    Example:

        @hookimpl(wrapper=True)
        def rollstock_score(run, batch):
            done = yield
            batch["scores"] = batch.scores.clamp(-1, 1)
            return done
    """


@hookspec(firstresult=True)
def rollstock_select(run: Run, batch: Batch) -> Batch | None:
    """Stage 3: keep what is worth training on.

    Called once for each scored batch. Return a batch with some of the trajectories (whole groups, as a rule); None
    passes on, at last to the core's implementation, which drops what nobody scored and asks `Algorithm.select`. What is
    dropped is counted as a metric.

    Example:

        @hookimpl
        def rollstock_select(run, batch):
            return batch.select([i for i, n in enumerate(batch.lengths.tolist()) if n > 1])
    """


@hookspec(firstresult=True)
def rollstock_prepare(run: Run, batch: Batch) -> bool | None:
    """Stage 4: add the columns that the algorithm declared: `old_logprobs`, `ref_logprobs`, `values`, ...

    Called once a step, before any update. Return True when all of them are there; None passes on, at last to the core's
    implementation, which asks the roles. An extension that adds a column of its own says so in `Extension.provides` and
    wraps this stage.

    Example:

        @hookimpl(wrapper=True)
        def rollstock_prepare(run, batch):
            done = yield
            batch["length_bonus"] = 1.0 / batch.lengths.clamp(min=1)
            return done
    """


@hookspec(firstresult=True)
def rollstock_advantages(run: Run, batch: Batch) -> bool | None:
    """Stage 5: fill the token column `advantages` `[B, T]`, 0 on masked tokens.

    Called once a step. Return True when it is there; None passes on, at last to the core's implementation, which asks
    `Algorithm.advantages` and refuses values that are not finite.

    Example:

        @hookimpl(wrapper=True)
        def rollstock_advantages(run, batch):
            done = yield
            batch["advantages"] = batch.advantages.clamp(-5, 5)
            return done
    """


@hookspec(firstresult=True)
def rollstock_update(run: Run, batch: Batch) -> Metrics | None:
    """Stage 6: train the actor, and the critic where there is one.

    Called once a step. Return the metrics of the updates; None passes on, at last to the core's implementation:
    `train.epochs` times over `train.mini_batches` optimizer updates, each cut into micro-batches by the scheduler.

    Example:

        @hookimpl(wrapper=True)
        def rollstock_update(run, batch):
            metrics = yield
            metrics["actor/num_trained"] = Metric(len(batch))
            return metrics
    """


@hookspec(firstresult=True)
def rollstock_sync(run: Run) -> bool | None:
    """Stage 7: bring the new weights to the generators.

    Called once a step, after the update, and once at the start. Return True when they have landed; None passes on, at
    last to the core's implementation, which compares the fingerprints of both sides.

    Example:

        @hookimpl(wrapper=True)
        def rollstock_sync(run):
            done = yield
            print("generators have version", run.version)
            return done
    """


@hookspec
def rollstock_metrics(run: Run, step: int, metrics: Metrics) -> None:
    """The metrics of a step are complete, and about to be recorded.

    Called once a step, after sync. `metrics` may be added to in place. Return values are not used.

    Example:

        @hookimpl
        def rollstock_metrics(run, step, metrics):
            metrics["mine/step_parity"] = Metric(step % 2)
    """


@hookspec
def rollstock_evaluation_end(run: Run, step: int, metrics: Mapping[str, float]) -> None:
    """An evaluation on held-out tasks is done.

    Called after the evaluation that follows `step` steps (0: before the first). Return values are not used.

    Example:

        @hookimpl
        def rollstock_evaluation_end(run, step, metrics):
            print(step, metrics["eval/greedy/reward_mean"])
    """


@hookspec
def rollstock_step_end(run: Run, step: int, metrics: Mapping[str, float]) -> None:
    """A step is finished: trained, recorded, and evaluated if it was time for that.

    Called once a step; `step` counts from 1. What a plugin's `state()` gives after it is what a checkpoint of this step
    keeps. Return values are not used.

    Example:

        @hookimpl
        def rollstock_step_end(run, step, metrics):
            if metrics["reward/mean"] > 0.99:
                run.stop("the task is solved")
    """


@hookspec
def rollstock_checkpoint_saved(run: Run, step: int, path: Path) -> None:
    """A checkpoint is complete on disk.

    Called after `path` has its final name. What a plugin changes of itself here is not in that checkpoint. Return
    values are not used; an exception ends the run, which can be resumed.

    Example:

        @hookimpl
        def rollstock_checkpoint_saved(run, step, path):
            upload(path)
    """


@hookspec
def rollstock_worker_failed(run: Run, role: str, rank: int, error: BaseException) -> None:
    """A worker died, or hung until it was ended.

    Called once for each, when the executor notices: in whatever thread waited for the worker, before it is replaced or
    the run gives up. Return values are not used; an exception is that of the call that found the worker lost.

    Example:

        @hookimpl
        def rollstock_worker_failed(run, role, rank, error):
            alert(f"{role} {rank}: {error}")
    """


@hookspec
def rollstock_worker_started(run: Run, role: str, rank: int) -> None:
    """A worker was built while the run was under way: in place of a lost one, or as one more.

    Called before the worker gets anything to do, in whatever thread started it. Implementations bring it up to date:
    the core gives the current weights to those that generate, and a plugin whose workers hold something gives them that
    by `run.roles[role].member(rank)`. Return values are not used.

    Example:

        @hookimpl
        def rollstock_worker_started(run, role, rank):
            if role == "judge":
                run.roles[role].member(rank).call("load_rules", rules)
    """


@hookspec
def rollstock_run_end(run: Run, status: str) -> None:
    """A run ends.

    Called once for each start, whatever the reason; `status` is `finished`, `interrupted` (by a signal; a checkpoint of
    the last finished step was written, unless a second one did not wait for it) or `failed`. Return values are not
    used.

    Example:

        @hookimpl
        def rollstock_run_end(run, status):
            print("the run", status)
    """
