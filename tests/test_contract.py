"""What a model is: what is said where something is missing, and one backward pass for two losses."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dohyo
from dohyo import IWAE, SUMO, DohyoError, Estimator, MultilevelRR
from dohyo.contract import bound, marking, split
from dohyo.lab.training import fit
from dohyo.models import VAE, LatentPolicy, TwoLayerVAE
from dohyo.objectives import MaximumLikelihood, Reinforce, ReverseKL
from dohyo.objectives.weighing import coefficients
from dohyo.packing import Plan, through_tables

X = torch.rand(6, 12, generator=torch.Generator().manual_seed(0)).round()


def small(cls: type[nn.Module] = VAE) -> Any:
    torch.manual_seed(0)
    return cls(data=12, hidden=8, latent=3)  # type: ignore[call-arg]


class Plain(nn.Module):
    """What many people have: `log_weights` alone, its proposal marked."""

    def __init__(self, mark_z: bool = True, mark_q: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 12, bias=False), nn.Linear(6, 12)
        self.mark_z, self.mark_q = mark_z, mark_q
        if tied:
            self.decoder.weight = self.encoder.weight
            self.decoder.in_features = 12
        self.tied = tied

    def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
        mean, log_scale = self.encoder(x)[rows].chunk(2, -1)
        q = torch.distributions.Independent(torch.distributions.Normal(mean, log_scale.exp()), 1)
        z = q.rsample()
        log_q = q.log_prob(z)
        z, log_q = dohyo.proposed(z) if self.mark_z else z, dohyo.proposed(log_q) if self.mark_q else log_q
        logits = self.decoder(z.repeat(1, 2) if self.tied else z)
        log_px = torch.distributions.Bernoulli(logits=logits).log_prob(x[rows]).sum(-1)
        return log_px - 0.5 * z.square().sum(-1) - log_q


def two_passes(model: Any, estimator: Estimator, encoder: str) -> dict[str, Tensor]:
    """theta's gradient and phi's by two calls of autograd.grad on the two written-out losses."""
    torch.manual_seed(1)
    plan = Plan.of(estimator.plan(len(X), torch.Generator().manual_seed(2)), X.device)
    log_w = bound(model, X.to(next(model.parameters()).dtype), detach_posterior=encoder == "dreg")(plan.rows)
    function = partial(coefficients, estimator=estimator, encoder=encoder)
    value, phi, _, _ = through_tables(function, log_w.detach(), plan.counts)
    names = dict(model.named_parameters())
    losses = {"decoder": -(value * log_w).sum() / len(X), "encoder": (phi * log_w).sum() / len(X)}
    return {name: torch.autograd.grad(losses[name.split(".")[0]], p, retain_graph=True)[0] for name, p in names.items()}


def one_pass(model: Any, estimator: Estimator, encoder: str, scale: float = 1.0) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    objective = MaximumLikelihood(estimator, encoder, k_draw="datum")  # type: ignore[arg-type]
    outcome = objective(model, X.to(next(model.parameters()).dtype), torch.Generator().manual_seed(2))
    (scale * outcome.loss).backward()
    return {name: p.grad / scale for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("encoder", ["dreg", "iwae", "variance"])
@pytest.mark.parametrize("estimator", [IWAE(5), SUMO(3), MultilevelRR(2)], ids=repr)
@pytest.mark.parametrize("cls", [VAE, TwoLayerVAE])
def test_one_backward_pass_gives_both_gradients(cls: type[nn.Module], estimator: Estimator, encoder: str) -> None:
    """Also with a proposal that has parameters beyond the code, as that of two layers has; and under a scaled loss."""
    model = small(cls).double()
    expected = two_passes(model, estimator, encoder)
    for scale in (1.0, 1024.0):
        found = one_pass(model, estimator, encoder, scale)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("encoder", ["iwae", "variance"])
def test_a_module_of_ones_own_marks_its_proposal(encoder: str) -> None:
    torch.manual_seed(0)
    model = Plain().double()
    expected = two_passes(model, SUMO(3), encoder)
    for name, gradient in one_pass(model, SUMO(3), encoder).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-12)


def test_the_sum_of_two_losses_would_be_wrong() -> None:
    """The power of the tests above: without marks phi gets theta's loss."""
    model = small().double()
    expected = two_passes(model, SUMO(3), "dreg")["encoder.0.weight"]
    follows_theta = two_passes(model, SUMO(3), "same")["encoder.0.weight"]
    assert float((expected - follows_theta).abs().max()) > 0.01 * float(expected.abs().max())


def test_accumulation_and_single_precision() -> None:
    model, estimator = small(), SUMO(3)
    whole, expected = one_pass(model, estimator, "dreg"), two_passes(model, estimator, "dreg")
    for name, gradient in expected.items():
        assert float((whole[name] - gradient).norm()) < 1e-5 * float(gradient.norm())
    model.zero_grad()
    objective = MaximumLikelihood(estimator, k_draw="datum")
    for _ in range(2):
        torch.manual_seed(1)
        (objective(model, X, torch.Generator().manual_seed(2)).loss / 2).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Plain(mark_z=False, mark_q=False), r"does not say what its proposal made.*dohyo.proposed\(z\).*docs/guides/own-loop.md"),
        (Plain(mark_q=False), r"uses the parameter encoder.weight in its proposal and in its model"),
        (Plain(mark_z=False), r"uses the parameter encoder.weight in its proposal and in its model"),
        (Plain(tied=True), r"uses the parameter encoder.weight in its proposal and in its model, which follow two losses"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(model: nn.Module, message: str) -> None:
    if model.tied:  # type: ignore[union-attr]
        model.encoder.weight.data = torch.randn(12, 12)  # type: ignore[union-attr]
    with pytest.raises(DohyoError, match=message):
        MaximumLikelihood(SUMO(3), "iwae")(model, X)
    MaximumLikelihood(IWAE(3))(model, X).loss.backward()  # one loss for both needs no marks


def test_a_listed_parameter_that_is_not_marked() -> None:
    class Shifted(VAE):
        def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
            return super().log_joint(x, z) + self.encoder[0].bias.sum()

        def encode(self, x: Tensor) -> Tensor:
            return super().encode(x).detach() + self.encoder[-1].bias

    with pytest.raises(DohyoError, match=r"lists the parameter encoder.0.bias in encoder_parameters\(\), but it acts"):
        MaximumLikelihood(SUMO(3))(small(Shifted), X)


class Nothing(nn.Module):
    pass


class OnlyWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(()))

    def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.theta + torch.randn(len(rows))


class OneList(OnlyWeights):
    def encoder_parameters(self) -> Any:
        return []


@pytest.mark.parametrize(
    ("use", "model", "message"),
    [
        (lambda m: dohyo.evaluate(m, X, IWAE(3)), Nothing(), r"Nothing has no log_weights\(x, rows\), which"),
        (lambda m: dohyo.log_marginal(m, X, IWAE(3)), Nothing(), r"Nothing has no log_weights\(x, rows\), which"),
        (lambda m: MaximumLikelihood(IWAE(3))(m, X), Nothing(), r"Nothing has no log_weights\(x, rows\), which"),
        (lambda m: MaximumLikelihood(SUMO(3))(m, X), OnlyWeights(), r"no bind.*'dreg' needs.*or train with encoder 'iwae'"),
        (lambda m: MaximumLikelihood(SUMO(3))(m, X), Nothing(), r"Nothing has no log_weights\(x, rows\), which"),
        (
            lambda m: ReverseKL(SUMO(3), torch.sum)(m, torch.arange(3)),
            OnlyWeights(),
            r"has no sample_joint\(n\), which reverse KL",
        ),
        (
            lambda m: Reinforce(SUMO(3), torch.sum)(m, torch.arange(3)),
            OnlyWeights(),
            r"has no sample_joint\(n\), which REINFORCE",
        ),
        (lambda m: ReverseKL(SUMO(3), torch.sum)(m, torch.arange(3)), small(), "must have rsample"),
        (split, OneList(), r"OneList has no decoder_parameters\(\)"),
        (split, object(), "no parameters to train"),
    ],
)
def test_what_is_missing_is_named(use: Any, model: Any, message: str) -> None:
    with pytest.raises(DohyoError, match=message) as caught:
        use(model)
    text = str(caught.value)
    assert "docs/guides/model.md" in text or "must" in text or "derive" in text
    assert "--" not in text  # no command-line flag in Python


def test_fit_says_what_is_missing_before_anything_is_begun(tmp_path: Any) -> None:
    data = type("Data", (), {"train": X, "valid": X, "train_batch": lambda self, i: X[i], "to": lambda self, device: self})()
    with pytest.raises(DohyoError, match="has no log_weights"):
        next(fit(Nothing(), data, MaximumLikelihood(IWAE(3)), folder=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_bind_that_knows_no_options() -> None:
    class Bare(VAE):
        def bind(self, x: Tensor) -> Any:  # type: ignore[override]
            return super().bind(x)

    MaximumLikelihood(SUMO(3), "iwae")(small(Bare), X).loss.backward()
    with pytest.raises(DohyoError, match=r"Bare.bind takes no detach_posterior"):
        MaximumLikelihood(SUMO(3), "dreg")(small(Bare), X)


def test_a_proposal_without_parameters_needs_no_marks() -> None:
    class Uniform(OnlyWeights):
        def encoder_parameters(self) -> Any:
            return []

        def decoder_parameters(self) -> Any:
            return self.parameters()

    model = Uniform()
    MaximumLikelihood(SUMO(3), "iwae")(model, X).loss.backward()
    assert float(model.theta.grad) == pytest.approx(-1.0)  # log w shifts by theta, and so does every estimate


def test_outside_training_a_mark_is_nothing() -> None:
    z = torch.randn(3, 2, requires_grad=True)
    assert dohyo.proposed(z) is z
    with marking() as marks:
        outside = dohyo.proposed(z)
    assert torch.equal(outside, z)
    assert marks[0].inside is z
    outside.sum().backward()  # no factor is a factor of one
    assert torch.equal(z.grad, torch.ones(3, 2))


def test_a_mark_is_the_same_to_vmap_as_without_it() -> None:
    """With and without a factor, which multiplies the gradient of each row."""

    def gradient(z: Tensor, factor: Tensor | None) -> Tensor:
        with marking() as marks:
            outside = dohyo.proposed(z * 3.0)
        total = (outside**2).sum() + (0.0 if factor is None else (marks[0].factor * factor).sum())
        return torch.autograd.grad(total, z)[0]

    z, factor = torch.randn(3, 2, requires_grad=True), torch.tensor([2.0, 0.0, -1.0])
    torch.testing.assert_close(gradient(z, None), 18 * z.detach())
    torch.testing.assert_close(gradient(z, factor), 18 * z.detach() * factor[:, None])

    def mapped(z: Tensor) -> Tensor:
        with marking() as marks:
            outside = dohyo.proposed(z * 3.0)
        return (outside**2).sum() + (marks[0].factor * factor).sum()

    pair = torch.stack([z.detach(), -z.detach()]).requires_grad_()
    (both,) = torch.autograd.grad(torch.func.vmap(mapped)(pair).sum(), pair)
    torch.testing.assert_close(both[0], gradient(z, factor))


def test_a_policy_whose_samples_all_earn_the_same_still_trains_its_encoder() -> None:
    """theta's coefficients are then zero, by which phi's cannot be divided."""
    torch.manual_seed(0)
    policy = LatentPolicy(6, hidden=5, latent=2)
    Reinforce(MultilevelRR(2), lambda x: torch.ones(len(x)), "iwae")(policy, torch.arange(20)).loss.backward()
    assert all(float(p.grad.abs().max()) < 1e-15 for p in policy.decoder_parameters())
    assert all(float(p.grad.abs().max()) > 1e-6 for p in policy.encoder_parameters())
