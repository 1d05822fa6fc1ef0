"""Reverse KL: its gradients, its encoders, and a target inside the family."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

import dohyo
from dohyo import ELBO, IWAE, JVI, SUMO, Estimator, Finite, MultilevelRR, MultilevelSS, SymmetricSUMO
from dohyo.kl import divergence, draw
from dohyo.lab.experiments.reverse_kl import ReverseKLConfig, TowardsTarget
from dohyo.lab.targets import Custom, Funnel
from dohyo.lab.training import train
from dohyo.models import GaussianLVM
from dohyo.models.latent import LatentVariableModel
from dohyo.objectives import ReverseKL
from dohyo.packing import rows

from stats import errors_off

# --- gradients on a model whose reverse KL is known


class Linear(LatentVariableModel):
    """z ~ N(theta, I), x | z ~ N(z, e^{2c} I), so that x ~ N(theta, 1 + e^{2c}); the encoder is a little off its optimum."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([0.5, -0.3], dtype=torch.float64))
        self.log_scale = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))
        self.encoder = nn.Linear(2, 2, dtype=torch.float64)
        with torch.no_grad():
            self.encoder.weight.copy_(torch.tensor([[0.5, 0.05], [-0.05, 0.45]]))
            self.encoder.bias.copy_(torch.tensor([0.6, -0.4]))

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def posterior(self, code: Tensor) -> Distribution:
        return _normal(code, math.sqrt(2 / 3))

    def prior(self) -> Distribution:
        return _normal(self.theta, 1.0)

    def likelihood(self, z: Tensor) -> Distribution:
        return _normal(z, self.log_scale.exp())

    def exact(self) -> Tensor:
        """KL(N(theta, v I), N(1, 3 I))."""
        v = 1 + (2 * self.log_scale).exp()
        return (v / 3 + (self.theta - 1).square() / 3 - 1 - (v / 3).log()).sum() / 2


def _normal(mean: Tensor, scale: Tensor | float) -> Distribution:
    return Independent(Normal(mean, scale, validate_args=False), 1, validate_args=False)


def log_target(x: Tensor) -> Tensor:
    return (-(x - 1).square() / 6 - math.log(6 * math.pi) / 2).sum(-1)


def flat(loss: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, found, strict=True)])


def forced(objective: ReverseKL, estimator: Estimator) -> ReverseKL:
    """With an estimator that it would refuse."""
    object.__setattr__(objective, "estimator", estimator)
    return objective


def gradient_errors(objective: ReverseKL, steps: int = 20) -> tuple[float, float]:
    """The largest distance of theta's mean gradient from the analytic one, and of the mean estimate, in standard errors."""
    model = Linear()
    theta = [model.theta, model.log_scale]
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    gradients, estimates = [], []
    for _ in range(steps):
        losses = objective(model, torch.arange(2000), generator)
        gradients.append(flat(losses.loss, theta))
        estimates.append(losses.numbers["estimate"].mean())
    exact = flat(model.exact(), theta)
    return errors_off(torch.stack(gradients), exact), errors_off(torch.stack(estimates), float(model.exact().detach()))


@pytest.mark.parametrize("paths", ["all", "x", "decoder"])
@pytest.mark.parametrize("estimator", [MultilevelRR(2), MultilevelSS(2)], ids=repr)
def test_unbiased_gradients(estimator: Estimator, paths: str) -> None:
    gradient, estimate = gradient_errors(ReverseKL(estimator, log_target, "iwae", paths=paths))
    assert gradient < 4.5
    assert estimate < 4.5


def test_biased_gradients_fail_the_same_test() -> None:
    gradient, estimate = gradient_errors(ReverseKL(IWAE(2), log_target, "iwae"))
    assert gradient > 9
    assert estimate > 9


@pytest.mark.parametrize("paths", ["x", "decoder"])
def test_paths_may_not_be_left_out_of_a_bound(paths: str) -> None:
    """It is refused; made by force, it is biased otherwise than the bound itself."""
    with pytest.raises(ValueError, match="use 'all'"):
        ReverseKL(IWAE(2), log_target, "iwae", paths=paths)
    assert gradient_errors(forced(ReverseKL(MultilevelRR(2), log_target, "iwae", paths=paths), IWAE(2)))[0] > 9


def test_the_gradient_of_a_bound_is_that_of_the_bound() -> None:
    """A SUMO of at most three terms is unbiased for IWAE_3: the two agree, path by path is not needed."""
    capped, bound = SUMO(1, Finite((0.5, 0.5), start=1)), IWAE(3)
    assert capped.target_terms == bound.target_terms == 3
    model = Linear()
    theta = [model.theta, model.log_scale]
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    samples = {}
    for estimator in (capped, bound):
        objective = ReverseKL(estimator, log_target, "iwae")
        samples[estimator] = torch.stack([flat(objective(model, torch.arange(1000), generator).loss, theta) for _ in range(80)])
    spread = torch.stack([values.var(0) / 80 for values in samples.values()]).sum(0).sqrt()
    assert float(((samples[capped].mean(0) - samples[bound].mean(0)) / spread).abs().max()) < 4.5


# --- losses against autograd on the definitions

ESTIMATORS = [ELBO(3), IWAE(4), JVI(4), SUMO(3), SymmetricSUMO(2), MultilevelRR(2)]
N = 6


def small() -> GaussianLVM:
    torch.manual_seed(0)
    return GaussianLVM(data=2, hidden=8, latent=3).double()


def losses_of(objective: ReverseKL, model: Any, baseline: float = 0.0) -> Any:
    torch.manual_seed(1)
    return objective(model, torch.arange(N), torch.Generator().manual_seed(2), baseline)


def direct(model: Any, estimator: Estimator, shared: bool = False, paths: str = "all") -> tuple[Tensor, Tensor, Tensor]:
    """z, x and log p(x) with the noise of `losses_of`; what `paths` leaves out is held constant."""
    torch.manual_seed(1)
    z, x = model.sample_joint(N)
    frozen = model if paths == "all" else copy.deepcopy(model).requires_grad_(False)
    source = frozen.bind(x, detach_x=paths == "decoder")
    log_px = dohyo.estimate(source, N, estimator, torch.Generator().manual_seed(2), shared=shared)
    return z, x, log_px


@pytest.mark.parametrize("k_draw", ["batch", "datum"])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_theta_follows_the_estimate_less_the_target(estimator: Estimator, k_draw: str) -> None:
    model, target = small(), Funnel()
    theta = list(model.decoder_parameters())
    for paths in ("all", "x", "decoder"):
        if paths != "all" and estimator.target_terms != math.inf:
            continue
        losses = losses_of(ReverseKL(estimator, target, "iwae", k_draw=k_draw, paths=paths), model)
        _, x, log_px = direct(model, estimator, k_draw == "batch", paths)
        torch.testing.assert_close(losses.numbers["estimate"], (log_px - target(x)).detach())
        estimate = (log_px - target(x)).detach()
        whole = estimate.mean().expand_as(estimate) if k_draw == "batch" else estimate  # with one K a step is one draw
        torch.testing.assert_close(losses.numbers["estimate_square"], whole.square())
        torch.testing.assert_close(flat(losses.loss, theta), flat((log_px - target(x)).mean(), theta))


@pytest.mark.parametrize("baseline", ["zero", "target"])
def test_the_variance_encoder(baseline: str) -> None:
    model, target, estimator = small(), Funnel(), SUMO(3)
    objective = ReverseKL(estimator, target, "variance", baseline=baseline)
    assert objective.running_baseline == (baseline == "target")
    losses = losses_of(objective, model, baseline=0.7)
    torch.manual_seed(1)
    _, x = model.sample_joint(N)
    log_px = dohyo.estimate(model.bind(x.detach()), N, estimator, torch.Generator().manual_seed(2))
    about = target(x.detach()) + 0.7 if baseline == "target" else 0.0
    phi = list(model.encoder_parameters())
    torch.testing.assert_close(flat(losses.loss, phi), flat((log_px - about).square().mean(), phi))


def test_the_iwae_encoder_climbs_on_the_same_weights() -> None:
    model, target = small(), Funnel()
    estimator = SUMO(3, Finite((1.0,), start=4))  # seven weights, always
    losses = losses_of(ReverseKL(estimator, target, "iwae"), model)
    torch.manual_seed(1)
    _, x = model.sample_joint(N)
    bound = dohyo.estimate(model.bind(x.detach()), N, IWAE(7))
    phi = list(model.encoder_parameters())
    torch.testing.assert_close(flat(losses.loss, phi), flat(-bound.mean(), phi))
    torch.testing.assert_close(losses.level, (bound - target(x)).detach())


def test_the_same_encoder_goes_down_with_theta() -> None:
    model, target = small(), Funnel()
    losses = losses_of(ReverseKL(IWAE(4), target), model)
    _, x, log_px = direct(model, IWAE(4))
    everything = [*model.decoder_parameters(), *model.encoder_parameters()]
    # phi sees x as a constant: through x only theta is reached, and so one backward pass serves both
    torch.testing.assert_close(flat(losses.loss, everything), flat((log_px - target(x)).mean(), everything))


def test_the_sleep_encoder_learns_where_x_came_from() -> None:
    model, target = small(), Funnel()
    losses = losses_of(ReverseKL(MultilevelRR(2), target), model)
    torch.manual_seed(1)
    z, x = model.sample_joint(N)
    expected = -model.posterior(model.encode(x.detach())).log_prob(z).mean()
    phi, theta = list(model.encoder_parameters()), list(model.decoder_parameters())
    torch.testing.assert_close(flat(losses.loss, phi), flat(expected, phi))
    other = losses_of(ReverseKL(MultilevelRR(2), target, "variance"), model)  # what phi follows is nothing to theta
    torch.testing.assert_close(flat(losses.loss, theta), flat(other.loss, theta))


def test_the_dreg_encoder() -> None:
    model = small()
    estimator = SUMO(2, Finite((1.0,), start=2))  # four weights, unbiased for IWAE_4 alone: made by force
    losses = losses_of(forced(ReverseKL(MultilevelRR(2), Funnel(), "dreg"), estimator), model)
    torch.manual_seed(1)
    _, x = model.sample_joint(N)
    log_w = model.bind(x.detach(), detach_posterior=True)(rows(torch.full((N,), 4))).view(N, 4)
    expected = -(log_w.detach().softmax(-1).square() * log_w).sum(-1).mean()
    phi = list(model.encoder_parameters())
    torch.testing.assert_close(flat(losses.loss, phi), flat(expected, phi))


def test_a_density_of_zero_has_an_infinite_estimate_and_finite_gradients() -> None:
    model = small()

    def half(x: Tensor) -> Tensor:
        return torch.where(x[:, 0] > 0, -x.square().sum(-1), -torch.inf)

    losses = losses_of(ReverseKL(MultilevelRR(2), half), model)
    assert losses.numbers["estimate"].isinf().any()
    assert flat(losses.loss, list(model.decoder_parameters())).isfinite().all()


def test_defaults_and_errors() -> None:
    assert (ReverseKL(IWAE(5), log_target).encoder, ReverseKL(IWAE(5), log_target).paths) == ("same", "all")
    assert (ReverseKL(SUMO(), log_target).encoder, ReverseKL(SUMO(), log_target).paths) == ("sleep", "x")
    assert ReverseKL(SUMO(), log_target, "dreg").paths == "decoder"
    assert not ReverseKL(SUMO(), log_target).shared
    for estimator, options, message in (
        (SUMO(), {"encoder": "same"}, "trains the encoder on noise"),
        (SUMO(), {"encoder": "sleap"}, "did you mean 'sleep'"),
        (SUMO(), {"paths": "decode"}, "did you mean 'decoder'"),
        (SUMO(), {"k_draw": "data"}, "did you mean 'datum'"),
        (SUMO(), {"baseline": "targets", "encoder": "variance"}, "did you mean 'target'"),
        (SUMO(), {"baseline": "target"}, "is for encoder 'variance'"),
        (SUMO(), {"encoder": "dreg", "paths": "x"}, "use paths 'decoder'"),
        (IWAE(5), {"encoder": "dreg"}, "encoder 'iwae'"),
        (IWAE(5), {"paths": "x"}, "use 'all'"),
    ):
        with pytest.raises(ValueError, match=message):
            ReverseKL(estimator, log_target, **options)


# --- runs


def shifted(x: Tensor) -> Tensor:
    """N((1, -2), diag(1/4, 4)) without its constant."""
    return -((x - x.new_tensor([1.0, -2.0])) / x.new_tensor([0.5, 2.0])).square().sum(-1) / 2


shifted.dimension, shifted.log_normaliser = 2, math.log(2 * math.pi)  # type: ignore[attr-defined]


@pytest.mark.slow  # the gradients have faster tests above
def test_a_gaussian_inside_the_family_is_found() -> None:
    """The reverse KL goes to zero, all the ways to it agree, and so does the training estimate within its error bar."""
    target = Custom(shifted)
    torch.manual_seed(0)
    model = GaussianLVM(2, hidden=16, latent=2)
    config = ReverseKLConfig(
        steps=650, check_every=200, learning_rate=5e-3, estimator="multilevel-rr", cost=8, device="cpu", check_terms=100
    )
    task = TowardsTarget(target, config.objective(target))
    records = list(train(model, task, config.objective(target), config))
    assert [record["step"] for record in records] == [200, 400, 600, 650]
    last = records[-1]
    assert records[0]["estimate"] > 0.05
    assert abs(last["reverse_kl"]) < 0.005
    for way in ("by_encoder", "by_prior", "above"):
        assert last[way] + shifted.log_normaliser == pytest.approx(0, abs=0.005)  # type: ignore[attr-defined]
    assert abs(last["estimate"]) < 4 * last["estimate_stderr"] < 0.01
    assert 1.5 < last["estimate_stderr"] / records[-2]["estimate_stderr"] < 3  # of 50 steps, not of 200
    assert not any(record["diverged"] for record in records)
    found = divergence(draw(model, target, 2000, 200, seed=9), target.log_normaliser)
    assert -4 * found.stderr < (found.reverse_kl or 0.0) < 0.005
