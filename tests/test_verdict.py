"""The verdict on an error bar: every reason not to trust it, and the sentence that names what to do."""

import math

import pytest
import torch

import dohyo
from dohyo import IWAE, SUMO, Finite, MultilevelRR
from dohyo.evaluation import summarise
from dohyo.lab.cli.screen import verdict_lines
from dohyo.verdict import BEARABLE, Verdict, judge

VALUES = torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
GOOD = torch.full((20,), 0.3)


def shapes(heavy: int) -> torch.Tensor:
    return torch.cat([torch.full((heavy,), 1.2), torch.full((20 - heavy,), 0.3)])


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
    assert "Pareto k-hat is 1.20, above 0.7: " in judge(VALUES[:1], MultilevelRR(2), shapes(20)[:1]).reason


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
    alone = judge(VALUES[:1, :1], MultilevelRR(2), GOOD)
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
