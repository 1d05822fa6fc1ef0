"""A plain VAE as a model: numbers written by hand, gradients by two calls of autograd, and everything that takes a model."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Laplace

import dohyo
from dohyo.lab.fast.trial import check_batchable
from dohyo.models import Autoencoder
from dohyo.objectives import MaximumLikelihood

X = torch.rand(6, 1, 6, 6, generator=torch.Generator().manual_seed(0)).round().double()
ROWS = torch.arange(6)


class Pair(nn.Module):
    """A convolutional encoder that returns mean and log-variance; `LogVariance` and Gaussian decoders below reuse it."""

    def __init__(self, latent: int = 2) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3, stride=2), nn.Tanh(), nn.Flatten())
        self.mean, self.log_variance = nn.Linear(12, latent), nn.Linear(12, latent)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.body(x)
        return self.mean(code), self.log_variance(code)


class Both(nn.Module):
    """A decoder that returns means and log-variances."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 72), nn.Unflatten(1, (2, 1, 6, 6)))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        output = self.body(z)
        return output[:, 0], output[:, 1]


def convolution(latent: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(latent, 12), nn.Unflatten(1, (3, 2, 2)), nn.ConvTranspose2d(3, 1, 4, stride=2))


def made(likelihood: Any = "bernoulli", decoder: nn.Module | None = None, **arguments: Any) -> Autoencoder:
    torch.manual_seed(0)
    return Autoencoder(Pair(), decoder or convolution(), likelihood, **arguments).double()


def hand_written(model: Autoencoder, x: Tensor, rows: Tensor, log_px: Any) -> Tensor:
    """log p(z) + log p(x | z) - log q(z; x) from the formulas, with the noise that the model would use."""
    mean, log_variance = (part[rows] for part in model.encoder(x))
    noise = torch.randn_like(mean)
    z = mean + (log_variance / 2).exp() * noise
    log_q = -(noise.square() + log_variance + math.log(2 * math.pi)).sum(1) / 2
    log_prior = -(z.square() + math.log(2 * math.pi)).sum(1) / 2
    return log_prior + log_px(model.decoder(z), x[rows]).flatten(1).sum(1) - log_q


def gaussian(mean: Tensor, x: Tensor, variance: float | Tensor) -> Tensor:
    variance = torch.as_tensor(variance, dtype=x.dtype)
    return -(((x - mean).square() / variance) + (2 * math.pi * variance).log()) / 2


CASES: dict[str, Any] = {
    "bernoulli": (made, lambda out, x: -nn.functional.binary_cross_entropy_with_logits(out, x, reduction="none")),
    "gaussian, fixed": (lambda: made("gaussian", scale=0.3), lambda out, x: gaussian(out, x, 0.09)),
    "gaussian, learned": (lambda: made("gaussian"), lambda out, x: gaussian(out, x, 1.0)),
    "gaussian, by the decoder": (lambda: made("gaussian", Both()), lambda out, x: gaussian(out[0], x, out[1].exp())),
    "poisson": (lambda: made("poisson"), lambda out, x: x * out - out.exp() - torch.lgamma(x + 1)),
    "categorical": (
        lambda: made("categorical", nn.Sequential(nn.Linear(2, 108), nn.Unflatten(1, (3, 1, 6, 6)))),
        lambda out, x: -nn.functional.cross_entropy(out, x.long(), reduction="none"),
    ),
    "a function": (
        lambda: made(lambda out: Independent(Laplace(out, torch.ones_like(out)), 2)),
        lambda out, x: -(x - out).abs() - math.log(2),
    ),
    "flat images": (
        lambda: made(decoder=nn.Linear(2, 36)),
        lambda out, x: -nn.functional.binary_cross_entropy_with_logits(out, x.flatten(1), reduction="none"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_log_weights_are_those_written_by_hand(case: str) -> None:
    make, log_px = CASES[case]
    model, rows = make(), torch.arange(6).repeat_interleave(3)
    torch.manual_seed(1)
    found = model.log_weights(X, rows)
    torch.manual_seed(1)
    torch.testing.assert_close(found, hand_written(model, X, rows, log_px))
    assert found.shape == (18,)
    assert model.sample(4)[0].numel() == model.sample_mean(4)[0].numel() == model.reconstruct(X)[0].numel() == 36


def test_one_tensor_is_split_into_mean_and_log_variance() -> None:
    pair, torn = made(), made()
    torn.encoder = nn.Sequential(copy.deepcopy(pair.encoder), _Joined())
    torch.manual_seed(1)
    expected = pair.log_weights(X, ROWS)
    torch.manual_seed(1)
    assert torch.equal(torn.log_weights(X, ROWS), expected)


class _Joined(nn.Module):
    def forward(self, parts: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat(parts, 1)


def test_latents_with_a_shape() -> None:
    encoder, decoder = nn.Conv2d(1, 4, 3, stride=3), nn.ConvTranspose2d(2, 1, 3, stride=3)
    model = Autoencoder(encoder, decoder, latent=(2, 2, 2)).double()
    assert model.sample(3).shape == (3, 1, 6, 6)
    mean, log_variance = model.encode(X)
    assert mean.shape == log_variance.shape == (6, 8)
    assert torch.equal(mean, encoder(X)[:, :2].flatten(1))
    assert dohyo.evaluate(model, X, dohyo.IWAE(4)).mean < 0


def test_each_gradient_is_that_of_its_own_loss() -> None:
    """One backward pass against two calls of autograd.grad: SUMO for theta, DReG for phi, on the same samples."""
    model = made("gaussian")
    theta, phi = list(model.decoder_parameters()), list(model.encoder_parameters())
    assert any(parameter is model.observed.log_variance for parameter in theta)
    estimator = dohyo.SUMO(2, dohyo.Finite((1.0,), start=3))  # always five log-weights
    torch.manual_seed(1)
    MaximumLikelihood(estimator, "dreg")(model, X, torch.Generator()).loss.backward()
    rows = torch.arange(6).repeat_interleave(5)
    torch.manual_seed(1)
    log_w = model.log_weights(X, rows).view(6, 5)
    expected = torch.autograd.grad(-estimator.reduce(log_w, torch.full((6,), 5)).mean(), theta)
    torch.manual_seed(1)
    log_w = model.bind(X, detach_posterior=True)(rows).view(6, 5)
    expected += torch.autograd.grad(-(log_w.detach().softmax(1).square() * log_w).sum(1).mean(), phi)
    for parameter, gradient in zip([*theta, *phi], expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient.view_as(parameter))


def test_everything_takes_it() -> None:
    model = made()
    exact = dohyo.evaluate(model, X, dohyo.IWAE(20_000), khat_data=0).mean
    unbiased = dohyo.evaluate(model, X, dohyo.MultilevelRR.at_cost(15), replicates=50, khat_data=0)
    assert abs(unbiased.mean - exact) < 5 * unbiased.noise_stderr + 1e-3
    annealed = dohyo.Annealed(model, steps=4)
    annealed.tune(X, iterations=5)
    better = dohyo.evaluate(annealed, X, dohyo.IWAE(100), replicates=2, khat_data=0)
    assert abs(better.mean - exact) < 5 * better.noise_stderr + 1e-2
    assert not dohyo.sandwich(annealed, 20).crosses
    check_batchable([model, made()], X[:2], torch.tensor([0, 0, 1, 1]), "dreg")  # replicas in one program
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again.encode(X)[0], model.encode(X)[0])


class Three(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x, x


BAD: dict[str, Any] = {
    "not a module": (lambda: Autoencoder(torch.sin, convolution()), "encoder is a builtin_function.*torch.nn.Module"),
    "name": (lambda: made("bernouli"), "unknown likelihood 'bernouli': did you mean 'bernoulli'.* or give a function"),
    "scale": (lambda: made("gaussian", scale=-1.0), "scale is -1.0; it must be positive"),
    "scale of bernoulli": (lambda: made(scale=1.0), "only 'gaussian' has a scale"),
    "latent": (lambda: made(latent=0), "latent is 0"),
    "sampling first": (lambda: made().sample(2), "size of z is not known .* give latent="),
    "another latent": (lambda: made(latent=3).encode(X), r"z of shape \(2,\), but latent is \(3,\)"),
    "odd": (lambda: Autoencoder(nn.Flatten(), convolution()).encode(X[:, :, :1, :5]), r"one tensor \(6, 5\)"),
    "three": (lambda: Autoencoder(Three(), convolution()).encode(X), "returned 3 values; it must return mean and log-variance"),
    "decoder": (lambda: made(decoder=nn.Linear(2, 30)).log_weights(X, ROWS), r"\(1, 6, 6\), but the decoder gives \(30,\)"),
    "rows": (lambda: made(decoder=nn.Flatten(0)).log_weights(X, ROWS), "one row for each z"),
    "no distribution": (lambda: made(torch.exp).log_weights(X, ROWS), "returned a Tensor; it must be a torch.distrib"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_parts(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(dohyo.DohyoError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
