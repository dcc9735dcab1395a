"""Which task comes next."""

import pytest

from rollstock import Environment, NoOptions, Task, UserError
from rollstock.tasks import TaskSource


class Numbered(Environment[NoOptions]):
    """Tasks that are named by their place; sizes of the splits are given."""

    def __init__(self, train, heldout):
        super().__init__()
        self.plugin_name = "numbered"
        self.sizes = {"train": train, "heldout": heldout}

    def num_tasks(self, split):
        return self.sizes[split]

    def task(self, split, index):
        size = self.sizes[split]
        if size is not None and not 0 <= index < size:
            raise IndexError(index)
        return Task(id=f"{split} {index}", prompt="")


def ids(source, positions):
    return [source.train(position).id for position in positions]


def test_a_finite_split_is_gone_through_once_an_epoch_each_time_in_another_order():
    source = TaskSource(Numbered(20, None), 3)
    first, second = ids(source, range(20)), ids(source, range(20, 40))
    assert sorted(first) == sorted(second) == sorted(f"train {i}" for i in range(20))
    assert first != second
    assert first != sorted(first)


def test_the_order_depends_on_the_seed_and_the_position_alone():
    assert ids(TaskSource(Numbered(20, None), 3), [17, 2]) == ids(TaskSource(Numbered(20, None), 3), [17, 2])
    assert ids(TaskSource(Numbered(20, None), 3), range(20)) != ids(TaskSource(Numbered(20, None), 4), range(20))


def test_an_endless_split_is_read_in_order():
    source = TaskSource(Numbered(None, None), 3)
    assert ids(source, [0, 1, 10**6]) == ["train 0", "train 1", "train 1000000"]
    assert source.epoch(10**6) == 0


def test_epochs_are_counted():
    assert TaskSource(Numbered(8, None), 0).epoch(12) == 1.5


@pytest.mark.parametrize(("size", "expected"), [(None, 5), (3, 3), (9, 5)])
def test_held_out_tasks_are_the_first_ones_always(size, expected):
    tasks = TaskSource(Numbered(8, size), 3).heldout(5)
    assert [task.id for task in tasks] == [f"heldout {i}" for i in range(expected)]


@pytest.mark.parametrize(
    ("sizes", "heldout", "message"),
    [
        ((0, 5), True, "environment 'numbered' has no train tasks; check its options"),
        (
            (5, 0),
            True,
            "environment 'numbered' has no heldout tasks; give it held-out data, or set evaluation.every: 0",
        ),
    ],
)
def test_an_empty_split_is_refused_by_name(sizes, heldout, message):
    with pytest.raises(UserError, match=message):
        TaskSource(Numbered(*sizes), 0).check(heldout=heldout)


def test_an_empty_split_that_nobody_needs_is_fine():
    TaskSource(Numbered(5, 0), 0).check(heldout=False)
    with pytest.raises(UserError, match="no heldout tasks"):
        TaskSource(Numbered(5, 0), 0).heldout(3)


def test_what_the_environment_raises_is_told_apart_by_split_and_index():
    class Broken(Numbered):
        def task(self, split, index):
            raise KeyError("column")

    with pytest.raises(KeyError) as caught:
        TaskSource(Broken(None, 2), 0).train(7)
    assert caught.value.__notes__ == ["environment 'numbered' raised this in task('train', 7)"]
    with pytest.raises(KeyError) as caught:
        TaskSource(Broken(None, 2), 0).heldout(1)
    assert caught.value.__notes__ == ["environment 'numbered' raised this in task('heldout', 0)"]
