"""Losses of the objectives against autograd on the definitions."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import dohyo
from dohyo import ELBO, IWAE, JVI, SUMO, Estimator, Finite, MultilevelRR, SymmetricSUMO
from dohyo.models import VAE, GaussianLVM, LatentPolicy
from dohyo.objectives import MaximumLikelihood, Reinforce, ReverseKL
from dohyo.objectives.weighing import baselines

X = torch.rand(6, 12, generator=torch.Generator().manual_seed(0)).round()


def small() -> VAE:
    torch.manual_seed(0)
    return VAE(data=12, hidden=8, latent=3).double()


def direct(model: VAE, estimator: Estimator, shared: bool = True) -> Tensor:
    torch.manual_seed(1)
    return dohyo.log_marginal(model, X.double(), estimator, torch.Generator().manual_seed(2), shared=shared)


def gradients(loss: Tensor, parameters: list[torch.nn.Parameter]) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)])


@pytest.mark.parametrize("k_draw", ["batch", "datum"])
@pytest.mark.parametrize("estimator", [ELBO(3), IWAE(4), JVI(4), SUMO(3), SymmetricSUMO(2), MultilevelRR(2)], ids=repr)
def test_theta_follows_the_estimator(estimator: Estimator, k_draw: str) -> None:
    model = small()
    torch.manual_seed(1)
    losses = MaximumLikelihood(estimator, "iwae", k_draw=k_draw)(model, X.double(), torch.Generator().manual_seed(2))
    expected = direct(model, estimator, k_draw == "batch")
    torch.testing.assert_close(losses.numbers["train_nll"], -expected.detach())
    theta = list(model.decoder_parameters())
    torch.testing.assert_close(gradients(losses.loss, theta), gradients(-expected.mean(), theta))


@pytest.mark.parametrize("kind", ["likelihood", "kl", "policy"])
def test_a_stratified_k(kind: str) -> None:
    """In every batch of 8 a K of probability 1/4 comes exactly twice, and to each datum as often; with "datum" it does not."""
    estimator, x = SUMO(1, Finite((0.25, 0.75))), torch.rand(8, 12).round()
    seen: list[Tensor] = []

    class Spy(GaussianLVM if kind == "kl" else LatentPolicy if kind == "policy" else VAE):  # type: ignore[misc]
        def bind(self, x: Tensor, **options: bool) -> Any:
            source = super().bind(x, **options)
            return lambda rows: (seen.append(rows.bincount(minlength=8)), source(rows))[1]

    def depths(k_draw: str) -> Tensor:
        seen.clear()
        generator = torch.Generator().manual_seed(0)
        if kind == "likelihood":
            objective: Any = MaximumLikelihood(estimator, k_draw=k_draw)
        elif kind == "kl":
            objective = ReverseKL(estimator, lambda x: -x.square().sum(-1), k_draw=k_draw)
        else:
            objective = Reinforce(estimator, lambda x: x.sum(-1), k_draw=k_draw)
        made = Spy(**{"data": 12, "hidden": 4, "latent": 2} if kind != "policy" else {"variables": 12, "hidden": 4})
        assert not objective.shared  # so that processes draw their own
        for _ in range(100):
            objective(made, x, generator)
        return torch.stack(seen) - 1

    few = (depths("stratified") == 1).double()
    assert bool((few.sum(1) == 2).all())
    assert float((few.mean(0) - 0.25).abs().max()) < 4.9 * (0.25 * 0.75 / len(few)) ** 0.5
    assert not bool(((depths("datum") == 1).sum(1) == 2).all())


@pytest.mark.parametrize("baseline", [0.0, -7.5])
def test_the_variance_encoder(baseline: float) -> None:
    model, estimator = small(), SUMO(3)
    torch.manual_seed(1)
    losses = MaximumLikelihood(estimator, "variance")(model, X.double(), torch.Generator().manual_seed(2), baseline)
    phi = list(model.encoder_parameters())
    expected = (direct(model, estimator) - baseline).square().mean()
    torch.testing.assert_close(gradients(losses.loss, phi), gradients(expected, phi))


def test_the_iwae_encoder_and_same() -> None:
    model = small()
    phi, theta = list(model.encoder_parameters()), list(model.decoder_parameters())
    torch.manual_seed(1)
    losses = MaximumLikelihood(SUMO(3, Finite((1.0,), start=4)), "iwae")(model, X.double(), torch.Generator().manual_seed(2))
    expected = direct(model, IWAE(7))
    torch.testing.assert_close(losses.numbers["train_iwae_nll"], -expected.detach())
    torch.testing.assert_close(gradients(losses.loss, phi), gradients(-expected.mean(), phi))
    torch.manual_seed(1)
    same = MaximumLikelihood(IWAE(7))(model, X.double(), torch.Generator().manual_seed(2))
    torch.testing.assert_close(gradients(same.loss, theta + phi), gradients(-expected.mean(), theta + phi))


def test_the_dreg_encoder() -> None:
    model = small()
    phi = list(model.encoder_parameters())
    torch.manual_seed(1)
    losses = MaximumLikelihood(IWAE(4), "dreg")(model, X.double())
    torch.manual_seed(1)
    log_w = model.bind(X.double(), detach_posterior=True)(torch.arange(6).repeat_interleave(4)).view(6, 4)
    expected = -(log_w.detach().softmax(-1).square() * log_w).sum(-1).mean()
    torch.testing.assert_close(gradients(losses.loss, phi), gradients(expected, phi))


def test_the_baseline_of_each_datum() -> None:
    x = torch.zeros(3, 2)
    assert baselines(-87.123456789012, x, "dreg") == baselines(0.0, x, "variance") == []
    for baseline in (-87.123456789012, torch.full((3,), -87.123456789012, dtype=torch.float64)):
        (found,) = baselines(baseline, x, "variance")
        assert found.tolist() == [-87.123456789012] * 3


def test_the_expected_gradient_does_not_depend_on_the_baseline() -> None:
    """E[grad_phi (Y - c)^2] for Y unbiased for log p(x): over many draws the two differ by noise only; c = IWAE_n would not do.

    On the exact side: E[2 (Y - c) grad Y] - E[2 Y grad Y] = -2 c E[grad Y] = 0.
    """
    model, estimator = small(), MultilevelRR(4)
    phi = list(model.encoder_parameters())
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(4)
    objective = MaximumLikelihood(estimator, "variance", k_draw="datum")
    x = X[:1].double().expand(100, -1)
    samples = []
    for _ in range(60):
        torch.manual_seed(len(samples))
        state = generator.get_state()
        zero = gradients(objective(model, x, generator, 0.0).loss, phi)
        torch.manual_seed(len(samples))
        generator.set_state(state)
        shifted = gradients(objective(model, x, generator, -8.0).loss, phi)
        samples.append(shifted - zero)
    difference = torch.stack(samples)
    stderr = difference.std(0) / math.sqrt(len(samples))
    assert float((difference.mean(0).abs() / stderr.clamp(min=1e-12)).max()) < 5.5  # several hundred coordinates


def test_clipping_each_datum() -> None:
    model = small()
    objective = MaximumLikelihood(SUMO(1), "iwae", k_draw="datum", clip_datum=2.0)
    x = X.double().repeat(50, 1)
    torch.manual_seed(1)
    losses = objective(model, x, torch.Generator().manual_seed(2))
    assert 0 < float(losses.numbers["clipped_data"].mean()) < 1
    torch.manual_seed(1)
    free = MaximumLikelihood(SUMO(1), "iwae", k_draw="datum")(model, x, torch.Generator().manual_seed(2))
    theta = list(model.decoder_parameters())
    assert float(gradients(losses.loss, theta).norm()) < float(gradients(free.loss, theta).norm())
    never = MaximumLikelihood(IWAE(5), clip_datum=1.0)(model, x)
    assert float(never.numbers["clipped_data"].sum()) == 0


@pytest.mark.parametrize("encoder", ["variance", "iwae", "dreg"])
def test_a_datum_without_weight_asks_for_nothing(encoder: str) -> None:
    class Partly(VAE):
        def bind(self, x: Tensor, detach_posterior: bool = False) -> object:
            source = super().bind(x, detach_posterior)
            return lambda rows: torch.where(rows == 2, -torch.inf, source(rows))

    torch.manual_seed(0)
    model = Partly(data=12, hidden=8, latent=3)
    losses = MaximumLikelihood(SUMO(3), encoder)(model, X)
    assert losses.numbers["train_nll"][2] == math.inf
    phi = list(model.encoder_parameters())
    found = torch.autograd.grad(losses.loss, phi, allow_unused=True)
    assert all(g is None or bool(g.isfinite().all()) for g in found)


def test_defaults_and_errors() -> None:
    assert MaximumLikelihood(IWAE(5)).encoder == "same"
    assert MaximumLikelihood(SUMO()).encoder == "dreg"
    assert MaximumLikelihood(SUMO()).shared
    assert MaximumLikelihood(SUMO(1, Finite((1.0,))), "same").encoder == "same"  # biased, so that there is something to follow
    for arguments, message in (
        ((SUMO(), "same"), "trains the encoder on noise"),
        ((SUMO(), "drag"), "did you mean 'dreg'"),
    ):
        with pytest.raises(ValueError, match=message):
            MaximumLikelihood(*arguments)
    for options, message in (
        ({"k_draw": "data"}, "did you mean 'datum'"),
        ({"baseline": "running"}, "encoder 'variance'"),
        ({"clip_datum": 0.5}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            MaximumLikelihood(SUMO(), "dreg", **options)
