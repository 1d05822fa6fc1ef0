import resource

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dohyo import IWAE, SUMO, estimate, pad, rows
from dohyo.packing import in_order, reduce_packed


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_rows_and_pad_are_inverse(counts: list[int]) -> None:
    count = torch.tensor(counts)
    packed = torch.arange(int(count.sum())).double()
    padded = pad(packed, count)
    assert padded.shape == (len(counts), max(counts))
    assert torch.equal(padded[padded > -torch.inf], packed)
    assert torch.equal((padded > -torch.inf).sum(1), count)
    assert torch.equal(rows(count), torch.arange(len(counts)).repeat_interleave(count))


@given(st.integers(0, 5), st.integers(1, 6), st.integers(1, 6), st.integers(0, 40))
def test_rows_in_order_are_a_slice_of_the_data(first: int, data: int, n: int, moved: int) -> None:
    wanted = torch.arange(first, first + data).repeat_interleave(n)
    assert in_order(wanted) == slice(first, first + data)
    other = wanted.clone()
    other[moved % len(other)] += 1
    found = in_order(other)  # by chance it may still be in order: (0, 0) becomes (0, 1)
    every = other.unique()
    by_chance = len(every) == every[-1] - every[0] + 1 and torch.equal(every.repeat_interleave(len(other) // len(every)), other)
    assert (found is not None) == by_chance
    assert in_order(wanted.flip(0)) is None or data == 1
    assert in_order(wanted[:0]) is None
    assert in_order(wanted.to("meta")) is None


@settings(deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=30))
def test_reduce_packed_equals_the_full_rectangle(counts: list[int]) -> None:
    count = torch.tensor(counts)
    packed = torch.randn(int(count.sum()), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    widths = []

    def reduce(log_w: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        widths.append((log_w.shape[1], own))
        return log_w.logsumexp(-1)

    torch.testing.assert_close(reduce_packed(reduce, packed, count), pad(packed, count).logsumexp(-1))
    for width, own in widths:
        assert width == int(own.max())
        assert width < 2 * int(own.min()) or width * len(own) <= 2**12


def test_gradients_reach_the_right_rows() -> None:
    count = torch.tensor([3, 1, 9, 2])
    packed = torch.randn(15, requires_grad=True)
    reduce_packed(lambda log_w, own: log_w.logsumexp(-1), packed, count)[2].backward()
    assert packed.grad is not None
    assert torch.equal(packed.grad != 0, rows(count) == 2)


def test_one_huge_count_among_many_data_allocates_no_rectangle() -> None:
    """100,000 data, one of them with 100,000 terms: the rectangle would hold 10^10 cells, 80 GB."""
    count = torch.full((100_000,), 11)
    count[777] = 100_000
    packed = torch.randn(int(count.sum()))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    estimates = reduce_packed(SUMO(10).reduce, packed, count)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
    assert estimates.shape == (100_000,)
    assert grown < 2000  # MiB


def test_chunks_are_bounded_and_change_nothing() -> None:
    bank = torch.randn(10_000)
    asked: list[int] = []
    position = 0

    def source(wanted: torch.Tensor) -> torch.Tensor:
        nonlocal position
        asked.append(len(wanted))
        position += len(wanted)
        return bank[position - len(wanted) : position]

    whole = estimate(source, 50, SUMO(3), torch.Generator().manual_seed(0))
    total, position = sum(asked), 0
    asked.clear()
    chunked = estimate(source, 50, SUMO(3), torch.Generator().manual_seed(0), max_rows=7)
    assert max(asked) <= 7
    assert sum(asked) == total
    assert torch.equal(whole, chunked)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"need \(3,\)"):
        pad(torch.zeros(4), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="empty"):
        estimate(lambda wanted: torch.zeros(len(wanted)), 0, IWAE(3))
    with pytest.raises(ValueError, match="one float for each row"):
        estimate(lambda wanted: torch.zeros(len(wanted), 1), 2, IWAE(3))
    with pytest.raises(ValueError, match="NaN"):
        estimate(lambda wanted: torch.full((len(wanted),), torch.nan), 2, IWAE(3))
    with pytest.raises(ValueError, match="max_rows"):
        estimate(lambda wanted: torch.zeros(len(wanted)), 2, IWAE(3), max_rows=0)
