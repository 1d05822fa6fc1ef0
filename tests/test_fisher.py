"""Scores and Fisher information: enumerated where z and K have few values, then against the linear-Gaussian model."""

import importlib.util
import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor, nn

import dohyo
from dohyo import ELBO, IWAE, SUMO, Estimator, Finite, MultilevelRR, SymmetricSUMO
from real import picture

from problems import LinearGaussian
from stats import errors_off

LANGEVIN = Path(__file__).parents[1] / "examples" / "langevin.py"
TERMS, ONES = 4, 0.3  # of Coin: the most log-weights asked for, and q's chance of z = 1
LAW = Finite((0.3, 0.4, 0.3), start=1)
CAPPED = (SUMO(1, LAW), SymmetricSUMO(1, LAW), MultilevelRR(1, max_level=2))


def limit(samples: int, columns: int = 1) -> float:
    """The distance in standard errors that is passed with probability 1e-6."""
    return float(scipy.stats.t.isf(1e-6 / (2 * columns), samples - 1))


class Coin(nn.Module):
    """z is 0 or 1, x | z ~ N(mean_z, 1); the z's of each call come from a script, so that all of them can be gone through."""

    def __init__(self, script: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.tensor(0.4, dtype=torch.float64))
        self.mean = nn.Parameter(torch.tensor([-0.5, 1.0], dtype=torch.float64))
        self.script, self.asked = iter(script), list[int]()

    def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
        self.asked.append(len(rows))
        return self.log_w(x[rows], next(self.script)[: len(rows)])

    def log_w(self, x: Tensor, z: Tensor) -> Tensor:
        log_prior = nn.functional.logsigmoid(torch.where(z == 1, self.logit, -self.logit))
        log_q = chance_of(z).log()
        return log_prior - (x - self.mean[z]).square() / 2 - math.log(2 * math.pi) / 2 - log_q

    def exact(self, x: float, terms: int) -> dict[str, Tensor]:
        """The gradient of E[IWAE_terms]."""
        z, chance = outcomes(terms)
        mean = chance @ (self.log_w(torch.tensor(x, dtype=torch.float64), z).logsumexp(-1) - math.log(terms))
        return dict(zip(("logit", "mean"), torch.autograd.grad(mean, [self.logit, self.mean]), strict=True))


def chance_of(z: Tensor) -> Tensor:
    return z.double() * ONES + (1 - z.double()) * (1 - ONES)


def outcomes(n: int) -> tuple[Tensor, Tensor]:
    """All sequences of n z's, and their probabilities."""
    z = torch.tensor(list(itertools.product((0, 1), repeat=n)))
    return z, chance_of(z).prod(-1)


def vector(scores: dict[str, Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in scores.values()])


def mean_score(estimator: Estimator, x: float) -> dict[str, Tensor]:
    """E[score], exact: enough draws to meet every pair of z's and K, each of which has one score, weighted by their chances."""
    z, chance = outcomes(TERMS)
    repeats = 30
    model = Coin(z.repeat(repeats, 1))
    data = torch.full((len(z) * repeats,), x, dtype=torch.float64)
    scores = dohyo.score(model, data, estimator, torch.Generator().manual_seed(0), per_datum=True)
    cells = {(i % len(z), count): i for i, count in enumerate(model.asked)}
    depth = torch.arange(int(estimator.depth_law.cap) + 1)
    depth_chance = estimator.depth_law.survival(depth) - estimator.depth_law.survival(depth + 1)
    of_count = {int(count): float(p) for count, p in zip(estimator.terms(depth), depth_chance, strict=True) if p > 0}
    assert len(cells) == len(z) * len(of_count)
    weight = torch.zeros(len(data), dtype=torch.float64)
    for (outcome, count), i in cells.items():
        weight[i] = chance[outcome] * of_count[count]
    return {name: torch.tensordot(weight, part, 1) for name, part in scores.items()}


@pytest.mark.parametrize("estimator", CAPPED, ids=lambda e: e.name)
def test_the_mean_score_is_that_of_the_target(estimator: Estimator) -> None:
    found = mean_score(estimator, 0.7)
    exact = Coin().exact(0.7, TERMS)
    assert estimator.target_terms == TERMS
    for name, gradient in exact.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-12)
    fewer = Coin().exact(0.7, TERMS - 1)  # the power twin
    assert all(float((found[name] - gradient).abs().max()) > 1e-3 for name, gradient in fewer.items())


def test_the_sum_over_a_packed_batch() -> None:
    x, estimator = torch.tensor([0.7, -0.2, 2.0], dtype=torch.float64), SUMO(2)
    counts = estimator.plan(3, torch.Generator().manual_seed(0))
    z = torch.randint(2, (int(counts.sum()),), generator=torch.Generator())
    model = Coin([z])
    found = dohyo.score(model, x, estimator, torch.Generator().manual_seed(0))
    each = zip(x, z.split(counts.tolist()), counts, strict=True)
    total = sum(estimator.reduce(model.log_w(one, own)[None], count[None]) for one, own, count in each)
    assert len(counts.unique()) > 1
    for part, expected in zip(found.values(), torch.autograd.grad(total, list(model.parameters())), strict=True):
        torch.testing.assert_close(part, expected)


def scripts(calls: int, n: int) -> Iterator[tuple[list[Tensor], float]]:
    """The z's of a number of calls that want n each, in every way, and the chance of each way."""
    z, chance = outcomes(n)
    for index in itertools.product(range(len(z)), repeat=calls):
        yield [z[i] for i in index], float(chance[list(index)].prod())


@pytest.mark.parametrize(("terms", "replicates"), [(2, 2), (1, 3)])
def test_the_fisher_information_and_its_error_are_unbiased(terms: int, replicates: int) -> None:
    x = torch.full((2,), 0.7, dtype=torch.float64)  # twice the same: then the spread is the estimator's alone
    mean = squares = error = torch.zeros(3, 3, dtype=torch.float64)
    for script, chance in scripts(2 * replicates, terms):
        found = dohyo.fisher_information(Coin(script), x, IWAE(terms), replicates=replicates)
        mean = mean + chance * found.matrix
        squares = squares + chance * found.matrix.square()
        error = error + chance * found.stderr.square()
    g = vector(Coin().exact(0.7, terms))
    torch.testing.assert_close(mean, g.outer(g), rtol=0, atol=1e-12)
    torch.testing.assert_close(error, squares - mean.square(), rtol=0, atol=1e-12)
    assert found.slices == {"logit": slice(0, 1), "mean": slice(1, 3)}
    square = torch.zeros(3, 3, dtype=torch.float64)
    for script, chance in scripts(1, terms):
        one = vector(dohyo.score(Coin(script), x[:1], IWAE(terms)))
        square += chance * one.outer(one)
    assert bool(((square - mean).diagonal() > 1e-3).all())  # the power twin: one score squared is too large


def test_the_diagonal_is_that_of_the_matrix() -> None:
    x, script = torch.tensor([0.7, -0.2], dtype=torch.float64), [torch.tensor([0, 1]), torch.tensor([1, 1])] * 2
    whole = dohyo.fisher_information(Coin(script), x, IWAE(2))
    diagonal = dohyo.fisher_information(Coin(script), x, IWAE(2), diagonal=True)
    torch.testing.assert_close(diagonal.matrix, whole.matrix.diagonal())
    torch.testing.assert_close(diagonal.stderr, whole.stderr.diagonal())


def stale(dimension: int) -> LinearGaussian:
    """The toy with a theta that has moved on from its proposal, as in training and in Langevin dynamics."""
    problem = LinearGaussian(dimension)
    problem.theta = (problem.theta + 0.5).requires_grad_()
    return problem


def test_the_score_of_the_linear_gaussian_model() -> None:
    problem, batches = stale(3), 60
    torch.manual_seed(0)
    x = problem.sample(500).detach()
    exact = problem.exact_score(x).detach().sum(0)

    def scores(estimator: Estimator) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        theta = {"theta": problem.theta}
        return torch.stack([dohyo.score(problem, x, estimator, generator, parameters=theta)["theta"] for _ in range(batches)])

    assert errors_off(scores(MultilevelRR(4)), exact) < limit(batches, 3)
    assert errors_off(scores(IWAE(12)), exact) > limit(batches, 3)  # the power twin, at the same cost


def test_the_fisher_information_of_the_linear_gaussian_model() -> None:
    problem, estimator, generator = stale(2), MultilevelRR(1), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    x, theta = problem.sample(500).detach(), {"theta": problem.theta}
    found = dohyo.fisher_information(problem, x, estimator, generator, parameters=theta)
    off = (found.matrix - torch.eye(2) / 2) / found.stderr  # x ~ N(theta, 2 I)
    assert float(off.abs().max()) < limit(len(x), 3)
    assert found.kind == "unbiased"
    assert found.warnings == ()
    one = dohyo.score(problem, x, estimator, generator, per_datum=True, parameters=theta)["theta"]
    assert errors_off(one.square(), 0.5) > limit(len(x), 2)  # the power twin


class PriorProposal(nn.Module):
    """z ~ N(theta, 1), x | z ~ N(z, 1), and the prior itself as the proposal, so that theta moves q."""

    def __init__(self, reparameterised: bool) -> None:
        super().__init__()
        self.theta, self.reparameterised = nn.Parameter(torch.tensor(0.5, dtype=torch.float64)), reparameterised

    def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
        z = self.theta + torch.randn_like(x[rows])
        z = z if self.reparameterised else z.detach()
        return torch.distributions.Normal(z, 1.0, validate_args=False).log_prob(x[rows]) + 0 * self.theta


def test_a_proposal_that_shares_theta_must_be_reparameterised() -> None:
    torch.manual_seed(0)
    x, generator, batches = torch.linspace(-1, 2, 200, dtype=torch.float64), torch.Generator().manual_seed(0), 100
    right, wrong = PriorProposal(True), PriorProposal(False)
    exact = float((x - 0.5).sum() / 2)
    found = torch.stack([dohyo.score(right, x, MultilevelRR(4), generator)["theta"] for _ in range(batches)])
    assert errors_off(found, exact) < limit(batches)
    assert float(dohyo.score(wrong, x, MultilevelRR(4), generator)["theta"]) == 0  # silently wrong, as the docstring says


def test_theta_of_a_model() -> None:
    model, x = dohyo.models.VAE(data=5, hidden=4, latent=2), torch.rand(6, 5).round()
    model.decoder[0].weight.requires_grad_(False)
    with torch.no_grad():
        found = dohyo.score(model, x, SUMO(2), shared=True)
    assert found.keys() == {f"decoder.{name}" for name in ("0.bias", "2.weight", "2.bias", "4.weight", "4.bias")}
    assert all(part.dtype == torch.float32 and bool(part.any()) for part in found.values())
    assert all(parameter.grad is None for parameter in model.parameters())
    model.spare = nn.Parameter(torch.ones(3))
    assert dohyo.score(model, x, IWAE(2))["spare"].tolist() == [0, 0, 0]
    information = dohyo.fisher_information(model, x, SUMO(2), parameters={"bias": model.decoder[4].bias})
    assert information.matrix.shape == (5, 5)
    assert "infinite" in information.warnings[0]


def test_errors_name_the_fix() -> None:
    problem, x = LinearGaussian(2), torch.zeros(3, 2, dtype=torch.float64)
    coin, vae = Coin(), dohyo.models.VAE(data=2, hidden=3, latent=2)
    frozen = dohyo.models.VAE(data=2, hidden=3, latent=2).requires_grad_(False)
    impossible = Coin([torch.zeros(3, dtype=torch.long)])
    with torch.no_grad():
        impossible.logit.fill_(math.inf)
    unused = {"other": torch.zeros(2, requires_grad=True)}
    cases: list[tuple[Any, Tensor, dict[str, Any], str]] = [
        (problem, x, {}, r"not an nn.Module; .* parameters="),
        (problem, x, {"parameters": {"theta": problem.theta}}, r"\['theta'\].*requires_grad"),
        (problem, x, {"parameters": unused}, "without detach"),
        (frozen, x.float(), {}, "no parameters to differentiate"),
        (vae, x.float(), {"per_datum": True, "shared": True}, "leave shared=False"),
        (vae, x.float()[:0], {}, "empty"),
        (vae, x.float()[:0], {"per_datum": True}, "empty"),
        (impossible, x[:, 0], {}, "3 of 3 estimates are -inf"),
    ]
    for model, data, options, message in cases:
        with pytest.raises(ValueError, match=message):
            dohyo.score(model, data, IWAE(1), **options)
    for data, replicates in ((x[:, 0], 1), (x[:1, 0], 2)):
        with pytest.raises(ValueError, match="at least 2: the square"):
            dohyo.fisher_information(coin, data, ELBO(), replicates=replicates)


@pytest.mark.skipif(not LANGEVIN.exists(), reason="examples/ is not part of this distribution")
@pytest.mark.slow  # the score has faster tests above
def test_langevin_dynamics_find_the_posterior(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("langevin", LANGEVIN)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(tmp_path, chains=60, steps=200)
    numbers = picture(tmp_path / "langevin.png")
    found, threshold = numbers["found"], limit(60)
    (mean, precision), (elbo_mean, _) = numbers["posteriors"]["exact"], numbers["posteriors"]["elbo"]
    chains = {name: {key: torch.tensor(value) for key, value in row["chains"].items()} for name, row in found.items()}

    def variance_off(name: str) -> float:
        return errors_off(chains[name]["variance"] - chains[name]["expected_variance"], 0.0)

    assert errors_off(chains["multilevel-rr"]["mean"], mean) < threshold
    assert variance_off("multilevel-rr") < threshold
    assert found["multilevel-rr"]["expected_sd"] < 1.1 * precision**-0.5  # the step is small enough for a picture of the truth
    assert errors_off(chains["elbo"]["mean"], elbo_mean) < threshold  # wrong in just the way that theory says
    assert variance_off("elbo") < threshold
    assert errors_off(chains["elbo"]["mean"], mean) > threshold  # the power twins
    assert (precision**-0.5 - found["elbo"]["sd"]) / found["elbo"]["sd_stderr"] > threshold
