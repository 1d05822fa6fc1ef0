"""Policies: probabilities by enumeration and quadrature, samples against them, steps against the vectorised pass."""

import math

import pytest
import scipy.stats
import torch
from torch import Tensor

import dohyo
from dohyo.models import POLICIES, ExactPolicy, GRUPolicy, IndependentPolicy, LatentPolicy, NADEPolicy, Policy, build

from problems import all_bits, exact_policy, latent_policy, quadrature
from stats import errors_off

THRESHOLD = 4.9  # standard errors: a level of 1e-6
LEVEL = 1e-6
EXACT: list[type[ExactPolicy]] = [IndependentPolicy, GRUPolicy, NADEPolicy]


def chi_square(sample: Tensor, log_p: Tensor) -> float:
    """How far the counts of all x are from their probabilities, as a p-value."""
    place = (sample.long() @ (2 ** torch.arange(sample.shape[1]).flip(0))).flatten()
    counts = torch.bincount(place, minlength=len(log_p))
    return float(scipy.stats.chisquare(counts.numpy(), (log_p.exp() / log_p.exp().sum() * len(sample)).numpy()).pvalue)


# --- probabilities


@pytest.mark.parametrize("variables", [1, 2, 5, 8])
@pytest.mark.parametrize("cls", EXACT)
def test_probabilities_sum_to_one(cls: type[ExactPolicy], variables: int) -> None:
    log_p = exact_policy(cls, variables).log_prob(all_bits(variables)).detach()
    assert log_p.shape == (2**variables,)
    assert float(log_p.exp().sum()) == pytest.approx(1, abs=1e-12)
    assert variables == 1 or float(log_p.std()) > 0.1  # or the sum would say little


def test_independent_is_a_product() -> None:
    policy = exact_policy(IndependentPolicy)
    assert isinstance(policy, IndependentPolicy)
    p, x = policy.bias.detach().sigmoid(), all_bits(4)
    assert torch.allclose(policy.log_prob(x).exp(), (x * p + (1 - x) * (1 - p)).prod(1))


@pytest.mark.parametrize("cls", [GRUPolicy, NADEPolicy])
def test_a_bit_depends_on_those_before_it_alone(cls: type[ExactPolicy]) -> None:
    policy = exact_policy(cls, 6)
    x = torch.zeros(1, 6, dtype=torch.float64)
    before = policy.logits(x)
    for t in range(6):
        changed = x.clone()
        changed[0, t] = 1
        differs = (policy.logits(changed) != before)[0].tolist()
        assert differs == [False] * (t + 1) + [True] * (5 - t)


def test_nade_is_that_of_the_paper() -> None:
    policy = exact_policy(NADEPolicy)
    assert isinstance(policy, NADEPolicy)
    for x in all_bits(4):
        log_p = torch.tensor(0.0, dtype=torch.float64)
        for t in range(4):
            hidden = torch.sigmoid(policy.start + x[:t] @ policy.inward[:t])
            p = torch.sigmoid(hidden @ policy.weight[t] + policy.bias[t])
            log_p = log_p + (p if x[t] else 1 - p).log()
        assert float(policy.log_prob(x[None]).detach()) == pytest.approx(float(log_p.detach()), abs=1e-12)


def test_gru_is_that_of_torch_step_by_step() -> None:
    policy = exact_policy(GRUPolicy)
    assert isinstance(policy, GRUPolicy)
    cell = torch.nn.GRUCell(policy.gru.input_size, policy.gru.hidden_size, dtype=torch.float64)
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in policy.gru.state_dict().items()})
    x = policy.sample(20)
    hidden, log_p = torch.zeros(20, 5, dtype=torch.float64), torch.zeros(20, dtype=torch.float64)
    for t in range(4):
        bit = 2 * x[:, t - 1] - 1 if t else torch.zeros(20, dtype=torch.float64)
        hidden = cell(torch.cat([bit[:, None], policy.position[t].expand(20, -1)], 1), hidden)
        p = torch.sigmoid(hidden @ policy.weight[t] + policy.bias[t])
        log_p = log_p + torch.where(x[:, t] == 1, p, 1 - p).log()
    assert torch.allclose(policy.log_prob(x), log_p, atol=1e-12, rtol=0)


def test_nade_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, x = exact_policy(NADEPolicy), all_bits(4)
    whole = policy.log_prob(x)
    gradients = torch.autograd.grad(whole.square().sum(), list(policy.parameters()))
    monkeypatch.setattr(NADEPolicy, "CHUNK", 60)
    pieces = policy.log_prob(x)
    assert torch.allclose(pieces, whole, atol=1e-14, rtol=0)
    for one, other in zip(gradients, torch.autograd.grad(pieces.square().sum(), list(policy.parameters())), strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_latent_weights_are_unbiased(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, x = latent_policy(), all_bits(4)
    exact = quadrature(policy, x).detach()
    assert float(exact.exp().sum()) == pytest.approx(1, abs=1e-12)
    assert float(exact.std()) > 0.3
    draws = 20_000
    rows = torch.arange(16).repeat_interleave(draws)
    with torch.no_grad():
        weights = policy.log_weights(x, rows).exp().view(16, draws).T
        assert errors_off(weights, exact.exp()) < THRESHOLD
        # The power twin: z is drawn from q, log q is that of a scale larger by a twentieth.
        posterior, wider = policy.posterior, torch.tensor([0.0, math.log(1.05)], dtype=torch.float64)
        monkeypatch.setattr(policy, "frozen_posterior", lambda code: posterior(code + wider))
        weights = policy.bind(x, detach_posterior=True)(rows).exp().view(16, draws).T
        assert errors_off(weights, exact.exp()) > THRESHOLD


def test_latent_bound_reaches_the_exact_value() -> None:
    policy, x = latent_policy(), all_bits(4)
    exact = quadrature(policy, x).detach()
    with torch.no_grad():
        log_px = dohyo.log_marginal(policy, x, dohyo.IWAE(20_000))
    assert float((log_px - exact).abs().max()) < 0.05


# --- samples


@pytest.mark.parametrize("cls", EXACT)
def test_samples_follow_log_prob(cls: type[ExactPolicy]) -> None:
    policy = exact_policy(cls)
    log_p = policy.log_prob(all_bits(4)).detach()
    sample = policy.sample(40_000)
    assert chi_square(sample, log_p) > LEVEL
    with torch.no_grad():  # the power twin: the log-odds of one bit are off by 0.15
        next(parameter for name, parameter in policy.named_parameters() if name == "bias")[1] += 0.15
        assert chi_square(sample, policy.log_prob(all_bits(4))) < LEVEL


def test_latent_samples_follow_quadrature() -> None:
    policy = latent_policy()
    sample = policy.sample(40_000)
    assert chi_square(sample, quadrature(policy, all_bits(4)).detach()) > LEVEL
    with torch.no_grad():
        policy.decoder[-1].bias[1] += 0.15
    assert chi_square(sample, quadrature(policy, all_bits(4)).detach()) < LEVEL


@pytest.mark.parametrize("cls", [GRUPolicy, NADEPolicy])
def test_sampling_is_teacher_forcing(cls: type[ExactPolicy]) -> None:
    """Each bit of a sample is its uniform number against the probability that the vectorised pass gives it."""
    policy = exact_policy(cls, 30)
    torch.manual_seed(5)
    x = policy.sample(200)
    torch.manual_seed(5)
    uniform = torch.rand(200, 30, dtype=torch.float64)
    assert torch.equal(x, (uniform < policy.logits(x).sigmoid()).double())
    assert 0.1 < float(x.mean()) < 0.9


# --- the interface


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("variables", [1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_interface(name: str, variables: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    policy = POLICIES[name](variables).to(dtype)
    assert (policy.name, policy.variables) == (name, variables)
    as_policy: Policy = policy
    x = as_policy.sample(50)
    assert (x.shape, x.dtype, x.requires_grad) == ((50, variables), dtype, False)
    assert set(x.unique().tolist()) == {0.0, 1.0}
    for bits in (x, x.long(), x.float()):
        if isinstance(policy, ExactPolicy):
            value = policy.log_prob(bits)
        else:
            value = policy.log_weights(bits, torch.arange(50))
        assert (value.shape, value.dtype) == ((50,), dtype)
        policy.zero_grad()
        (value * torch.randn_like(value)).sum().backward()
        unused = {"inward", "gru.weight_hh_l0"} if variables == 1 else set()  # with one bit there is nothing to pass on
        for key, parameter in policy.named_parameters():
            assert parameter.grad is not None
            assert key in unused or bool((parameter.grad != 0).any()), key


@pytest.mark.parametrize("name", POLICIES)
def test_the_first_policy_is_near_uniform(name: str) -> None:
    torch.manual_seed(0)
    policy = POLICIES[name](100)
    x = policy.sample(1000)
    assert float((x.mean(0) - 0.5).abs().max()) < 0.12
    with torch.no_grad():
        if isinstance(policy, ExactPolicy):
            log_p = policy.log_prob(x)
        else:
            log_p = dohyo.log_marginal(policy, x, dohyo.IWAE(5))
    assert float((log_p + 100 * math.log(2)).abs().max()) < 5


def test_latent_has_the_sizes_of_the_paper_and_is_built_by_name() -> None:
    policy = LatentPolicy(100)
    assert [tuple(p.shape) for p in policy.encoder.parameters()] == [(200, 100), (200,), (40, 200), (40,)]
    assert [tuple(p.shape) for p in policy.decoder.parameters()] == [(200, 20), (200,), (100, 200), (100,)]
    assert len(list(policy.encoder_parameters())) == len(list(policy.decoder_parameters())) == 4
    assert list(POLICIES) == ["latent", "independent", "gru", "nade"]
    assert isinstance(build("dohyo.models:LatentPolicy", variables=5, hidden=4, latent=2), LatentPolicy)


@pytest.mark.parametrize("name", POLICIES)
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="variables is 0; it must be at least 1"):
        POLICIES[name](0)
    if name != "independent":
        with pytest.raises(ValueError, match="hidden is 0"):
            POLICIES[name](3, hidden=0)  # type: ignore[call-arg]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", POLICIES)
def test_on_a_gpu(name: str) -> None:
    torch.manual_seed(0)
    policy = POLICIES[name](20).double()
    x = policy.sample(64)
    at_home = policy.log_prob(x) if isinstance(policy, ExactPolicy) else None
    policy.to("cuda")
    assert policy.sample(64).is_cuda
    if isinstance(policy, ExactPolicy):
        assert at_home is not None
        assert torch.allclose(policy.log_prob(x.cuda()).cpu(), at_home, atol=1e-9)
    else:
        assert policy.log_weights(x.cuda(), torch.arange(64, device="cuda")).is_cuda
