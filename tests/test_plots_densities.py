"""Pictures of reverse KL: real files, and numbers beside them that are true to what was given."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dohyo.kl import Draws, draw
from dohyo.lab.plots.densities import plot_density_comparison, plot_density_run, plot_marginals
from dohyo.lab.plots.divergence import plot_divergence_curves, plot_reverse_kl_curves
from dohyo.lab.plots.picture import write_picture
from dohyo.lab.targets import Autoregressive, Custom, Funnel, Ring, Target
from dohyo.models import GaussianLVM
from real import picture


def records(count: int, log_normaliser: float | None = 0.5) -> list[dict[str, Any]]:
    found = []
    for i in range(1, count + 1):
        objective = 3 * math.exp(-i / 4) + (5 if log_normaliser is None else 0)
        found.append(
            {
                "step": 500 * i,
                "estimate": objective + 0.02 + (log_normaliser or 0.0),
                "estimate_stderr": 0.01,
                "objective": objective,
                "stderr": 0.02,
                "reverse_kl": None if log_normaliser is None else objective + log_normaliser,
                "by_encoder": objective,
                "by_prior": objective - 0.01,
                "above": objective + 0.005,
                "diverged": False,
                "warnings": [],
            }
        )
    return found


def model(data: int = 2, seed: int = 0) -> GaussianLVM:
    torch.manual_seed(seed)
    return GaussianLVM(data, hidden=10, latent=2)


# --- learning curves


@pytest.mark.parametrize("count", [1, 2, 30, 100])
@pytest.mark.parametrize("log_normaliser", [0.5, None])
def test_learning_curves(count: int, log_normaliser: float | None, tmp_path: Path) -> None:
    given = records(count, log_normaliser)
    plot_divergence_curves(given, tmp_path / "curves.png")
    numbers = picture(tmp_path / "curves.png")
    assert {file.name for file in tmp_path.iterdir()} == {"curves.png", "curves.json"}
    shift = log_normaliser or 0.0
    for key in ("step", "estimate", "estimate_stderr", "stderr"):
        assert numbers[key] == pytest.approx([record[key] for record in given], rel=1e-5)
    for key in ("by_encoder", "by_prior", "above"):
        assert numbers[key] == pytest.approx([record[key] + shift for record in given], rel=1e-5)
    assert numbers["truth"] == pytest.approx([record["objective"] + shift for record in given], rel=1e-5)
    assert numbers["normalised"] == (log_normaliser is not None)
    low, high = numbers["axis"]
    assert low < min(numbers["truth"])
    assert high > max(numbers["truth"][count // 20 :])
    assert (low < 0) == (log_normaliser is not None)  # a KL is seen against zero; an objective has none


def test_what_is_far_away_does_not_set_the_axis(tmp_path: Path) -> None:
    given = records(30)
    plot_divergence_curves(given, tmp_path / "clean.png")
    given[0] |= {"objective": 1e4, "by_encoder": 1e4, "reverse_kl": 1e4 + 0.5}  # the first check
    given[12]["estimate"], given[20]["estimate"], given[25]["by_encoder"] = 1e7, -1e5, -1e6
    given[25]["diverged"] = given[26]["diverged"] = True
    plot_divergence_curves(given, tmp_path / "heavy.png")
    clean, heavy = picture(tmp_path / "clean.png"), picture(tmp_path / "heavy.png")
    assert heavy["axis"] == pytest.approx(clean["axis"], abs=1.0)
    assert (heavy["estimate"][12], heavy["by_encoder"][25]) == (1e7, pytest.approx(-1e6))
    assert [i for i, found in enumerate(heavy["diverged"]) if found] == [25, 26]


def test_a_run_that_diverged_shows_its_truth(tmp_path: Path) -> None:
    """As plain IWAE does: the estimate is far below zero at every check, the truth grows."""
    given = records(20)
    for i, record in enumerate(given):
        record |= {"estimate": -(10.0 ** (1 + i / 3)), "objective": 10 + i / 5, "by_encoder": -(10.0 ** (1 + i / 4))}
        record |= {"reverse_kl": 10.5 + i / 5, "diverged": True}
    plot_divergence_curves(given, tmp_path / "curves.png")
    low, high = picture(tmp_path / "curves.png")["axis"]
    assert -20 < low < 0 < 14.3 < high < 20


def test_missing_numbers(tmp_path: Path) -> None:
    given = records(12)
    given[3]["estimate"], given[4]["objective"], given[5]["stderr"], given[6]["above"] = None, math.nan, math.inf, -math.inf
    given[4]["reverse_kl"] = math.nan
    plot_divergence_curves(given, tmp_path / "curves.png")
    numbers = picture(tmp_path / "curves.png")
    assert numbers["estimate"][3] is numbers["truth"][4] is numbers["stderr"][5] is numbers["above"][6] is None
    assert numbers["truth"][3] is not None
    for record in given:
        record |= dict.fromkeys(("estimate", "objective", "reverse_kl", "stderr", "by_encoder", "by_prior", "above"))
        record["diverged"] = True
    plot_divergence_curves(given, tmp_path / "curves.png")
    assert set(picture(tmp_path / "curves.png")["truth"]) == {None}
    plot_divergence_curves(given[:1], tmp_path / "curves.png")


def test_records_that_will_not_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no records"):
        plot_divergence_curves([], tmp_path / "curves.png")
    with pytest.raises(ValueError, match="lacks above, stderr; each needs step"):
        plot_divergence_curves(
            [{k: v for k, v in records(1)[0].items() if k not in ("above", "stderr")}], tmp_path / "curves.png"
        )
    assert not list(tmp_path.iterdir())


def test_several_runs(tmp_path: Path) -> None:
    lost = records(10)
    for i, record in enumerate(lost):
        record |= {"estimate": -(10.0**i), "diverged": i > 3}
    curves = {("IWAE", 5): [lost], ("SUMO", 15): [records(10), records(8)], ("SUMO", 50): [records(1)]}
    write_picture(*plot_reverse_kl_curves(curves), tmp_path / "curves.png")
    numbers = picture(tmp_path / "curves.png")["curves"]
    assert [(entry["label"], entry["cost"], len(entry["step"])) for entry in numbers] == [
        ("IWAE", 5, 10), ("SUMO", 15, 10), ("SUMO", 15, 8), ("SUMO", 50, 1),
    ]  # fmt: skip
    assert numbers[0]["estimate"][9] == -1e9
    assert numbers[0]["diverged"].index(True) == 4
    assert numbers[1]["truth"] == pytest.approx([record["reverse_kl"] for record in records(10)], rel=1e-5)
    write_picture(*plot_reverse_kl_curves({("one", 15): [records(3, None)]}), tmp_path / "curves.png")


# --- densities


def test_densities_are_those_of_target_and_model(tmp_path: Path) -> None:
    """A model whose density is known: with p(x | z) = N(0, I) for all z, p(x) is a standard Gaussian."""
    known = model()
    with torch.no_grad():
        for parameter in known.decoder.parameters():
            parameter.zero_()
    target = Ring()
    write_picture(*plot_density_comparison(target, {"Gaussian": known, "other": model(seed=1)}), tmp_path / "density.png")
    numbers = picture(tmp_path / "density.png")
    x1, x2 = (torch.tensor(numbers[key], dtype=torch.float64) for key in ("x1", "x2"))
    assert [x1[0], x1[-1]] == list(target.window[0])
    grid = torch.stack(torch.meshgrid(x1, x2, indexing="xy"), -1).view(-1, 2)  # rows are x2
    found = {name: torch.tensor(values, dtype=torch.float64).view(-1) for name, values in numbers["log_density"].items()}
    assert set(found) == {"target", "Gaussian", "other"}
    torch.testing.assert_close(found["target"], target(grid) - target.log_normaliser, rtol=1e-4, atol=1e-3)
    gaussian = -grid.square().sum(-1) / 2 - math.log(2 * math.pi)
    torch.testing.assert_close(found["Gaussian"], gaussian, rtol=1e-4, atol=1e-3)
    assert set(numbers["draws"]) == set(found)
    assert all(0 < len(draws) <= 400 for draws in numbers["draws"].values())
    radii = torch.tensor(numbers["draws"]["target"]).norm(dim=1)
    assert 2 < float(radii.min()) < float(radii.max()) < 4
    assert numbers["outside"]["target"] < 0.01
    cell = float((x1[1] - x1[0]) * (x2[1] - x2[0]))
    assert float(found["other"].exp().sum() * cell) == pytest.approx(1, abs=0.05)


def test_a_target_without_window_normaliser_or_draws(tmp_path: Path) -> None:
    """It is normalised over a window that holds the model's draws; where it is NaN or -inf there is nothing."""

    def log_density(x: Tensor) -> Tensor:
        value = -x.square().sum(-1) / 2 + 100
        return torch.where(x[:, 0] < -1.5, torch.nan, torch.where(x[:, 1] < -1.5, -torch.inf, value))

    write_picture(*plot_density_comparison(Custom(log_density, dimension=2), {"model": model()}), tmp_path / "density.png")
    numbers = picture(tmp_path / "density.png")
    assert set(numbers["draws"]) == {"model"}
    assert numbers["outside"]["model"] < 0.05
    target = numbers["log_density"]["target"]
    assert target[50][0] is None
    assert target[0][50] is None
    assert -5 < target[50][50] < 0


def test_the_global_noise_is_left_alone(tmp_path: Path) -> None:
    network = model()
    before = torch.random.get_rng_state()
    write_picture(*plot_density_comparison(Funnel(), {"model": network}), tmp_path / "a.png")
    write_picture(*plot_density_comparison(Funnel(), {"model": network}), tmp_path / "b.png")
    assert torch.equal(before, torch.random.get_rng_state())
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()


# --- marginals


def gaussian_draws(n: int, dimension: int) -> Draws:
    """Draws of N(0, 1) for the target N(1, 1)."""
    x = torch.randn(n, dimension, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    log_p, log_target = -x.square().sum(-1) / 2, -(x - 1).square().sum(-1) / 2
    return Draws(x, log_target, log_p, log_p, log_p)


class Shifted(Target):
    name, dimension, log_normaliser = "shifted", 1, 0.0

    def __call__(self, x: Tensor) -> Tensor:
        return -(x[:, 0] - 1).square() / 2

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return 1 + torch.randn(n, 1, generator=generator, dtype=torch.float64)

    def reference(self) -> dict[str, tuple[float, float]]:
        return {"x1": (1.0, 1.0)}


def test_marginals(tmp_path: Path) -> None:
    plot_marginals(Shifted(), gaussian_draws(20_000, 1), tmp_path / "marginals.png")
    numbers = picture(tmp_path / "marginals.png")["quantities"]["x1"]
    edges = torch.tensor(numbers["edges"], dtype=torch.float64)
    centre, width = (edges[1:] + edges[:-1]) / 2, edges.diff()
    for kind, mean in (("model", 0), ("weighted", 1), ("exact", 1)):
        height = torch.tensor(numbers[kind], dtype=torch.float64)
        assert float((height * width).sum()) == pytest.approx(1, abs=0.02)
        assert float((height * width * centre).sum()) == pytest.approx(mean, abs=0.06)
    assert numbers["exact_mean"] == 1


def test_marginals_of_many_quantities_of_an_unknown_target(tmp_path: Path) -> None:
    draws = gaussian_draws(300, 30)
    draws.x[3, 4], draws.x[:, 5], draws.x[:, 6] = math.inf, 2.0, math.nan
    draws.log_target[7] = -math.inf
    plot_marginals(Custom(lambda x: x.sum(-1), dimension=30), draws, tmp_path / "marginals.png")
    numbers = picture(tmp_path / "marginals.png")["quantities"]
    assert list(numbers) == [f"x{i + 1}" for i in range(20)]
    assert all(set(entry) == {"edges", "model", "weighted"} for entry in numbers.values())
    draws.log_target[:] = -math.inf  # no weight anywhere
    plot_marginals(Custom(lambda x: x.sum(-1), dimension=30), draws, tmp_path / "marginals.png")


# --- all of a run


@pytest.mark.parametrize(("target", "names"), [
    (Funnel(), {"learning_curves", "density"}),
    (Autoregressive(3), {"learning_curves", "marginals"}),
    (Shifted(), {"learning_curves", "marginals"}),
    (Custom(lambda x: -x.square().sum(-1), dimension=2), {"learning_curves", "density"}),
], ids=["funnel", "autoregressive", "one", "custom"])  # fmt: skip
def test_a_run(target: Target, names: set[str], tmp_path: Path) -> None:
    network = model(target.dimension)
    draws = draw(network, target, n=50, terms=20, prior_terms=100)
    plot_density_run(target, draws, records(5, target.log_normaliser), network, tmp_path)
    assert {path.stem for path in tmp_path.glob("*.png")} == {path.stem for path in tmp_path.glob("*.json")} == names
