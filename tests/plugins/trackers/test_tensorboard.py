"""Event files, read back with TensorBoard's own reader."""

import sys
import time

import pytest

from rollstock import PluginError
from rollstock.launch import train
from rollstock.plugins.trackers.tensorboard import TensorBoard, TensorBoardConfig

pytest.importorskip("tensorboard")


def started(info, **options):
    tracker = TensorBoard(TensorBoardConfig(**options))
    tracker.start(info, {})
    return tracker


def read(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    return events


def text(events, tag):
    return "".join(value.decode() for event in events.Tensors(tag) for value in event.tensor_proto.string_val)


def test_scalars_config_and_samples(info, rows, tmp_path):
    tracker = started(info(tracker={"api_key": "sesame"}, algorithm={"name": "grpo"}), samples_every=2)
    tracker.samples(2, rows(2))
    tracker.log(2, {"actor/loss": 0.5})
    tracker.evaluation(2, {"eval/greedy/solved": 0.25})
    assert tracker.state() == {}
    tracker.finish("finished")
    events = read(tmp_path / "tensorboard")
    assert [(e.step, e.value) for e in events.Scalars("actor/loss")] == [(2, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("eval/greedy/solved")] == [(2, 0.25)]
    assert "algorithm.name" in text(events, "config/text_summary")
    assert "sesame" not in text(events, "config/text_summary")
    assert "What is 0 + 1?" in text(events, "samples/text_summary")


def test_a_resume_purges_what_came_after_the_checkpoint(info, tmp_path):
    tracker = started(info())
    for step in (1, 2, 3, 4):
        tracker.log(step, {"loss": float(step)})
    tracker.finish("interrupted")
    time.sleep(1.1)  # readers order event files by the second in their names
    tracker = started(info(resumed_at=2))
    for step in (3, 4, 5):
        tracker.log(step, {"loss": 10.0 * step})
    tracker.finish("finished")
    assert [(e.step, e.value) for e in read(tmp_path / "tensorboard").Scalars("loss")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
        (4, 40.0),
        (5, 50.0),
    ]


def test_what_a_model_wrote_stays_in_its_cell(info, tmp_path):
    tracker = started(info(), samples_every=1)
    tracker.samples(1, [{"response": "</pre><script>|a|\nb"}])
    tracker.finish("finished")
    found = text(read(tmp_path / "tensorboard"), "samples/text_summary")
    assert "<script>" not in found
    assert "&lt;script&gt;&#124;a&#124;<br>b" in found


def test_a_missing_package_names_the_extra(info, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(PluginError, match=r"rollstock\[tensorboard\]"):
        started(info())


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboard"), ("wandb", "wandb")])
def test_a_run_without_the_package_fails_before_it_begins(small_run, tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    for loaded in [loaded for loaded in sys.modules if loaded.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, loaded)
    for dry_run in (True, False):
        with pytest.raises(PluginError, match=rf"plugin {name} cannot be used: .*rollstock\[{name}\]"):
            train(small_run(tmp_path / "run", trackers=[name]), dry_run=dry_run)
    assert not (tmp_path / "run").exists()
