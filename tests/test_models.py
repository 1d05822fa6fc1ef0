"""The models: weights against quadrature, gradients against each other, and starting values."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributions import Bernoulli, Cauchy, Distribution, Independent, LogNormal, Normal, TransformedDistribution
from torch.distributions.transforms import AffineTransform

import dohyo
from dohyo.models import MODELS, VAE, LatentVariableModel, TwoLayerVAE, build
from dohyo.models.networks import LEAST_SCALE, LIKELIHOODS, bernoulli, standard_normal

from stats import errors_off

THRESHOLD = 4.9  # standard errors: a level of 1e-6
DRAWS = 200_000


def tiny(name: str, likelihood: str = "bernoulli", latent: int = 1) -> LatentVariableModel:
    """A model small enough for quadrature, in double precision, with weights large enough for z to matter."""
    torch.manual_seed(1)
    sizes = {"data": 3, "hidden": 4, "latent": latent, "likelihood": likelihood}
    model = VAE(**sizes) if name == "vae" else TwoLayerVAE(**sizes, hidden2=4, latent1=1)
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
        for network in [model.encoder] if name == "vae" else model.encoder.values():
            bias = network[-1].bias
            bias[len(bias) // 2 :] += 0.5  # a q wider than the posterior has weights with light tails
    return model


def datum(likelihood: str) -> Tensor:
    return torch.tensor([[1.0, 0.0, 1.0]] if likelihood == "bernoulli" else [[0.3, -0.4, 0.8]], dtype=torch.float64)


def quadrature(model: LatentVariableModel, x: Tensor) -> float:
    """The integral of p(x, z) over z by the trapezium rule, which converges faster than any power for such integrands."""
    size = model.prior().event_shape[0]
    axis = torch.linspace(-12, 12, 4001 if size == 1 else 801, dtype=torch.float64)
    z = torch.cartesian_prod(*[axis] * size).view(-1, size)
    with torch.no_grad():
        log_joint = model.prior().log_prob(z) + model.likelihood(z).log_prob(x)
    return float(log_joint.logsumexp(0).exp() * (axis[1] - axis[0]) ** size)


# --- log-weights


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize(("name", "latent"), [("vae", 1), ("vae", 2), ("vae2", 1)])
def test_weights_are_unbiased(name: str, latent: int, likelihood: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = tiny(name, likelihood, latent), datum(likelihood)
    exact = quadrature(model, x)
    rows = torch.zeros(DRAWS, dtype=torch.long)
    with torch.no_grad():
        weights = model.log_weights(x, rows).exp()
        assert errors_off(weights, exact) < THRESHOLD
        # The power twin: z is drawn from q, log q is that of a scale larger by a twentieth.
        wider = torch.tensor([0.0, math.log(1.05)], dtype=x.dtype).repeat_interleave(model.encode(x).shape[-1] // 2)
        posterior = model.posterior
        monkeypatch.setattr(model, "frozen_posterior", lambda code: posterior(code + wider))
        assert errors_off(model.bind(x, detach_posterior=True)(rows).exp(), exact) > THRESHOLD


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("name", MODELS)
def test_shapes_and_the_split_of_parameters(name: str, likelihood: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name](data=12, hidden=8, latent=3, likelihood=likelihood)  # type: ignore[call-arg]
    x, rows = torch.rand(5, 12).round(), torch.tensor([0, 0, 1, 4, 4, 4, 2])
    log_w = model.log_weights(x, rows)
    assert log_w.shape == (7,)
    for draw in (model.sample(6), model.sample_mean(6), model.reconstruct(torch.rand(6, 12))):
        assert draw.shape == (6, 12)
        assert not draw.requires_grad
    log_w.logsumexp(0).backward()
    assert all(bool((parameter.grad != 0).any()) for parameter in model.parameters())
    phi, theta = list(model.encoder_parameters()), list(model.decoder_parameters())
    assert not {id(parameter) for parameter in phi} & {id(parameter) for parameter in theta}
    assert len(phi) + len(theta) == len(list(model.parameters()))
    z = model.prior().sample((7,))
    log_p = model.prior().log_prob(z) + model.likelihood(z).log_prob(x[rows])
    assert all(g is None for g in torch.autograd.grad(log_p.sum(), phi, allow_unused=True))
    log_q = model.posterior(model.encode(x[rows])).log_prob(z)
    gradients = torch.autograd.grad(log_q.sum(), [*phi, *theta], allow_unused=True)
    assert [g is not None for g in gradients] == [True] * len(phi) + [False] * len(theta)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("name", ["vae", "vae2"])
def test_broadcasting_changes_neither_log_weights_nor_gradients(name: str, likelihood: str) -> None:
    """With x copied for each of its samples, and without: the log-weights to the last bit, and the gradients to rounding, because
    some CPUs multiply matrices that lie otherwise in memory in another order."""
    x, rows = datum(likelihood).repeat(4, 1).view(4, 3, 1), torch.arange(1, 4).repeat_interleave(5)

    def weights(model: LatentVariableModel) -> list[Tensor]:
        torch.manual_seed(0)
        log_w = model.log_weights(x, rows)
        return [log_w, *torch.autograd.grad(log_w.sum(), list(model.parameters()))]

    model = tiny(name, likelihood, latent=2)
    copying = type("Copying", (type(model),), {})  # a subclass does not inherit it
    assert model.broadcasts
    assert not copying.broadcasts
    log_w, *gradients = weights(model)
    model.__class__ = copying
    copied, *of_copied = weights(model)
    assert torch.equal(log_w, copied)
    torch.testing.assert_close(gradients, of_copied, rtol=1e-12, atol=1e-13)


def test_the_standard_normal_in_fewer_operations_is_torchs_own() -> None:
    """To the last bit, with its gradient."""
    torch.manual_seed(0)
    value, weight = torch.randn(50, 7, requires_grad=True), torch.randn(50)
    both = standard_normal(7, nn.Linear(1, 1)), Independent(Normal(torch.zeros(7), torch.ones(7)), 1)
    ours, torchs = (density.log_prob(value) for density in both)
    assert torch.equal(ours, torchs)
    assert torch.equal(*(torch.autograd.grad((weight * each).sum(), value)[0] for each in (ours, torchs)))


def test_bits_in_fewer_operations_are_torchs_own() -> None:
    """To rounding, with their gradient, also where they are nearly certain."""
    torch.manual_seed(0)
    logits = torch.cat([torch.randn(50, 150), 60 * torch.randn(50, 150)]).double().requires_grad_()
    seen, weight = torch.rand(100, 150).double(), torch.randn(100).double()
    torchs = Independent(Bernoulli(logits=logits, validate_args=False), 1, validate_args=False)
    wanted = torchs.log_prob(seen)
    (slope,) = torch.autograd.grad((weight * wanted).sum(), logits, create_graph=True)
    curvature = torch.autograd.grad((weight[:, None] * slope).sum(), logits)[0]
    mapped = torch.func.vmap(lambda l, x: bernoulli(l).log_prob(x))
    for log_p in (lambda l, x: bernoulli(l).log_prob(x), mapped):  # in place, and in one expression
        found = log_p(logits, seen)
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(torch.autograd.grad((weight * found).sum(), logits)[0], slope, rtol=1e-12, atol=1e-13)
        many = torch.autograd.grad(log_p(logits, seen), logits, weight.expand(3, -1), is_grads_batched=True)[0]
        torch.testing.assert_close(many, slope.expand(3, -1, -1), rtol=1e-12, atol=1e-13)
        (first,) = torch.autograd.grad((weight * log_p(logits, seen)).sum(), logits, create_graph=True)
        second = torch.autograd.grad((weight[:, None] * first).sum(), logits)[0]
        torch.testing.assert_close(second, curvature, rtol=1e-12, atol=1e-13)
    few = bernoulli(logits[:5])
    assert torch.equal(few.log_prob(seen[:1]), few.log_prob(seen[:1].expand(5, -1)))
    assert bernoulli(logits[0]).log_prob(seen).shape == (100,)  # more data than densities
    assert few.sample().shape == (5, 150)
    for bits in (7, 784):  # the second as products, which single precision must hold
        assert bernoulli(torch.zeros(1, bits)).log_prob(torch.ones(bits)).item() == pytest.approx(-bits * math.log(2), rel=1e-6)


def test_bits_by_forward_derivatives() -> None:
    logits, change, x = torch.randn(3, 7).double(), torch.randn(3, 7).double(), torch.rand(3, 7).double()
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(bernoulli(forward_ad.make_dual(logits, change)).log_prob(x)).tangent
    assert torch.allclose(found, ((x - logits.sigmoid()) * change).sum(-1))


def test_bits_from_autocast_keep_their_digits() -> None:
    logits = torch.tensor([3.0, 6.0, 8.0]).repeat(1, 200).bfloat16().requires_grad_()
    x = torch.ones(1, 600)
    for log_p in (bernoulli(logits).log_prob(x), torch.func.vmap(lambda l: bernoulli(l).log_prob(x[0]))(logits)):
        assert log_p.dtype == torch.float32
        assert torch.allclose(log_p, logits.float().sigmoid().log().sum(-1), rtol=1e-5)
        assert torch.allclose(torch.autograd.grad(log_p.sum(), logits)[0].float(), (-logits.float()).sigmoid(), rtol=0.01)


def test_bits_give_x_a_gradient_where_it_wants_one() -> None:
    logits, x = torch.randn(3, 7), torch.rand(3, 7, requires_grad=True)
    assert torch.allclose(torch.autograd.grad(bernoulli(logits).log_prob(x).sum(), x)[0], logits)


def test_two_layers_have_the_sizes_of_burda_et_al() -> None:
    model = TwoLayerVAE()
    sizes = {
        "encoder.z1": [(200, 784), (200, 200), (200, 200)],  # the last: means and log-scales of the 100 z1
        "encoder.z2": [(100, 100), (100, 100), (100, 100)],
        "decoder.z1": [(100, 50), (100, 100), (200, 100)],
        "decoder.x": [(200, 100), (200, 200), (784, 200)],
    }
    for path, expected in sizes.items():
        network = model.get_submodule(path)
        assert [tuple(layer.weight.shape) for layer in network if isinstance(layer, nn.Linear)] == expected
        assert [type(layer) for layer in network][1::2] == [nn.Tanh, nn.Tanh]
    assert model.prior().sample((3,)).shape == (3, 150)
    assert model.posterior(model.encode(torch.rand(4, 784))).rsample().shape == (4, 150)


def test_the_two_layers_are_in_the_same_order_in_p_and_q() -> None:
    """z1 comes first in both: its moments under the prior, and the part of z that the likelihood looks at."""
    model = TwoLayerVAE(data=3, hidden=4, latent=2, latent1=3).double()
    with torch.no_grad():
        model.decoder["z1"][-1].bias.copy_(torch.tensor([50.0] * 3 + [-3.0] * 3))
        model.encoder["z1"][-1].bias.copy_(torch.tensor([20.0] * 3 + [-3.0] * 3))
        model.encoder["z2"][-1].bias.copy_(torch.tensor([-20.0] * 2 + [-3.0] * 2))
        z = model.prior().sample((100,))
        assert bool((z[:, :3] > 40).all() and (z[:, 3:].abs() < 6).all())
        z = model.posterior(model.encode(torch.rand(100, 3, dtype=torch.float64))).sample()
        assert bool((z[:, :3] > 15).all() and (z[:, 3:] < -15).all())
        moved = z + torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0])
        assert torch.equal(model.likelihood(z).mean, model.likelihood(moved).mean)


# --- the doubly reparameterised gradient


def test_a_frozen_posterior_depends_on_z_alone() -> None:
    for name in MODELS:
        model = tiny(name)
        code = model.encode(datum("bernoulli"))
        z = model.posterior(code).sample().requires_grad_()
        assert not model.frozen_posterior(code).log_prob(z.detach()).requires_grad
        gradients = [
            torch.autograd.grad(q.log_prob(z).sum(), z)[0] for q in (model.posterior(code), model.frozen_posterior(code))
        ]
        assert torch.equal(*gradients)


def gradients(model: LatentVariableModel, x: Tensor, power: int, frozen: bool) -> Tensor:
    """(blocks, parameters): phi-gradients of sum_i w~_i^power log w_i, each averaged over one block of draws of IWAE_3."""
    torch.manual_seed(0)
    blocks, block, k = 60, 500, 3
    phi = list(model.encoder_parameters())
    rows = torch.zeros(block * k, dtype=torch.long)
    samples = []
    for _ in range(blocks):
        log_w = model.bind(x, detach_posterior=frozen)(rows).view(block, k)
        loss = (log_w.detach().softmax(-1) ** power * log_w).sum(-1).mean()
        samples.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, phi)]))
    return torch.stack(samples)


@pytest.mark.parametrize(("name", "likelihood"), [("vae", "bernoulli"), ("vae", "gaussian"), ("vae2", "gaussian")])
def test_dreg_is_the_gradient_of_iwae(name: str, likelihood: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = tiny(name, likelihood), datum(likelihood) + 0.1  # no zeros: they would have no gradient
    plain = gradients(model, x, power=1, frozen=False)
    assert errors_off(plain - gradients(model, x, power=2, frozen=True), 0.0) < THRESHOLD
    assert errors_off(plain - gradients(model, x, power=1, frozen=True), 0.0) > THRESHOLD  # power twins
    assert errors_off(plain - gradients(model, x, power=2, frozen=False), 0.0) > THRESHOLD
    if isinstance(model, TwoLayerVAE):  # to detach the code leaves the network of q(z2 | z1), to detach z1 loses its path
        code_only = LatentVariableModel.frozen_posterior.__get__(model)
        monkeypatch.setattr(model, "frozen_posterior", code_only)
        assert errors_off(plain - gradients(model, x, power=2, frozen=True), 0.0) > THRESHOLD
        network = model.encoder["z2"]
        cut = lambda code: model._upwards(code.detach(), lambda z1: network(z1.detach()).detach())  # noqa: E731
        monkeypatch.setattr(model, "frozen_posterior", cut)
        assert errors_off(plain - gradients(model, x, power=2, frozen=True), 0.0) > THRESHOLD


@pytest.mark.parametrize("name", MODELS)
def test_replicas_under_vmap(name: str) -> None:
    """Two replicas at once give what each gives alone, frozen posterior included."""
    torch.manual_seed(0)
    replicas = [MODELS[name](data=6, hidden=5, latent=2, likelihood="gaussian") for _ in range(2)]  # type: ignore[call-arg]
    x, rows = torch.randn(4, 6), torch.arange(4).repeat(3)

    class Loss(nn.Module):
        def __init__(self, model: LatentVariableModel) -> None:
            super().__init__()
            self.model = model

        def forward(self) -> Tensor:
            return self.model.bind(x, detach_posterior=True)(rows).logsumexp(0)

    losses = [Loss(replica) for replica in replicas]
    parameters, buffers = torch.func.stack_module_state(losses)
    value = torch.func.grad_and_value(lambda p, b: torch.func.functional_call(losses[0], (p, b), ()))
    torch.manual_seed(1)
    together, _ = torch.func.vmap(value, randomness="same")(parameters, buffers)
    for i, loss in enumerate(losses):
        torch.manual_seed(1)
        loss().backward()
        for key, parameter in loss.named_parameters():
            torch.testing.assert_close(together[key][i], parameter.grad, rtol=1e-4, atol=1e-5)


# --- starting values and numerical safety


@pytest.mark.parametrize("name", MODELS)
def test_start_from_pixels(name: str) -> None:
    model = build(name, data=4, hidden=8, latent=2)
    train = torch.tensor([[0.0, 1.0, 0.25, 1.0], [0.0, 1.0, 0.5, 0.0]])
    model.start_from(train)
    ignore_z(model)
    mean = model.sample_mean(3)
    torch.testing.assert_close(mean, torch.tensor([0.001, 0.999, 0.375, 0.5]).expand(3, -1))
    for bad, message in [
        (train[:, :3], r"\(2, 3\), this model needs \(n, 4\)"),
        (train[0], "flatten"),
        (train[:0], "this model needs"),
        (train * 255, "likelihood='gaussian'"),
        (train - 1, r"\[-1, 0\]"),
        (train / 0, "NaN"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.start_from(bad)


@pytest.mark.parametrize("name", MODELS)
def test_start_from_real_numbers_in_any_units(name: str) -> None:
    torch.manual_seed(0)
    train = torch.randn(1000, 4) * torch.tensor([1.0, 1e-6, 1e6, 0.0]) + torch.tensor([0.0, 1.0, -1e7, 0.1])
    model = build(name, data=4, hidden=8, latent=2, likelihood="gaussian")
    model.start_from(train)
    encoded = model.observed.inputs(train)
    torch.testing.assert_close(encoded.mean(0), torch.zeros(4), atol=0.1, rtol=0)
    torch.testing.assert_close(encoded.std(0), torch.tensor([1.0, 1.0, 1.0, 0.0]), atol=0.05, rtol=0)
    copy = build(name, data=4, hidden=8, latent=2, likelihood="gaussian")
    copy.load_state_dict(model.state_dict())  # a checkpoint holds the units too
    ignore_z(copy)
    start = copy.likelihood(copy.prior().sample((1,))).base_dist
    torch.testing.assert_close(start.mean[0], train.mean(0))
    spread = train.double().std(0, correction=0).float()
    torch.testing.assert_close(start.stddev[0], torch.where(spread < 1e-7, 1.0, spread), rtol=2e-3, atol=0)
    assert bool(model.log_weights(train, torch.arange(1000)).isfinite().all())
    with pytest.raises(ValueError, match="NaN"):
        model.start_from(train.log())
    model.start_from(train[:1])  # one datum has no spread
    assert torch.equal(model.observed.spread, torch.ones(4))


def ignore_z(model: LatentVariableModel) -> None:
    """Cut the decoder's output from z, so that its bias alone is seen."""
    network = model.decoder if isinstance(model, VAE) else model.decoder["x"]
    with torch.no_grad():
        network[-1].weight.zero_()


def test_units_change_the_density_by_their_jacobian() -> None:
    torch.manual_seed(0)
    train = torch.randn(50, 3)
    values = []
    for scale in (1.0, 1000.0):
        torch.manual_seed(1)
        model = VAE(data=3, hidden=8, latent=2, likelihood="gaussian").double()
        model.start_from(train.double() * scale)
        values.append(model.log_weights(train.double() * scale, torch.arange(50)))
    torch.testing.assert_close(values[0], values[1] + 3 * math.log(1000), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_a_constant_dimension_has_a_finite_density(name: str) -> None:
    """However far training drives its scale down, and with gradients that can still drive it up."""
    torch.manual_seed(0)
    train = torch.randn(20, 2) * torch.tensor([1.0, 0.0]) + 0.7
    model = build(name, data=2, hidden=8, latent=2, likelihood="gaussian")
    model.start_from(train)
    ignore_z(model)
    bias = (model.decoder if name == "vae" else model.decoder["x"])[-1].bias
    for push in (-5.0, -50.0, -1e4, -1e30):
        with torch.no_grad():
            bias[2:] = push
        z = model.prior().sample((20,))
        density = model.likelihood(z).base_dist.log_prob(train)[:, 1]
        assert float(density.detach().max()) <= -math.log(LEAST_SCALE) - 0.5 * math.log(2 * math.pi) + 1e-4
        log_w = model.log_weights(train, torch.arange(20))
        assert bool(log_w.isfinite().all())
        assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(log_w.sum(), list(model.parameters())))


def test_training_on_a_constant_dimension() -> None:
    torch.manual_seed(0)
    train = torch.cat([torch.randn(200, 2) * 3 + 40, torch.full((200, 1), 7.0)], -1)
    model = VAE(data=3, hidden=16, latent=2, likelihood="gaussian")
    model.start_from(train)
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    bounds = []
    for _ in range(300):
        loss = -dohyo.log_marginal(model, train, dohyo.IWAE(3)).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        bounds.append(-float(loss.detach()))
    assert all(map(math.isfinite, bounds))
    assert bounds[-1] > bounds[0] + 2
    assert torch.equal(model.sample_mean(5)[:, 2], torch.full((5,), 7.0))  # no jitter of the decoder reaches it
    # two Gaussians of standard deviation 3 are all there is to learn, and the constant adds what the floor lets it
    entropy = math.log(3) + 0.5 * math.log(2 * math.pi * math.e)
    assert bounds[-1] == pytest.approx(-2 * entropy - math.log(LEAST_SCALE) - 0.5 * math.log(2 * math.pi), abs=0.3)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("push", [-1e4, 1e4])
def test_the_encoders_scale_neither_vanishes_nor_overflows(name: str, push: float) -> None:
    model = build(name, data=4, hidden=8, latent=2)
    outputs = [model.encoder] if name == "vae" else [model.encoder["z1"], model.encoder["z2"], model.decoder["z1"]]
    with torch.no_grad():
        for network in outputs:
            bias = network[-1].bias
            bias[len(bias) // 2 :] = push
    log_w = model.log_weights(torch.rand(5, 4).round(), torch.arange(5))
    assert bool(log_w.isfinite().all())
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(log_w.sum(), list(model.parameters())))


# --- pictures' raw material


class Toy(LatentVariableModel):
    """x | z by any distribution, around z."""

    def __init__(self, around: object) -> None:
        super().__init__()
        self.encoder, self.around = nn.Linear(2, 2), around

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def posterior(self, code: Tensor) -> Distribution:
        return Independent(Normal(code, 1e-3), 1)

    def prior(self) -> Distribution:
        return Independent(Normal(torch.zeros(2), torch.ones(2)), 1)

    def likelihood(self, z: Tensor) -> Distribution:
        return Independent(self.around(z), 1)


def test_means_and_where_there_is_none() -> None:
    x = torch.randn(5, 2)
    smooth = Toy(lambda z: LogNormal(z, torch.ones_like(z)))
    expected = (smooth.encoder(x) + 0.5).exp()
    torch.testing.assert_close(smooth.reconstruct(x), expected.detach(), rtol=0.02, atol=0.02)
    without = [
        Toy(lambda z: Cauchy(z, torch.ones_like(z))),
        Toy(lambda z: TransformedDistribution(Normal(z, torch.ones_like(z)), AffineTransform(0.0, 2.0))),
    ]
    for model in without:
        for drawn in (model.reconstruct(x), model.sample_mean(5)):
            assert drawn.shape == (5, 2)
            assert bool(drawn.isfinite().all())
