import itertools
import math
import time

import pytest
import torch

from dohyo import bounds
from dohyo.bounds import leave_one_out_differences, leave_out_mean, prefix_log_mean, tree_means


def naive_difference(log_w: torch.Tensor) -> torch.Tensor:
    """Log-mean of the whole minus the average leave-one-out log-mean, by definition."""
    k = len(log_w)
    left = [torch.cat([log_w[:i], log_w[i + 1 :]]).logsumexp(0) - math.log(k - 1) for i in range(k)]
    return log_w.logsumexp(0) - math.log(k) - torch.stack(left).mean()


@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 3000.0])
def test_leave_one_out_against_the_definition(spread: float) -> None:
    """Also where one weight dwarfs the others by more than float64's range."""
    log_w = spread * torch.randn(4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours = leave_one_out_differences(log_w, 2)
    for row, column in itertools.product(range(4), range(11)):
        expected = naive_difference(log_w[row, : column + 2])
        torch.testing.assert_close(ours[row, column], expected, rtol=1e-12, atol=1e-12)


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    log_w = torch.randn(3, 40, dtype=torch.float64)
    whole = leave_one_out_differences(log_w, 5)
    monkeypatch.setattr("dohyo.bounds._CELLS", 3 * 40 * 7)
    torch.testing.assert_close(leave_one_out_differences(log_w, 5), whole, rtol=0, atol=1e-15)


@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 3000.0])
@pytest.mark.parametrize("cells", [10**9, 2000])
def test_power_sums_are_those_of_all_pairs(monkeypatch: pytest.MonkeyPatch, spread: float, cells: int) -> None:
    """Values, first and second derivatives, with ties, and where the first weights are zero; kept, and computed again."""
    log_w = spread * torch.randn(4, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    log_w[0, 7::9] = log_w[0, 6]
    log_w[1, 20:40] = bounds.FLOOR
    log_w[2, :3] = bounds.FLOOR
    monkeypatch.setattr(bounds, "_SUMS", cells)
    found = []
    for most_paired in (60, 0):
        monkeypatch.setattr(bounds, "_MOST_PAIRED", (most_paired,))
        leaf = log_w.clone().requires_grad_()
        value = leave_one_out_differences(leaf, 5)
        (first,) = torch.autograd.grad(value.sin().sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaf)
        found.append((value, first, second))
    for one, other in zip(*found, strict=True):
        assert bool(one.isfinite().all())
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def test_no_data_and_no_prefixes() -> None:
    for data, width, first in ((0, 300, 2), (0, 5, 2), (3, 300, 301), (3, 1, 2)):
        found = leave_one_out_differences(torch.zeros(data, width, dtype=torch.float64), first)
        assert found.shape == (data, max(0, width - first + 1))


def test_leave_one_out_at_two_thousand_terms() -> None:
    log_w = (8 * torch.randn(2, 2000, dtype=torch.float64)).requires_grad_()
    start = time.perf_counter()
    differences = leave_one_out_differences(log_w, 5)
    differences.sum().backward()
    assert time.perf_counter() - start < 60  # usable at all, on any machine; its speed is a benchmark's business
    assert bool(differences.isfinite().all())
    assert log_w.grad is not None
    assert bool(log_w.grad.isfinite().all())
    torch.testing.assert_close(differences[0, -1], naive_difference(log_w[0].detach()), rtol=1e-9, atol=1e-12)


def test_prefix_log_mean_over_a_huge_range() -> None:
    log_w = torch.tensor([[-2000.0, 0.0, 2000.0, -5000.0]], dtype=torch.float64)
    expected = [-2000.0, -math.log(2), 2000 - math.log(3), 2000 - math.log(4)]
    torch.testing.assert_close(prefix_log_mean(log_w)[0], torch.tensor(expected, dtype=torch.float64))


def test_prefixes_by_pairs_are_those_of_the_scan() -> None:
    """As on a GPU: values, first and second derivatives, with zero weights and ties."""
    log_w = torch.cat([30 * torch.randn(5, 20), torch.zeros(2, 20)]).double()
    log_w[:3, ::4] = bounds.FLOOR
    found = []
    for function in (bounds.prefix_log_sum, bounds._prefix_log_sum_by_pairs):
        leaf = log_w.clone().requires_grad_()
        value = function(leaf)
        (first,) = torch.autograd.grad((value.sin()).sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaf)
        found.append((value, first, second))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("k", "left_out"), [(3, 0), (5, 1), (5, 2), (6, 3)])
def test_leave_out_mean_against_all_subsets(k: int, left_out: int) -> None:
    log_w = 3 * torch.randn(2, k, dtype=torch.float64)
    blocks = [log_w[:, list(kept)].logsumexp(-1) for kept in itertools.combinations(range(k), k - left_out)]
    torch.testing.assert_close(leave_out_mean(log_w, left_out), torch.stack(blocks).mean(0) - math.log(k - left_out))


def test_tree_means() -> None:
    log_w = torch.randn(2, 12, dtype=torch.float64)
    table = tree_means(log_w, 3, 2)
    for depth in range(3):
        own = log_w[:, : 3 << depth]
        for level in range(depth + 1):
            size = 3 << level
            expected = (own.reshape(2, -1, size).logsumexp(-1) - math.log(size)).mean(-1)
            torch.testing.assert_close(table[:, level, depth], expected)


def test_cells_made_again_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """First and second derivatives, with the table kept and with it made again in the backward pass, in several slices."""
    log_w = torch.randn(2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def derivatives() -> list[torch.Tensor]:
        found = leave_one_out_differences(log_w, 2)
        (first,) = torch.autograd.grad(found.square().sum(), log_w, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), log_w)
        return [found, first, second]

    kept = derivatives()
    monkeypatch.setattr(bounds, "_KEPT_CELLS", 0)
    monkeypatch.setattr(bounds, "_CELLS", 40)
    for one, other in zip(kept, derivatives(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)
