"""Random numbers as a function of seed and position."""

import math

import torch

from rollstock.uniforms import as_int64, uniforms

MASK = 2**64 - 1


def splitmix(state: int) -> int:
    """The finaliser of SplitMix64, in Python's integers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return state ^ (state >> 31)


def test_numbers_are_those_of_splitmix64_in_exact_integers() -> None:
    golden = 0x9E3779B97F4A7C15
    for seed in (0, 1, 2**63 - 1, 2**64 - 1, 12345678901234567890):
        for position in (0, 1, 4095):
            inner = splitmix((seed * golden + 1) & MASK)
            expected = (splitmix((inner + position * golden) & MASK) >> 11) * 2.0**-53
            got = uniforms(torch.tensor([as_int64(seed)]), torch.tensor([position]))
            assert float(got) == expected


def test_a_number_depends_on_its_seed_and_position_alone() -> None:
    seeds, positions = torch.arange(50), torch.arange(30)
    table = uniforms(seeds[:, None], positions)
    assert table.shape == (50, 30)
    assert float(table[17, 4]) == float(uniforms(seeds[17:18], positions[4:5]))
    assert len(set(table.flatten().tolist())) == table.numel()


def test_numbers_are_uniform_and_uncorrelated_along_seeds_and_positions() -> None:
    table = uniforms(torch.arange(500)[:, None], torch.arange(400))
    assert 0 <= float(table.min()) <= float(table.max()) < 1
    expected = table.numel() / 100
    counts = torch.histc(table.float(), bins=100, min=0, max=1)
    assert float(((counts - expected) ** 2 / expected).sum()) < 99 + 4 * math.sqrt(2 * 99)
    for one, other in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1]), (table[1:, :-1], table[:-1, 1:])):
        correlation = float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])
        assert abs(correlation) < 4 / math.sqrt(one.numel())


def test_seeds_of_any_size_become_64_bit_numbers() -> None:
    assert as_int64(2**63) == -(2**63)
    assert as_int64(2**64 + 5) == 5
    assert as_int64(-1) == -1
