"""Bounds from both sides, on models whose log p(x) is known."""

import json
import math

import pytest
import torch
from torch import Tensor

from dohyo import Annealed, DohyoError, sandwich
from dohyo.annealing import Constants

from problems import LinearLayers, forget

COUNT = 1_000


def exact_mean(model: LinearLayers, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Collects log p(x) of every x that is drawn."""
    drawn, draw = [], model.sample_joint
    monkeypatch.setattr(model, "sample_joint", lambda n: (pair := draw(n), drawn.append(model.exact(pair[1]).detach()))[0])
    return drawn


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("steps", [0, 1, 4, 16])
def test_it_holds_the_exact_value(layers: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LinearLayers(layers)
    exact = exact_mean(model, monkeypatch)
    found = sandwich(Annealed(model, constants=Constants.plain(steps, scale=0.5)) if steps else model, COUNT, chains=4)
    truth = torch.cat(exact)
    below, above = truth - found.lower_per_datum, found.upper_per_datum - truth
    for gap in (below, above):
        assert float(gap.mean()) > -4 * float(gap.std()) / math.sqrt(COUNT)
    assert 0 < found.gap == pytest.approx(float((below + above).mean()))
    assert not found.crosses
    assert "known to" in found.verdict
    assert found.cost == COUNT * 8 * (3 * steps + 1)
    assert found.lower == pytest.approx(float(found.lower_per_datum.mean()))


def test_better_chains_close_the_gap() -> None:
    model = LinearLayers()
    encoder, chains = sandwich(model, 500, chains=2), sandwich(Annealed(model, 8), 500, chains=2)
    assert chains.gap + 4 * chains.gap_stderr < encoder.gap


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("forgotten", [8, 15])
def test_a_forgotten_momentum_ratio_makes_them_cross(layers: int, forgotten: int, monkeypatch: pytest.MonkeyPatch) -> None:
    annealed = Annealed(LinearLayers(layers), 16)
    assert not sandwich(annealed, 500).crosses
    forget(monkeypatch, forgotten)
    found = sandwich(annealed, 500)
    assert found.crosses
    assert found.lower > found.upper + 3 * found.gap_stderr
    assert "above the upper one" in found.verdict


def test_a_z_that_x_was_not_drawn_from_makes_them_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LinearLayers()
    draw = model.sample_joint
    monkeypatch.setattr(model, "sample_joint", lambda n: (draw(n)[0], draw(n)[1]))
    assert sandwich(Annealed(model, 16), 500).crosses


def test_lost_chains_leave_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the posterior has a gradient that is NaN."""
    model = LinearLayers()
    exact = exact_mean(model, monkeypatch)
    whole = model.log_joint
    monkeypatch.setattr(model, "log_joint", lambda x, z: whole(x, z) + 0 * (z[:, 0] - 0.3).clamp(max=0).sqrt())
    found = sandwich(Annealed(model, 4), 500)
    assert 0 < found.lost < 500 * 32
    assert found.lower < float(torch.cat(exact).mean()) < found.upper
    assert not math.isnan(found.upper)


def test_it_is_plain_data_and_disturbs_nothing() -> None:
    model, state = LinearLayers(), torch.random.get_rng_state()
    found = sandwich(Annealed(model, 2), 7, chains=3, batch_size=3, max_rows=4)
    assert torch.equal(state, torch.random.get_rng_state())
    assert len(found.lower_per_datum) == len(found.upper_per_datum) == found.count == 7
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["lower"] == found.lower
    assert "lower_per_datum" not in plain
    assert sandwich(Annealed(model, 2), 7, chains=3, batch_size=3).lower == pytest.approx(found.lower, abs=5)


def test_bad_input() -> None:
    model = LinearLayers()
    for arguments in ({"count": 1}, {"count": 5, "chains": 0}, {"count": 5, "batch_size": 0}):
        with pytest.raises(DohyoError, match="at least 2 data"):
            sandwich(model, **arguments)
    with pytest.raises(DohyoError, match=r"call tune\(x\)"):
        sandwich(Annealed(model), 5)

    class NoDraws:
        def posterior(self, code: Tensor) -> None: ...

        def log_joint(self, x: Tensor, z: Tensor) -> None: ...

        def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
            return torch.zeros(len(rows))

    with pytest.raises(DohyoError, match=r"no sample_joint\(n\)"):
        sandwich(NoDraws(), 5)
    NoDraws.log_joint = None  # type: ignore[assignment]
    with pytest.raises(DohyoError, match="no log_joint"):
        sandwich(NoDraws(), 5)
