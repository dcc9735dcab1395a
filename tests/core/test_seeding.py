"""Every random stream is a function of what it is for."""

from collections import Counter

from rollstock import derive_seed
from rollstock.seeding import permuted_index


def test_seeds_differ_by_every_label_and_by_its_type():
    seeds = {
        derive_seed(0), derive_seed(1), derive_seed(0, "a"), derive_seed(0, "a", 1), derive_seed(0, "a", "1"),
        derive_seed(0, "a1"), derive_seed(0, 1, "a"), derive_seed(0, "", "a"),
    }  # fmt: skip
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_is_the_same_in_every_process_and_version():
    assert derive_seed(7, "sample", 3, 1) == 6407890430556044935


def test_each_epoch_visits_every_row_once_in_an_order_of_its_own():
    size = 60
    epochs = [[permuted_index(5, e * size + i, size) for i in range(size)] for e in range(3)]
    assert all(Counter(epoch) == Counter(range(size)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_position_needs_no_history(cases):
    case = cases["resume_at_epoch_end"]
    size, total = case["steps_per_epoch"], case["steps_per_epoch"] * case["epochs"]
    straight = [permuted_index(9, i, size) for i in range(total)]
    permuted_index(3, 1, 7)  # another stream in between
    resumed = [permuted_index(9, i, size) for i in range(case["checkpoint_at"], total)]
    assert len(resumed) == case["right_remaining"] != case["wrong_remaining"]
    assert resumed == straight[case["checkpoint_at"] :]
