"""Objectives on annealed weights: theta's gradient against the exact score, phi's against the encoder's own samples."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

import dohyo
from dohyo import Annealed, DohyoError
from dohyo.annealing import Constants
from dohyo.models import VAE, GaussianLVM, LatentPolicy
from dohyo.objectives import Encoder, MaximumLikelihood, Reinforce, ReverseKL
from test_annealing import Cliff, random_constants

from problems import LinearLayers
from stats import errors_off

X = torch.tensor([[1.2, -0.9]], dtype=torch.float64)


def scores(estimator: dohyo.Estimator, repeats: int = 40, data: int = 400) -> Tensor:
    """theta's gradients (repeats, size) of the log-likelihood of X, each a mean over `data` estimates."""
    model = LinearLayers()
    annealed = Annealed(model, constants=random_constants(3, 2, seed=1))
    objective, generator, found = MaximumLikelihood(estimator, "dreg", "datum"), torch.Generator().manual_seed(0), []
    torch.manual_seed(0)
    for _ in range(repeats):
        model.theta.grad = None
        objective(annealed, X.expand(data, -1), generator).loss.backward()
        assert model.theta.grad is not None
        found.append(-model.theta.grad)
    return torch.stack(found)


def test_theta_follows_the_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient is unbiased over chains from a wrong q; two chains by IWAE, and chains without weights, fail the same test."""
    model = LinearLayers()
    (exact,) = torch.autograd.grad(model.exact(X).sum(), model.theta)
    assert errors_off(scores(dohyo.MultilevelRR(2)), exact) < 4
    assert errors_off(scores(dohyo.IWAE(2)), exact) > 20
    weighed = Annealed.weighed

    def unweighed(self: Annealed, ends: dohyo.annealing.chain.Ends, x: Tensor) -> Tensor:
        log_w = weighed(self, ends, x)
        return log_w - log_w.detach()

    monkeypatch.setattr(Annealed, "weighed", unweighed)
    assert errors_off(scores(dohyo.MultilevelRR(2)), exact) > 20


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("encoder", ["same", "variance", "iwae", "dreg"])
def test_phi_follows_fresh_samples_and_theta_the_chains_alone(encoder: Encoder) -> None:
    torch.manual_seed(0)
    model, x = VAE(12, 8, 3).double(), torch.rand(7, 12, dtype=torch.float64).round()
    estimator = dohyo.IWAE(4) if encoder == "same" else dohyo.SUMO(2, dohyo.Finite([0.5, 0.5]))
    objective = MaximumLikelihood(estimator, encoder)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    out = objective(Annealed(model, 3), x, generator)
    out.loss.backward()
    both = gradients(model)
    assert float(out.loss.detach()) == pytest.approx(-float(out.log_px.mean()))
    assert out.numbers["lost_chains"].tolist() == [0.0] * 7
    torch.manual_seed(1)  # the encoder's samples come first
    objective(model, x, generator.manual_seed(1)).loss.backward()
    for name, gradient in gradients(model).items():
        same = torch.allclose(both[name], gradient, rtol=1e-9, atol=1e-12)
        assert same == name.startswith("encoder"), name
    # theta's: the estimate of the same chains, differentiated by the ends' log p(x, z) alone.
    torch.manual_seed(1)
    generator.manual_seed(1)
    plan = estimator.plan(7, generator, shared=True)
    Annealed(model, 0).log_weights(x, dohyo.rows(plan))  # the encoder's samples
    log_w = Annealed(model, 3).log_weights(x, dohyo.rows(plan))
    (-dohyo.reduce(log_w.view(7, -1), plan, estimator).mean()).backward()
    for name, gradient in gradients(model).items():
        assert name.startswith("decoder")
        assert torch.allclose(both[name], gradient, rtol=1e-9, atol=1e-12)


def test_no_steps_are_the_model_itself() -> None:
    torch.manual_seed(0)
    model, x = VAE(12, 8, 3).double(), torch.rand(7, 12, dtype=torch.float64).round()
    found = []
    for trained in (model, Annealed(model, 0)):
        torch.manual_seed(1)
        MaximumLikelihood(dohyo.IWAE(4), "dreg")(trained, x).loss.backward()
        found.append(gradients(model))
    assert all(torch.equal(a, b) for a, b in zip(found[0].values(), found[1].values(), strict=True))


def test_a_model_is_better_after_training_through_chains() -> None:
    torch.manual_seed(0)
    model, x = VAE(16, 16, 2), (torch.rand(64, 16) < torch.rand(16)).float()
    annealed, objective = Annealed(model, 4), MaximumLikelihood(dohyo.IWAE(2), "dreg")
    before = dohyo.evaluate(annealed, x, dohyo.IWAE(16), khat_samples=0).mean
    optimiser = torch.optim.Adam(annealed.parameters(), 0.01)
    for _ in range(60):
        optimiser.zero_grad()
        objective(annealed, x).loss.backward()
        optimiser.step()
    annealed.tune(x, iterations=10)
    assert dohyo.evaluate(annealed, x, dohyo.IWAE(16), khat_samples=0).mean > before + 1


def test_lost_chains_have_no_gradient_and_are_counted() -> None:
    model = Cliff(float("nan"))
    torch.manual_seed(0)
    x = (model.theta @ model.M.T).detach().expand(50, -1)
    annealed = Annealed(model, constants=random_constants(4, 2))
    out = MaximumLikelihood(dohyo.IWAE(4), "dreg")(annealed, x)
    out.loss.backward()
    assert model.theta.grad is not None
    assert bool(model.theta.grad.isfinite().all())
    assert 0 < float(out.numbers["lost_chains"].sum()) < 200


class Alone(nn.Module):
    """A density and a proposal, but no lists of theta and phi."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(2))

    def posterior(self, code: Tensor) -> Distribution:
        return Independent(Normal(code, 1.0), 1)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return -((x - z) ** 2 + (z - self.mean) ** 2).sum(-1)

    def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
        raise NotImplementedError


def test_what_cannot_be_trained_so_is_refused() -> None:
    x = torch.zeros(4, 2)
    with pytest.raises(DohyoError, match=r"Alone has no encoder_parameters\(\), which training through chains needs"):
        MaximumLikelihood(dohyo.IWAE(2))(Annealed(Alone(), 2), x)
    gaussian = Annealed(GaussianLVM(2, 8, 2), 2)
    with pytest.raises(DohyoError, match="reverse KL cannot train through annealed chains"):
        ReverseKL(dohyo.SUMO(), lambda x: -x.square().sum(-1))(gaussian, x)
    with pytest.raises(DohyoError, match="REINFORCE cannot train through annealed chains"):
        Reinforce(dohyo.SUMO(), lambda x: x.sum(-1))(Annealed(LatentPolicy(4), 2), x)


def test_chains_by_torch_func_are_the_same_chains() -> None:
    """As vmap and the compiler need them."""
    torch.manual_seed(0)
    model, x, rows = VAE(12, 8, 3).double(), torch.rand(5, 12, dtype=torch.float64).round(), torch.arange(5)
    constants, ends = Constants.plain(4), []
    for functional in (False, True):
        torch.manual_seed(1)
        with torch.no_grad():
            ends.append(dohyo.annealing.chain.Source(model, x, constants, functional=functional)(rows).forwards())
    assert torch.allclose(ends[0].z, ends[1].z, rtol=1e-12)
    assert torch.allclose(ends[0].log_ratio, ends[1].log_ratio, rtol=1e-12)
