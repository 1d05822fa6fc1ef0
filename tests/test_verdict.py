"""The verdict on an error bar: every reason not to trust it, and the sentence that names what to do."""

import math

import pytest
import torch

import dohyo
from dohyo import IWAE, SUMO, Estimator, Finite, MultilevelRR, verdict
from dohyo.evaluation import summarise
from dohyo.lab.cli.screen import verdict_lines
from dohyo.verdict import BEARABLE, Verdict, heavy_share

VALUES = torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
GOOD = torch.full((20,), 0.3)


def shapes(heavy: int, khat: float = 0.9) -> torch.Tensor:
    return torch.cat([torch.full((heavy,), khat), torch.full((20 - heavy,), 0.3)])


def judge(
    values: torch.Tensor, estimator: Estimator, khat: torch.Tensor, stated: float = 1.0, annealed: bool | None = False
) -> Verdict:
    return verdict.judge(values.mean(-1), values.shape[1], estimator, khat, stated, annealed)


def test_trusted() -> None:
    found = judge(VALUES, MultilevelRR(2), GOOD)
    assert found == Verdict(True, "the error bar can be trusted: Pareto k-hat is at most 0.30 in the 20 data examined", ())
    bound = judge(VALUES, IWAE(5), GOOD)
    assert bound.trusted
    assert "lower bound" in bound.reason


@pytest.mark.parametrize(("heavy", "trusted"), [(0, True), (1, True), (10, True), (11, False), (20, False)])
def test_heavy_weights_and_what_to_do_about_them(heavy: int, trusted: bool) -> None:
    assert (heavy / 20 <= BEARABLE) == trusted
    found = judge(VALUES, MultilevelRR(2), shapes(heavy))
    assert found.trusted is trusted
    assert bool(found.warnings) == (heavy > 0)
    assert all(line in found.reason for line in found.warnings)
    advice = "dohyo.Annealed(model) and tune(x) in Python, or dohyo evaluate --anneal auto"
    assert (advice in found.reason) == (not trusted)
    again = judge(VALUES, MultilevelRR(2), shapes(heavy), annealed=True)
    assert ("--anneal 64" in again.reason) == (not trusted)
    assert advice not in again.reason
    if not trusted:
        assert "far above this bound" in judge(VALUES, IWAE(5), shapes(heavy)).reason
        assert "larger than stated" in found.reason
        assert "better proposal where the weights are made" in judge(VALUES, IWAE(5), shapes(heavy), annealed=None).reason


def test_one_datum() -> None:
    assert judge(VALUES[:1], MultilevelRR(2), GOOD[:1]).reason == "the error bar can be trusted: Pareto k-hat is 0.30"
    assert "Pareto k-hat is 0.90, above 0.7: " in judge(VALUES[:1], MultilevelRR(2), shapes(20)[:1]).reason


@pytest.mark.parametrize(("khat", "trusted"), [(1.0, True), (1.4, True), (1.6, False), (26.8, False)])
def test_one_datum_can_be_too_heavy_for_all(khat: float, trusted: bool) -> None:
    found = judge(VALUES, MultilevelRR(2), shapes(1, khat))
    assert found.trusted is trusted
    assert f"(largest {khat:.2f})" in found.reason


def test_heavy_weights_must_not_shift_the_mean_by_more_than_the_error_that_is_stated() -> None:
    shift = 2 * 0.9**4 / 5  # four of twenty
    for stated, trusted in ((0.51 * shift, True), (0.49 * shift, False)):
        found = judge(VALUES, MultilevelRR(2), shapes(4), stated)
        assert found.trusted is trusted
        assert (f"may be {shift:.2g} nats too low, with a stated error of {stated:.2g}" in found.reason) == (not trusted)
    few = judge(VALUES, MultilevelRR(2), torch.full((20,), 0.69), 0.001)  # none is heavy
    assert few.trusted
    # The error of the noise is stated where there are replicates, and else that of data and noise together.
    data, noise = 10 * torch.randn(50, 1).double(), 0.1 * torch.randn(50, 4).double()
    assert summarise(data + noise[:, :1], MultilevelRR(2), 100, shapes(4)).verdict.trusted is True
    assert summarise(data + noise, MultilevelRR(2), 100, shapes(4)).verdict.trusted is False


@pytest.mark.parametrize(("heavy", "kept"), [(0, 0.9), (4, 0.0), (10, 0.0)])
def test_a_mean_that_is_trusted_is_within_its_error(heavy: int, kept: float) -> None:
    """Log p(x) is zero; some data have a proposal that is far too narrow. Of the rule that counts heavy data half would pass."""
    torch.manual_seed(heavy)
    repeats, data, estimator = 100, 20, MultilevelRR.at_cost(50)
    narrow = torch.arange(repeats * data) % data < heavy

    def log_weights(rows: torch.Tensor) -> torch.Tensor:
        square = torch.randn(len(rows), 5, dtype=torch.float64).square().sum(-1)
        gaussian = 0.85 * square / 2 + 2.5 * math.log(0.15)
        return torch.where(narrow[rows], gaussian, torch.randn(len(rows), dtype=torch.float64) - 0.5)

    values = torch.stack([dohyo.estimate(log_weights, len(narrow), estimator) for _ in range(4)], -1)
    khat = dohyo.diagnostics.khat(log_weights(dohyo.rows(torch.full((len(narrow),), 200))).view(-1, 200))
    parts = zip(values.split(data), khat.split(data), strict=True)
    found = [summarise(own, estimator, 0, shape) for own, shape in parts]
    errors = [abs(one.mean) / (one.noise_stderr or math.nan) for one in found]
    trusted = [error for one, error in zip(found, errors, strict=True) if one.verdict.trusted]
    assert len(trusted) >= kept * repeats
    assert sum(error > 3 for error in trusted) <= 6
    if heavy:  # most are within half of the data, and so would have been trusted; many of them should not be
        bearable = [error for error, shape in zip(errors, khat.split(data), strict=True) if heavy_share(shape) <= BEARABLE]
        assert sum(error > 3 for error in bearable) > 30


def test_what_is_wrong_with_the_estimator() -> None:
    for values, estimator, words in [
        (VALUES, SUMO(4), "variance is infinite"),
        (VALUES, SUMO.at_cost(15, 250), "hardly reach"),
        (torch.where(torch.arange(50)[:, None] == 3, -torch.inf, VALUES), MultilevelRR(2), "1 of 50 estimates are -inf"),
    ]:
        found = judge(values, estimator, GOOD)
        assert found.trusted is False
        assert words in found.reason
        assert len(found.warnings) == 1
    several = judge(VALUES, SUMO(4), shapes(20))
    assert len(several.warnings) == 2
    assert all(line in several.reason for line in several.warnings)
    assert judge(VALUES, SUMO(4, Finite((0.5, 0.5))), GOOD).trusted


@pytest.mark.parametrize("khat", [torch.empty(0), torch.full((20,), math.nan)])
def test_what_was_not_examined_is_not_trusted(khat: torch.Tensor) -> None:
    found = judge(VALUES, MultilevelRR(2), khat)
    assert found.trusted is None
    assert found.warnings == ()
    assert "not examined" in found.reason
    assert judge(VALUES, SUMO(4), khat).trusted is False
    alone = judge(VALUES[:1, :1], MultilevelRR(2), GOOD, math.nan)
    assert alone.trusted is None
    assert "no error bar" in alone.reason


def test_an_evaluation_tells_its_verdict_everywhere() -> None:
    evaluation = summarise(VALUES, MultilevelRR(2), 100, shapes(20))
    plain = evaluation.to_dict()
    assert plain["verdict"] == {"trusted": False, "reason": evaluation.verdict.reason}
    assert plain["warnings"] == list(evaluation.warnings) == list(evaluation.verdict.warnings)
    assert verdict_lines(plain) == [f"verdict: {evaluation.verdict.reason}"]
    assert verdict_lines({**plain, "warnings": [*plain["warnings"], "other"]})[1:] == ["warning: other"]
    assert verdict_lines({"warnings": ["old"]}) == ["warning: old"]  # a result from before there were verdicts


def test_chains_are_told_from_the_encoder() -> None:
    torch.manual_seed(0)
    model = dohyo.models.GaussianLVM(data=30, hidden=8, latent=20)
    for parameter in model.decoder_parameters():
        parameter.data.mul_(3)  # far from its encoder
    x = model.sample(8).detach()
    before, after = (dohyo.evaluate(one, x, IWAE(10), khat_samples=100) for one in (model, dohyo.Annealed(model, 1)))
    assert "--anneal auto" in before.verdict.reason
    assert "--anneal 64" in after.verdict.reason
