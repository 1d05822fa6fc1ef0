"""Annealed weights against exact answers: by quadrature where it can be, by chains run both ways, then by statistics."""

import copy
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import scipy.special
import torch
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    Categorical,
    Distribution,
    Gamma,
    Independent,
    Laplace,
    LogNormal,
    MultivariateNormal,
    Normal,
    StudentT,
    TanhTransform,
    TransformedDistribution,
)

import dohyo
from dohyo import Annealed, DohyoError
from dohyo.annealing import Constants, chain
from dohyo.annealing.chain import Source
from dohyo.annealing.whitening import noise_size, whiten
from dohyo.models import VAE, GaussianLVM, LatentVariableModel, TwoLayerVAE

from problems import LinearLayers, forget
from stats import errors_off


def random_constants(steps: int, size: int, seed: int = 0) -> Constants:
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)

    bridge = uniform(0, 1, steps).sort().values
    mixing = torch.eye(size, dtype=torch.float64) + uniform(0, 1, size, size).triu(1) if steps % 2 == 0 else None
    constants = Constants(uniform(0.05, 0.3, steps, size), bridge, uniform(0, 1), uniform(1.0, 1.3, size), mixing)
    constants.check()
    return constants


def longest(constants: Constants) -> int:
    """The leapfrog with the longest step, whose momentum ratio the twin forgets."""
    return int(constants.step.mean(1).argmax())


def replayed(monkeypatch: pytest.MonkeyPatch, noise: list[Tensor]) -> None:
    """These in place of what torch.randn_like would draw, in this order."""
    queue: Iterator[Tensor] = iter(noise)
    monkeypatch.setattr(torch, "randn_like", lambda like: next(queue).to(like))


def hermite(nodes: int, dimensions: int) -> tuple[Tensor, Tensor]:
    """Points (nodes^dimensions, dimensions) and weights that sum to one, for integrals over N(0, I)."""
    points, weights = (torch.from_numpy(part) for part in scipy.special.roots_hermitenorm(nodes))
    grid = torch.cartesian_prod(*[points] * dimensions).view(-1, dimensions)
    log_weight = torch.cartesian_prod(*[weights.log() - math.log(2 * math.pi) / 2] * dimensions).view(-1, dimensions).sum(-1)
    return grid, log_weight.exp()


def mean_by_quadrature(monkeypatch: pytest.MonkeyPatch, model: LatentVariableModel, x: Tensor, steps: int, nodes: int) -> Tensor:
    """E[w], with its gradient in theta, over every draw that a chain makes."""
    size = noise_size(model.posterior(model.encode(x)))
    grid, weight = hermite(nodes, size * (steps + 1))
    parts = list(grid.split(size, -1))
    # q(z_1; x) and q(z_2 | z_1) draw one after the other.
    layers = [parts[0][:, :1], parts[0][:, 1:]] if isinstance(model, LinearLayers) and model.layers == 2 else parts[:1]
    replayed(monkeypatch, [*layers, *parts[1:]])
    annealed = Annealed(model, constants=random_constants(steps, size, seed=10 + steps))
    return weight @ annealed.log_weights(x, torch.zeros(len(grid), dtype=torch.long)).exp()


@pytest.mark.parametrize(
    ("layers", "steps", "nodes", "error"), [(1, 1, 50, 1e-9), (1, 2, 40, 1e-7), (1, 3, 26, 1e-6), (2, 1, 28, 1e-4)]
)
def test_the_mean_weight_is_p_by_quadrature(
    layers: int, steps: int, nodes: int, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = LinearLayers(layers, size=1), torch.tensor([[0.4]], dtype=torch.float64)
    mean = mean_by_quadrature(monkeypatch, model, x, steps, nodes)
    exact = model.exact(x).exp()
    assert float(mean.detach()) == pytest.approx(float(exact.detach()), rel=error)
    # And theta's gradient of E[w], with the ends of chains held fixed, is that of p(x).
    found, wanted = (torch.autograd.grad(value.sum(), model.theta)[0] for value in (mean, exact))
    assert float(found) == pytest.approx(float(wanted), rel=100 * error)
    forget(monkeypatch, longest(random_constants(steps, layers, seed=10 + steps)))
    twin = mean_by_quadrature(monkeypatch, model, x, steps, nodes)
    assert float(twin.detach()) != pytest.approx(float(exact.detach()), rel=0.01)


@pytest.mark.parametrize(("steps", "nodes", "error"), [(1, 50, 1e-9), (2, 40, 1e-7)])
def test_the_mean_weight_is_p_for_any_force_that_depends_on_the_place_alone(
    steps: int, nodes: int, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a GPU may round it. One that also depends on the momentum changes volumes, and is found."""
    model, x = LinearLayers(size=1), torch.tensor([[0.4]], dtype=torch.float64)
    force, leapfrog, momentum = chain.Bridge._force, chain.Bridge._leapfrog, [torch.zeros(1)]

    def noting(self: chain.Bridge, t: int, u: Tensor, v: Tensor, *rest: Any) -> Any:
        momentum[0] = v
        return leapfrog(self, t, u, v, *rest)

    monkeypatch.setattr(chain.Bridge, "_leapfrog", noting)
    monkeypatch.setattr(chain.Bridge, "_force", lambda self, t, u: 0.6 * force(self, t, u) + 0.3 * u.sin())
    exact = float(model.exact(x).exp().detach())
    assert float(mean_by_quadrature(monkeypatch, model, x, steps, nodes).detach()) == pytest.approx(exact, rel=error)
    monkeypatch.setattr(chain.Bridge, "_force", lambda self, t, u: force(self, t, u) + 0.6 * momentum[0])
    assert float(mean_by_quadrature(monkeypatch, model, x, steps, nodes).detach()) != pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize(("steps", "nodes"), [(1, 50), (2, 40), (3, 26)])
def test_backwards_the_mean_of_one_over_the_weight_is_one_over_p_by_quadrature(
    steps: int, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = LinearLayers(size=1), torch.tensor([[0.4]], dtype=torch.float64)
    narrow = torch.full((1,), 0.5, dtype=torch.float64)  # q wider than the posterior makes 1 / w heavy
    annealed = Annealed(model, constants=replace(random_constants(steps, 1, seed=10 + steps), widening=narrow))
    grid, weight = hermite(nodes, steps + 1)
    precision = 1 + model.M.square() / 0.49
    z = (model.theta + model.M * x / 0.49) / precision + grid[:, :1] / precision.sqrt()

    def mean() -> float:
        replayed(monkeypatch, list(grid[:, 1:].split(1, -1)))
        log_w = annealed.backwards(x.expand(len(grid), -1), z.detach())
        return float(weight @ (model.exact(x).detach() - log_w).exp())

    assert mean() == pytest.approx(1.0, rel=1e-5)
    forget(monkeypatch, longest(annealed.constants))
    assert mean() != pytest.approx(1.0, rel=0.001)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("steps", [0, 1, 2, 4, 16, 32])
def test_the_mean_weight_is_p(layers: int, steps: int) -> None:
    model = LinearLayers(layers)
    torch.manual_seed(steps)
    x, chains = model.sample(2), 20_000
    annealed = Annealed(model, constants=random_constants(steps, 2 * layers, seed=10 + steps))
    with torch.no_grad():
        log_w = annealed.log_weights(x, dohyo.rows(torch.full((2,), chains))).view(2, chains)
    assert errors_off((log_w - model.exact(x).detach()[:, None]).exp().T, 1.0) < 4
    assert annealed.lost == 0


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 4, 16, 32])
def test_a_forgotten_momentum_ratio_is_found(layers: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, longest(random_constants(steps, 2 * layers, seed=10 + steps)))
    with pytest.raises(AssertionError):
        test_the_mean_weight_is_p(layers, steps)


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("model", [LinearLayers(1), LinearLayers(2), TwoLayerVAE(5, 6, 2).double(), VAE(5, 6, 3).double()])
def test_a_chain_run_back_over_its_path_has_the_same_weight(
    model: LatentVariableModel, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        x = model.sample(6)
        source = Source(model, x, random_constants(steps, Source(model, x, Constants.plain(0)).size))
        bridge, momenta, ratio = source(torch.arange(6)), [], chain.momentum_ratio
        monkeypatch.setattr(chain, "momentum_ratio", lambda *v: (momenta.append(v), ratio(*v))[1])
        there = bridge.forwards()
        keep, path = source.constants.persistence, momenta[::-1]
        turns = [(after - keep * before) / (1 - keep**2).sqrt() for (before, _), (_, after) in itertools.pairwise(path)]
        replayed(monkeypatch, [path[0][1], *turns])
        back = bridge.backwards(there.z)
    assert torch.allclose(there.log_ratio, back.log_ratio, rtol=0, atol=1e-9)
    assert torch.allclose(momenta[steps - 1][0], momenta[-steps][0]) or steps == 1
    assert len(momenta) == 2 * steps
    for (before, after), (before_again, after_again) in zip(momenta[:steps], momenta[steps:][::-1], strict=True):
        assert torch.allclose(before, before_again, atol=1e-9)
        assert torch.allclose(after, after_again, atol=1e-9)


def proposals(rows: int) -> dict[str, Distribution]:
    torch.manual_seed(0)
    mean, scale = torch.randn(rows, 3, dtype=torch.float64), torch.rand(rows, 3, dtype=torch.float64) + 0.5
    base = Independent(Normal(mean, scale), 1)
    mixing = torch.randn(3, 3, dtype=torch.float64)
    bend = [AffineTransform(mean, scale, event_dim=1), TanhTransform()]
    return {
        "normal": base,
        "one number": Normal(mean[:, 0], scale[:, 0]),
        "laplace": Independent(Laplace(mean, scale), 1),
        "no variance": Independent(StudentT(torch.full_like(scale, 1.5), mean, scale), 1),
        "correlated": MultivariateNormal(mean, mixing @ mixing.T + torch.eye(3)),
        "positive": Independent(LogNormal(mean, scale), 1),
        "flow": TransformedDistribution(base, bend),
        "chain": TwoLayerVAE(4, 5, 3).double().posterior(torch.randn(rows, 12, dtype=torch.float64)),
    }


@pytest.mark.parametrize("name", proposals(1))
def test_coordinates_and_their_jacobian(name: str) -> None:
    q = proposals(4)[name]
    size = noise_size(q)
    plain = whiten(q, torch.ones(1, dtype=torch.float64))
    widening = torch.linspace(0.8, 1.5, size, dtype=torch.float64)
    wide, u = whiten(q, widening), plain.sample().detach()
    assert u.shape == (4, size)
    place = plain.at(u)
    # What is not widened is q itself: r(u) = q(z) |dz/du|.
    assert torch.allclose(place.log_base - place.log_jacobian, q.log_prob(place.z))
    for whitening in (plain, wide):
        place = whitening.at(u)
        assert torch.allclose(whitening.noise(place.z), u)
        jacobian = torch.autograd.functional.jacobian(lambda u, w=whitening: w.at(u).z.reshape(4, size).sum(0), u)
        exact = torch.stack([jacobian[:, row].det().abs().log() for row in range(4)])
        assert torch.allclose(place.log_jacobian, exact)


class Tilted:
    """p(x, z) = q(z) (1 + 0.9 tanh u_1), u_1 the first number of the noise that z is made of, symmetric: so p(x) = 1."""

    def __init__(self, q: Callable[[int], Distribution]) -> None:
        self.q = q

    def posterior(self, code: Tensor) -> Distribution:
        return self.q(len(code))

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        q = self.posterior(x)
        noise = whiten(q, torch.ones(1, dtype=torch.float64)).noise(z)
        return q.log_prob(z) + (0.9 * noise[:, 0].tanh()).log1p()


@pytest.mark.parametrize("name", [*proposals(1), "zuko"])
def test_the_mean_weight_is_p_for_every_kind_of_proposal(name: str) -> None:
    def q(rows: int) -> Distribution:
        if name == "zuko":
            return flow().expand((rows,))
        if name == "chain":
            return vae.posterior(torch.zeros(rows, 12, dtype=torch.float64))
        return fixed[name].expand((rows,))

    fixed, vae, chains = proposals(1), TwoLayerVAE(4, 5, 3).double(), 10_000
    torch.manual_seed(1)
    if name == "zuko":
        flow, chains = pytest.importorskip("zuko").flows.MAF(2, 0, transforms=1, hidden_features=(4,)).double(), 4_000
    annealed = Annealed(Tilted(q), constants=random_constants(3, 1, seed=4))
    with torch.no_grad():
        w = annealed.log_weights(torch.zeros(1, 1, dtype=torch.float64), torch.zeros(chains, dtype=torch.long)).exp()
    assert errors_off(w, 1.0) < 4
    assert float(w.std()) > 0.01


def test_no_steps_are_the_model_itself() -> None:
    torch.manual_seed(0)
    model = VAE(12, 8, 3)
    x, rows = torch.rand(7, 12).round(), torch.arange(7).repeat_interleave(5)
    annealed, found = Annealed(model, 0), []
    for source in (model.bind(x), annealed.bind(x), lambda rows: annealed.log_weights(x, rows)):
        torch.manual_seed(1)
        found.append(source(rows))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    ours, theirs = (dohyo.evaluate(one, x, dohyo.MultilevelRR(2), replicates=2) for one in (annealed, model))
    assert (ours.mean, ours.stderr, ours.cost) == (theirs.mean, theirs.stderr, theirs.cost)
    assert Annealed(LogWeightsOnly(), 0).log_weights(x, rows).shape == (35,)  # nothing but log_weights is asked of a model here


class LogWeightsOnly:
    def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
        return torch.zeros(len(rows))


def test_it_goes_where_a_model_goes() -> None:
    model = LinearLayers()
    torch.manual_seed(0)
    x, estimator = model.sample(200), dohyo.MultilevelRR(4)
    annealed = Annealed(model, 4)
    found = dohyo.evaluate(annealed, x, estimator, replicates=8, khat_samples=0)
    assert found.noise_stderr is not None
    assert abs(found.mean - float(model.exact(x).detach().mean())) < 4 * found.noise_stderr
    assert found.cost == 13 * dohyo.evaluate(model, x, estimator, replicates=8, khat_samples=0).cost
    chunked = dohyo.evaluate(annealed, x[:5], dohyo.IWAE(8), max_rows=3, khat_samples=0)
    assert math.isfinite(chunked.mean)
    chains = annealed.chains(x[:3], torch.tensor([0, 0, 2, 1]))
    assert chains.z.shape == (4, 2)
    assert chains.log_w.shape == (4,)
    assert not chains.log_w.requires_grad
    assert not chains.z.requires_grad


def test_scores_are_unbiased() -> None:
    """MultilevelRR over annealed weights against the exact score; IWAE over two of them must fail."""
    model = LinearLayers()
    torch.manual_seed(0)
    x = model.sample(1)
    exact = torch.autograd.grad(model.exact(x).sum(), model.theta)[0]
    annealed, data, generator = Annealed(model, 4), x.expand(500, -1), torch.Generator().manual_seed(0)

    def scores(estimator: dohyo.Estimator) -> Tensor:
        return torch.stack([dohyo.score(annealed, data, estimator, generator)["model.theta"] / 500 for _ in range(60)])

    assert errors_off(scores(dohyo.MultilevelRR(4)), exact) < 4
    assert errors_off(scores(dohyo.IWAE(2)), exact) > 4


@pytest.mark.parametrize("model", [VAE(30, 16, 5), TwoLayerVAE(30, 16, 5), GaussianLVM(30, 16, 5)])
def test_single_precision(model: LatentVariableModel, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, draw, found = model.sample(10), torch.randn_like, []
    monkeypatch.setattr(torch, "randn_like", lambda like: draw(like.double()).to(like))  # the same noise in either precision
    for precision in (torch.float32, torch.float64):
        torch.manual_seed(1)
        log_w = Annealed(model.to(precision), 16).chains(x.to(precision), dohyo.rows(torch.full((10,), 50))).log_w
        assert log_w.dtype == precision
        found.append(log_w.view(10, 50).double())
    assert float((found[0] - found[1]).abs().max()) < 0.01
    assert float((found[0].logsumexp(-1) - found[1].logsumexp(-1)).abs().max()) < 0.001
    assert float(found[0].std(-1).min()) > 0.1


class Cliff(LinearLayers):
    """Its density is NaN or infinite, or only its gradient NaN, in half of the posterior."""

    def __init__(self, what: float) -> None:
        super().__init__()
        self.what = what

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        beyond = z[:, 0] - 0.3
        broken = beyond.clamp(max=0).sqrt() * 0 if self.what == 0 else torch.where(beyond > 0, self.what, 0.0)
        return super().log_joint(x, z) + broken


@pytest.mark.parametrize("what", [0.0, math.nan, math.inf])
def test_what_is_not_finite_has_weight_zero(what: float) -> None:
    model = Cliff(what)
    torch.manual_seed(0)
    x, chains = (model.theta @ model.M.T).detach().expand(2, -1), 5_000
    annealed = Annealed(model, constants=random_constants(4, 2))
    with torch.no_grad():
        log_w = annealed.log_weights(x, dohyo.rows(torch.full((2,), chains))).view(2, chains)
    assert not bool(log_w.isnan().any())
    assert 0 < annealed.lost == int((log_w == -torch.inf).sum()) < 2 * chains
    # What is left is below p(x), as part of the posterior cannot be reached.
    ratio = (log_w - model.exact(x).detach()[:, None]).exp()
    assert bool((ratio.mean(-1) + 4 * ratio.std(-1) / math.sqrt(chains) < 1).all())
    assert math.isfinite(float(dohyo.log_marginal(annealed, x, dohyo.IWAE(200)).detach().mean()))


def test_exploding_chains_have_weight_zero() -> None:
    """Steps far too long, under distributions that refuse NaN."""
    model, x = VAE(12, 8, 3).double(), torch.rand(5, 12, dtype=torch.float64).round()
    annealed = Annealed(LinearLayers(), constants=Constants.plain(32, scale=100.0))
    log_w = annealed.chains(x[:, :2], torch.arange(5)).log_w
    assert annealed.lost == 5
    assert bool((log_w == -torch.inf).all())
    wild = Annealed(model, constants=Constants.plain(8, scale=100.0))
    assert not bool(wild.chains(x, torch.arange(5)).log_w.isnan().any())


def test_constants_are_plain_data() -> None:
    model = LinearLayers()
    annealed = Annealed(model, constants=random_constants(4, 2))
    plain = json.loads(json.dumps(annealed.to_dict()))
    again = Annealed.from_dict(model, plain)
    assert again.to_dict() == plain
    assert again.steps == 4
    assert again.evaluations_per_weight == 13
    assert Annealed.from_dict(model, json.loads(json.dumps(Annealed(model, 0).to_dict()))).steps == 0
    old = {name: value for name, value in plain.items() if name != "mixing"}  # as version 0.2.0 wrote them
    assert Annealed.from_dict(model, old).to_dict() == plain | {"mixing": None}
    wrong: list[tuple[object, str]] = [
        ([1, 2], "list"),
        ({"step": [[0.1]]}, "mapping of step, bridge, persistence, widening"),
        (plain | {"step": [["a"]]}, "other than numbers"),
        (plain | {"step": [[0.1, -0.2]] * 4}, "step .* positive"),
        (plain | {"bridge": [0.1, 0.2, 0.3, 1.2]}, r"bridge .* in \[0, 1\]"),
        (plain | {"bridge": [0.1, 0.2]}, r"\(T, d\)"),
        (plain | {"persistence": math.nan}, "persistence"),
        (plain | {"widening": [1.0, 1.0, 1.0]}, r"\(d,\)"),
        (plain | {"mixing": [[1.0, 0.0]]}, r"mixing \(1, 2\)"),
        (plain | {"mixing": [[1.0, math.inf], [0.0, 1.0]]}, "mixing .* finite"),
        (plain | {"mixed": None}, "mapping of"),
    ]
    for data, message in wrong:
        with pytest.raises(DohyoError, match=message):
            Annealed.from_dict(model, data)  # type: ignore[arg-type]


def test_bad_input() -> None:
    model, x, rows = LinearLayers(), torch.zeros(2, 2, dtype=torch.float64), torch.arange(2)
    for steps in (-1, 1.5, "4", True):
        with pytest.raises(DohyoError, match="whole number"):
            Annealed(model, steps)  # type: ignore[arg-type]
    with pytest.raises(DohyoError, match="no log_joint"):
        Annealed(LogWeightsOnly(), 4)
    with pytest.raises(DohyoError, match=r"call tune\(x\)"):
        Annealed(model).log_weights(x, rows)
    with pytest.raises(DohyoError, match="leave steps out"):
        Annealed(model, 2, Constants.plain(3))
    with pytest.raises(DohyoError, match="of size 3, but z has 2"):
        Annealed(model, constants=random_constants(2, 3)).log_weights(x, rows)
    with pytest.raises(DohyoError, match="at least one datum"):
        Annealed(model, 2).tune(x[:0])

    class NoLogProb(Distribution):
        arg_constraints: dict[str, object] = {}  # noqa: RUF012

    class NoMoments(NoLogProb):
        def log_prob(self, value: Tensor) -> Tensor:
            return value.sum(-1)

    ones, rates = torch.ones(2, 3), torch.ones(2, 2)
    proposals: list[tuple[Distribution, str]] = [
        (Categorical(ones), "discrete"),
        (Independent(Gamma(rates, rates), 1), "TransformedDistribution"),
        (Normal(rates, rates), "Independent"),
        (NoLogProb(torch.Size([2]), torch.Size([2]), validate_args=False), "without log_prob"),
        (NoMoments(torch.Size([2]), torch.Size([2]), validate_args=False), "without mean and stddev"),
    ]
    for q, message in proposals:
        model.posterior = lambda code, q=q: q  # type: ignore[method-assign]
        with pytest.raises(DohyoError, match=message):
            Annealed(model, 4).log_weights(x, rows)
    flat = LinearLayers()
    flat.log_joint = lambda x, z: LinearLayers.log_joint(flat, x, z.detach()).detach()  # type: ignore[method-assign]
    with pytest.raises(DohyoError, match="no gradient in z"):
        Annealed(flat, 4).log_weights(x, rows)
    flat.log_joint = lambda x, z: z  # type: ignore[method-assign]
    with pytest.raises(DohyoError, match="one float for each row"):
        Annealed(flat, 4).log_weights(x, rows)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_never_waits_inside_a_chain() -> None:
    torch.manual_seed(0)
    model = VAE(30, 16, 5).cuda()
    x, rows = model.sample(10), torch.arange(10, device="cuda").repeat_interleave(20)
    annealed = Annealed(model, 4)
    source = annealed.bind(x)
    source(rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            log_w = source(rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(log_w.isfinite().all())
    assert annealed.tune(x, iterations=3).bound > -torch.inf


def test_a_state_dict_brings_its_constants() -> None:
    """Of as many leapfrogs as it has, since `tune` may have chosen them; and no others."""
    model, x = dohyo.models.VAE(data=4, hidden=8, latent=2), torch.rand(10, 4).round()
    tuned = Annealed(model, steps=3)
    tuned.tune(x, iterations=3)
    for other in (Annealed(copy.deepcopy(model)), Annealed(copy.deepcopy(model), 5), Annealed(copy.deepcopy(model), 0)):
        other.load_state_dict(tuned.state_dict())
        assert other.to_dict() == tuned.to_dict()
        assert other.step.data_ptr() != tuned.step.data_ptr()
        assert other.tune(x, iterations=1).candidates == ()  # the number is not chosen again
    for name, wrong in (("bridge", torch.ones(4)), ("step", -tuned.step), ("widening", torch.full((2,), torch.nan))):
        with pytest.raises(DohyoError, match=f"{name} (of a chain must|\\(4,\\))"):
            Annealed(model, steps=3).load_state_dict({**tuned.state_dict(), name: wrong})
    part = {name: value for name, value in tuned.state_dict().items() if name != "bridge"}
    with pytest.raises(RuntimeError, match=r'Missing key.*"bridge"'):
        Annealed(model, steps=3).load_state_dict(part)
