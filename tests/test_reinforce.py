"""REINFORCE: its expected gradient against enumeration of all x, its losses against autograd on the definitions."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dohyo
from dohyo import IWAE, SUMO, Estimator, Finite, MultilevelRR, MultilevelSS, PowerLaw, SymmetricSUMO
from dohyo.lab.rewards import random_qpbo
from dohyo.models import ExactPolicy, GRUPolicy, IndependentPolicy, LatentPolicy, NADEPolicy
from dohyo.objectives import Reinforce
from dohyo.objectives.weighing import dot, weigh

from problems import all_bits, exact_policy, latent_policy, quadrature
from stats import errors_off

THRESHOLD = 4.0  # standard errors, as the project promises
ROULETTE = MultilevelRR(4)  # unbiased for log p(x), of finite variance
EXACT: list[type[ExactPolicy]] = [IndependentPolicy, GRUPolicy, NADEPolicy]


def log_prob(policy: Any, x: Tensor) -> Tensor:
    """log p(x) with its gradient: the policy's own, or Gauss-Hermite quadrature in z."""
    if hasattr(policy, "log_prob"):
        return policy.log_prob(x)  # type: ignore[no-any-return]
    return quadrature(policy, x, nodes=60)


def theta_of(policy: Any) -> list[torch.nn.Parameter]:
    return list(policy.decoder_parameters() if isinstance(policy, LatentPolicy) else policy.parameters())


def gradient(loss: Tensor, parameters: list[torch.nn.Parameter]) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)])


def exact_gradient(policy: Any, reward: Callable[[Tensor], Tensor], entropy: float, scale: float = 1.0) -> Tensor:
    """Of -(E[R / scale] + entropy H), by enumeration of all x."""
    x = all_bits(policy.variables)
    log_p = log_prob(policy, x)
    assert float(log_p.detach().exp().sum()) == pytest.approx(1, abs=1e-9)
    value = (log_p.exp() * (reward(x) / scale - entropy * log_p)).sum()
    return -gradient(value, theta_of(policy))


def gradients(policy: Any, losses: Callable[[], Tensor], repeats: int) -> Tensor:
    """(repeats, parameters) of theta."""
    torch.manual_seed(11)
    return torch.stack([gradient(losses(), theta_of(policy)) for _ in range(repeats)])


def estimated(policy: Any, objective: Reinforce, repeats: int = 25, batch: int = 500) -> Tensor:
    generator = torch.Generator().manual_seed(12)
    return gradients(policy, lambda: objective(policy, torch.arange(batch), generator).loss, repeats)


# --- the expected gradient of a latent policy


WEIGHTS = [("reward", 1.0, 0.0), ("entropy", 0.0, 1.0), ("both", 1.0, 0.5)]


@pytest.mark.parametrize(("times", "entropy"), [case[1:] for case in WEIGHTS], ids=[case[0] for case in WEIGHTS])
def test_the_expected_gradient_of_a_latent_policy(times: float, entropy: float) -> None:
    policy, problem = latent_policy(6), random_qpbo(6, seed=1)

    def reward(x: Tensor) -> Tensor:
        return times * problem(x)

    exact = exact_gradient(policy, reward, entropy)
    assert ROULETTE.finite_variance
    assert ROULETTE.target_terms == math.inf
    found = estimated(policy, Reinforce(ROULETTE, reward, entropy=entropy))
    assert errors_off(found, exact) < THRESHOLD
    # The power twin: IWAE_1 in its place, with the same number of draws.
    found = estimated(policy, Reinforce(IWAE(1), reward, entropy=entropy))
    assert errors_off(found, exact) > THRESHOLD


def test_one_estimate_as_value_and_as_score_is_biased() -> None:
    """The power twin of the two independent estimates: the product of an estimate with its own gradient."""
    policy = latent_policy(6)
    generator = torch.Generator().manual_seed(12)

    def shared() -> Tensor:
        with torch.no_grad():
            x = policy.sample(500)
        one = weigh(policy, x, ROULETTE, "same", generator, "datum")
        gain = -one.log_px
        gain = gain - (gain.sum() - gain) / 499
        return -dot(gain[one.rows] * one.value, one.log_w) / 500

    found = gradients(policy, shared, 50)
    assert errors_off(found, exact_gradient(policy, lambda x: 0 * x[:, 0], 1.0)) > 2 * THRESHOLD


@pytest.mark.parametrize("k_draw", ["datum", "batch"])
@pytest.mark.parametrize("estimator", [ROULETTE, MultilevelSS(4), SymmetricSUMO(4, PowerLaw(1.9))], ids=["rr", "ss", "symmetric"])
def test_other_estimators_without_baseline_and_shared_k(estimator: Estimator, k_draw: str) -> None:
    policy, problem = latent_policy(5), random_qpbo(5, seed=2)
    assert estimator.finite_variance
    objective = Reinforce(estimator, problem, entropy=0.5, k_draw=k_draw, baseline="none")
    assert errors_off(estimated(policy, objective, 50, 200), exact_gradient(policy, problem, 0.5)) < THRESHOLD


def test_twelve_variables() -> None:
    policy, problem = latent_policy(12), random_qpbo(12, seed=3)
    exact = exact_gradient(policy, problem, 0.3, 2.0)
    assert errors_off(estimated(policy, Reinforce(ROULETTE, problem, entropy=0.3, scale=2.0), 50, 300), exact) < THRESHOLD
    assert errors_off(estimated(policy, Reinforce(IWAE(1), problem, entropy=0.3, scale=2.0), 50, 300), exact) > THRESHOLD


# --- exact policies, by enumeration without any noise


def fixed(policy: Any, monkeypatch: pytest.MonkeyPatch, objective: Reinforce, x: Tensor) -> Tensor:
    monkeypatch.setattr(policy, "sample", lambda n: x)
    return gradient(objective(policy, torch.arange(len(x))).loss, list(policy.parameters()))


@pytest.mark.parametrize("cls", EXACT)
def test_exact_policies(cls: type[ExactPolicy], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over every batch of two, weighted by its probability: the leave-one-out baseline leaves the mean as it is."""
    policy, problem, x = exact_policy(cls, 3), random_qpbo(3, seed=1), all_bits(3)
    p = policy.log_prob(x).detach().exp()
    pairs = list(itertools.product(range(8), repeat=2))
    exact = exact_gradient(policy, problem, 0.4, 1.5)
    for baseline in ("leave-one-out", "none"):
        objective = Reinforce(None, problem, entropy=0.4, scale=1.5, baseline=baseline)
        mean = sum(p[i] * p[j] * fixed(policy, monkeypatch, objective, x[[i, j]]) for i, j in pairs)
        torch.testing.assert_close(mean, exact, atol=1e-12, rtol=0)
        alone = sum(p[i] * fixed(policy, monkeypatch, objective, x[[i]]) for i in range(8))  # nobody to be left out of
        torch.testing.assert_close(alone, exact, atol=1e-12, rtol=0)
    # The power twin: a baseline of the whole batch, the sample itself included, scales the gradient by 1 - 1/n.
    monkeypatch.setattr(Reinforce, "_centred", lambda self, gain: gain - gain.mean())
    mean = sum(p[i] * p[j] * fixed(policy, monkeypatch, objective, x[[i, j]]) for i, j in pairs)
    torch.testing.assert_close(mean, exact / 2, atol=1e-12, rtol=0)


@pytest.mark.parametrize("cls", EXACT)
def test_exact_policies_on_their_own_samples(cls: type[ExactPolicy]) -> None:
    policy, problem = exact_policy(cls, hidden=3), random_qpbo(4, seed=1)
    found = estimated(policy, Reinforce(None, problem, entropy=0.4), 50, 400)
    exact = exact_gradient(policy, problem, 0.4)
    live = found.std(0) > 0  # the last bit's way into the network is never used
    assert errors_off(found[:, live], exact[live]) < THRESHOLD
    assert float(exact[~live].abs().sum()) == 0
    assert errors_off(estimated(policy, Reinforce(None, problem, entropy=0.3), 50, 400)[:, live], exact[live]) > THRESHOLD


@pytest.mark.parametrize("make", [latent_policy, lambda: exact_policy(NADEPolicy)], ids=["latent", "nade"])
def test_leave_one_out_lowers_the_variance(make: Callable[[], Any]) -> None:
    policy = make()

    def reward(x: Tensor) -> Tensor:
        return 5 + x[:, 0]

    estimator = ROULETTE if isinstance(policy, LatentPolicy) else None
    spread = {}
    for baseline in ("leave-one-out", "none"):
        found = estimated(policy, Reinforce(estimator, reward, entropy=0.1, baseline=baseline), 40, 100)
        spread[baseline] = float(found.var(0).sum())
    assert spread["leave-one-out"] < 0.3 * spread["none"]


# --- losses against the definitions


def ones(x: Tensor) -> Tensor:
    return 3 * x.sum(-1)


def run(objective: Reinforce, policy: LatentPolicy, n: int = 7) -> Any:
    torch.manual_seed(1)
    return objective(policy, torch.arange(n), torch.Generator().manual_seed(2))


def direct(policy: LatentPolicy, estimator: Estimator, shared: bool = False, times: int = 2, n: int = 7) -> tuple[Tensor, ...]:
    """z, x and estimates of log p(x) by the definitions, with the noise of `run`."""
    torch.manual_seed(1)
    with torch.no_grad():
        z, x = policy.sample_joint(n)
    generator = torch.Generator().manual_seed(2)
    return z, x, *(dohyo.log_marginal(policy, x, estimator, generator, shared=shared) for _ in range(times))


def others(gain: Tensor) -> Tensor:
    return torch.stack([gain[i] - gain[torch.arange(len(gain)) != i].mean() for i in range(len(gain))])


@pytest.mark.parametrize("k_draw", ["datum", "batch"])
@pytest.mark.parametrize("estimator", [IWAE(4), SUMO(3), SymmetricSUMO(2), MultilevelRR(2)], ids=repr)
def test_theta_is_the_product_of_two_estimates(estimator: Estimator, k_draw: str) -> None:
    policy = latent_policy(6)
    losses = run(Reinforce(estimator, ones, "iwae", entropy=0.3, scale=2.0, k_draw=k_draw), policy)
    _, x, one, two = direct(policy, estimator, k_draw == "batch")
    gains = [others(ones(x) / 2 - 0.3 * value.detach()) for value in (two, one)]
    expected = -(gains[0] * one + gains[1] * two).mean() / 2
    torch.testing.assert_close(gradient(losses.loss, theta_of(policy)), gradient(expected, theta_of(policy)))
    torch.testing.assert_close(losses.numbers["reward"], ones(x))
    torch.testing.assert_close(losses.numbers["entropy"], -(one + two).detach() / 2)
    torch.testing.assert_close(losses.level, (one + two).detach() / 2)


def test_without_entropy_one_estimate_is_enough() -> None:
    policy, estimator = latent_policy(6), SUMO(3)
    for entropy in (0.0, lambda: 0.0):
        losses = run(Reinforce(estimator, ones, entropy=entropy), policy)
        _, x, one = direct(policy, estimator, times=1)
        expected = -(others(ones(x)) * one).mean()
        torch.testing.assert_close(gradient(losses.loss, theta_of(policy)), gradient(expected, theta_of(policy)))
        torch.testing.assert_close(losses.numbers["entropy"], -one.detach())


@pytest.mark.parametrize("entropy", [0.0, 0.3])
def test_encoders(entropy: float) -> None:
    policy, times = latent_policy(6), 2 if entropy else 1
    phi = list(policy.encoder_parameters())

    def found(estimator: Estimator, encoder: str) -> Tensor:
        return gradient(run(Reinforce(estimator, ones, encoder, entropy=entropy), policy).loss, phi)

    estimator = SUMO(3)
    _, _, *estimates = direct(policy, estimator, times=times)
    expected = torch.stack([one.square().mean() for one in estimates]).mean()
    torch.testing.assert_close(found(estimator, "variance"), gradient(expected, phi))

    always_seven = SUMO(3, Finite((1.0,), start=4))
    z, x, *estimates = direct(policy, IWAE(7), times=times)
    expected = -torch.stack([one.mean() for one in estimates]).mean()
    torch.testing.assert_close(found(always_seven, "iwae"), gradient(expected, phi))

    torch.manual_seed(1)
    with torch.no_grad():
        z, x = policy.sample_joint(7)
    parts = []
    for _ in range(times):
        log_w = policy.bind(x, detach_posterior=True)(torch.arange(7).repeat_interleave(4)).view(7, 4)
        parts.append(-(log_w.detach().softmax(-1).square() * log_w).sum(-1).mean())
    torch.testing.assert_close(found(IWAE(4), "dreg"), gradient(torch.stack(parts).mean(), phi))

    mean, log_scale = policy.encoder(2 * x - 1).chunk(2, -1)
    sigma = policy.posterior(policy.encode(x)).base_dist.scale  # type: ignore[attr-defined]
    assert sigma.shape == log_scale.shape
    by_hand = (((z - mean) / sigma).square() / 2 + sigma.log() + math.log(2 * math.pi) / 2).sum(-1).mean()
    for estimator in (SUMO(3), IWAE(4)):
        torch.testing.assert_close(found(estimator, "sleep"), gradient(by_hand, phi))


def test_the_encoder_same_follows_theta() -> None:
    policy = latent_policy(6)
    losses = run(Reinforce(IWAE(4), ones, entropy=0.3), policy)
    _, x, one, two = direct(policy, IWAE(4))
    gains = [others(ones(x) - 0.3 * value.detach()) for value in (two, one)]
    expected = -(gains[0] * one + gains[1] * two).mean() / 2
    everyone = list(policy.parameters())
    torch.testing.assert_close(gradient(losses.loss, everyone), gradient(expected, everyone))


def test_the_encoders_loss_leaves_theta_alone() -> None:
    policy = latent_policy(6)
    wanted = gradient(run(Reinforce(SUMO(3), ones, "iwae", entropy=0.3), policy).loss, theta_of(policy))
    for encoder in ("sleep", "dreg", "variance"):
        losses = run(Reinforce(SUMO(3), ones, encoder, entropy=0.3), policy)
        torch.testing.assert_close(gradient(losses.loss, theta_of(policy)), wanted)


def test_entropy_as_a_function_and_scale() -> None:
    policy, weight = latent_policy(6), 0.0
    objective = Reinforce(SUMO(3), ones, entropy=lambda: weight, scale=4.0)
    for weight in (0.3, 0.0, 0.1):
        constant = run(Reinforce(SUMO(3), lambda x: ones(x) / 4, entropy=weight), policy)
        changing = run(objective, policy)
        torch.testing.assert_close(gradient(changing.loss, theta_of(policy)), gradient(constant.loss, theta_of(policy)))
        torch.testing.assert_close(changing.numbers["reward"], 4 * constant.numbers["reward"])  # recorded as it is


def test_integer_rewards_and_single_precision() -> None:
    problem = dohyo.lab.rewards.Quadratic([[3, -2], [-2, 5]])
    for policy, estimator in ((LatentPolicy(2), SUMO(3)), (GRUPolicy(2), None)):
        losses = Reinforce(estimator, problem, entropy=0.1)(policy, torch.arange(5))
        assert losses.numbers["reward"].dtype == torch.int64
        losses.loss.backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in theta_of(policy))
        Reinforce(estimator, problem)(policy, torch.arange(1)).loss.backward()


# --- choices


def test_defaults() -> None:
    assert Reinforce(SUMO(), ones).encoder == "sleep"
    assert Reinforce(IWAE(5), ones).encoder == "same"
    assert not Reinforce(SUMO(), ones).shared
    assert Reinforce(SUMO(), ones).baseline == "leave-one-out"
    assert Reinforce(SUMO(1, Finite((1.0,))), ones, "same").encoder == "same"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"entropy": -0.1}, "entropy is -0.1"),
        ({"entropy": math.nan}, "entropy is nan"),
        ({"entropy": math.inf}, "entropy is inf"),
        ({"scale": 0.0}, "scale is 0.0"),
        ({"scale": -1.0}, "scale is -1.0"),
        ({"scale": math.nan}, "scale is nan"),
        ({"scale": math.inf}, "scale is inf"),
        ({"baseline": "leave-one"}, "did you mean 'leave-one-out'"),
        ({"k_draw": "data"}, "did you mean 'datum'"),
        ({"encoder": "sleap"}, "did you mean 'sleep'"),
        ({"encoder": "same"}, "trains the encoder on noise"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Reinforce(SUMO(), ones, **options)


def test_a_latent_policy_needs_an_estimator() -> None:
    with pytest.raises(ValueError, match="LatentPolicy has no log_prob; give an estimator"):
        Reinforce(None, ones)(latent_policy(6), torch.arange(3))
