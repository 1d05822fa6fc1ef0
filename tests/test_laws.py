import math

import pytest
import torch

from dohyo import Finite, Geometric, HarmonicTail, Law, PowerLaw

LAWS = [
    HarmonicTail(),
    HarmonicTail(alpha=18),
    HarmonicTail(alpha=1, decay=0.5),
    Geometric(0.3),
    Geometric(0.6, start=0),
    PowerLaw(1.5, 4.0),
    PowerLaw(1.2, 0.7),
    PowerLaw(0.8, 4.0, cap=50),
    Finite((0.5, 0.2, 0.0, 0.3), start=0),
    Finite((0.25, 0.75), start=3),
]


def summed_survival(law: Law) -> float:
    """E[K] = sum of P(K >= k), term by term, with an integral for a power tail."""
    n = 2_000_000 if law.tail_exponent < math.inf else 5000
    total = float(law.survival(torch.arange(1, n + 1)).sum())
    if isinstance(law, PowerLaw) and law.cap == math.inf:  # Euler and Maclaurin beyond n
        s, a = law.scale, law.exponent
        total += s / (a - 1) * (1 + n / s) ** (1 - a) - (1 + n / s) ** -a / 2
    return total


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_mean_is_the_sum_of_the_survival(law: Law) -> None:
    assert law.mean == pytest.approx(summed_survival(law), rel=1e-9)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_draws_follow_the_survival(law: Law) -> None:
    """Chi-square at a fixed seed: the threshold is 6 standard deviations of chi-square; the power twin is off by one."""
    draws = law.sample(100_000, torch.Generator().manual_seed(1))
    assert draws.dtype == torch.int64
    assert int(draws.min()) >= 0
    assert int(draws.max()) <= law.cap

    def excess(values: torch.Tensor) -> float:
        edges = torch.arange(0, 40)
        survival = law.survival(torch.cat([edges, edges[-1:] + 1]))
        probability = torch.cat([survival[:-1] - survival[1:], survival[-1:]])
        seen = torch.bincount(values.clamp(max=len(probability) - 1), minlength=len(probability)).double()
        expected = probability * len(values)
        large = expected > 5
        seen = torch.cat([seen[large], seen[~large].sum()[None]])
        expected = torch.cat([expected[large], expected[~large].sum()[None]])
        keep = expected > 0
        assert float(seen[~keep].sum()) == 0
        statistic = float(((seen - expected).square() / expected)[keep].sum())
        degrees = int(keep.sum()) - 1
        return (statistic - degrees) / math.sqrt(2 * degrees)

    assert excess(draws) < 6
    if law.cap == math.inf:
        assert excess(draws + 1) > 6


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_quantile_inverts_the_survival_far_into_the_tail(law: Law) -> None:
    u = torch.logspace(0, -30, 1000, dtype=torch.float64)
    u = torch.cat([u, law.survival(torch.arange(1, 100))])  # the boundaries themselves
    u = u[u > 0]
    k = law.quantile(u)
    reachable = k < 2**49  # beyond it float64 hardly tells S(k) from S(k + 1)
    assert int(reachable.sum()) > 500
    assert bool((law.survival(k) >= u)[reachable].all())
    assert bool((law.survival(k + 1) < u)[reachable].all())


def test_no_hidden_cap() -> None:
    """A 53-bit uniform would end every tail at 1.1e-16."""
    from dohyo.laws import uniform

    u = uniform(1000, torch.Generator().manual_seed(0))
    assert u.dtype == torch.float64
    assert float(u.min()) > 0
    assert float(u.max()) <= 1
    assert int(Geometric(0.5).quantile(torch.tensor([1e-30], dtype=torch.float64))) == 100


def test_paper_values() -> None:
    assert HarmonicTail().mean == pytest.approx(5.0779792789, abs=1e-9)
    survival = HarmonicTail().survival(torch.tensor([1, 2, 79, 80, 81, 100, 200]))
    expected = [1, 1 / 2, 1 / 79, 1 / 80, 0.9 / 80, 0.9**20 / 80, 0.9**120 / 80]
    assert survival.tolist() == pytest.approx(expected, rel=1e-12)


def test_draws_are_reproducible_and_use_only_their_generator() -> None:
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    first = HarmonicTail().sample(10, torch.Generator().manual_seed(3))
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(first, HarmonicTail().sample(10, torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_capped(law: Law) -> None:
    capped = law.capped(7)
    k = torch.arange(0, 8)
    torch.testing.assert_close(capped.survival(k), law.survival(k), rtol=0, atol=1e-14)
    assert capped.cap <= 7
    assert float(capped.survival(torch.tensor(8))) == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: HarmonicTail(alpha=0),
        lambda: HarmonicTail(decay=1.0),
        lambda: Geometric(0.0),
        lambda: Geometric(0.5, start=-1),
        lambda: PowerLaw(1.0),
        lambda: PowerLaw(1.5, -1.0),
        lambda: PowerLaw(1.5, 1.0, cap=-1),
        lambda: Finite(()),
        lambda: Finite((0.5, 0.4)),
        lambda: Finite((1.5, -0.5)),
        lambda: Finite((math.nan, 1.0)),
    ],
)
def test_bad_arguments(make: object) -> None:
    with pytest.raises(ValueError, match=r"must|infinite|sums"):
        make()  # type: ignore[operator]
