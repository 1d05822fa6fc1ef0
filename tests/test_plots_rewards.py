"""Pictures of policies: real files, and numbers beside them that are true to what was given."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dohyo.lab.plots.picture import write_picture
from dohyo.lab.plots.rewards import plot_reward_curves
from real import picture


def records(count: int, pace: float = 0.5, top: float = 1000.0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for i in range(1, count + 1):
        mean = top * (1 - 2 * math.exp(-i / 5))
        best = max(math.floor(mean) + 100, found[-1]["best_reward"] if found else -math.inf)
        record = {"epoch": i, "step": 100 * i, "reward": mean, "best_reward": best, "entropy": 30 / i, "seconds": pace * i}
        found.append(record)
    return found


def plot(runs: Any, path: Path, best_known: float | None = None) -> None:
    write_picture(*plot_reward_curves(runs, best_known), path)


@pytest.mark.parametrize("count", [1, 2, 30, 100])
@pytest.mark.parametrize("best_known", [1234, None])
def test_one_run(count: int, best_known: int | None, tmp_path: Path) -> None:
    given = records(count)
    plot({"latent": [given]}, tmp_path / "curves.png", best_known)
    assert {path.name for path in tmp_path.iterdir()} == {"curves.png", "curves.json"}
    numbers = picture(tmp_path / "curves.png")
    assert numbers["best_known"] == best_known
    ((name, (run,)),) = numbers["runs"].items()
    assert name == "latent"
    for key in ("step", "seconds", "reward", "best_reward", "entropy"):
        assert run[key] == pytest.approx([record[key] for record in given], rel=1e-5)
    low, high = numbers["axis"]
    assert low < min(run["reward"][count // 20 :])
    assert high > max([*run["best_reward"], *([best_known] if best_known else [])])


def test_runs_seeds_and_paces_in_one_picture(tmp_path: Path) -> None:
    runs: dict[str, Any] = {
        "latent, SUMO": [records(50), records(40, 0.6), records(50, 0.4, 900)],
        "autoregressive": [records(50, 30.0), records(50, 31.0, 1100)],
        "independent": [records(30, 0.01, 700)],
    }
    plot(runs, tmp_path / "curves.png", 1200)
    numbers = picture(tmp_path / "curves.png")["runs"]
    assert [(name, [len(run["step"]) for run in seeds]) for name, seeds in numbers.items()] == [
        ("latent, SUMO", [50, 40, 50]), ("autoregressive", [50, 50]), ("independent", [30]),
    ]  # fmt: skip
    assert numbers["autoregressive"][1]["seconds"][-1] == 1550


def test_seeds_without_a_common_moment(tmp_path: Path) -> None:
    later = [record | {"seconds": record["seconds"] + 100} for record in records(3)]
    plot({"latent": [records(3), later]}, tmp_path / "curves.png")
    assert len(picture(tmp_path / "curves.png")["runs"]["latent"]) == 2


def test_large_whole_rewards_stay_exact(tmp_path: Path) -> None:
    given = [record | {"best_reward": 123_456_789_012} for record in records(2)]
    plot({"latent": [given]}, tmp_path / "curves.png", 123_456_789_013)
    numbers = picture(tmp_path / "curves.png")
    assert numbers["runs"]["latent"][0]["best_reward"] == [123_456_789_012] * 2
    assert numbers["best_known"] == 123_456_789_013


def test_what_is_far_away_or_missing(tmp_path: Path) -> None:
    given = records(40)
    plot({"latent": [given]}, tmp_path / "clean.png")
    given[0]["reward"], given[7]["entropy"] = -1e9, 1e12
    given[8]["reward"], given[9]["entropy"], given[10]["best_reward"] = None, math.nan, math.inf
    plot({"latent": [given]}, tmp_path / "heavy.png")
    clean, heavy = picture(tmp_path / "clean.png"), picture(tmp_path / "heavy.png")
    assert heavy["axis"] == pytest.approx(clean["axis"])
    (run,) = heavy["runs"]["latent"]
    assert run["reward"][8] is run["entropy"][9] is run["best_reward"][10] is None
    assert run["entropy"][7] == 1e12
    nothing = [record | dict.fromkeys(("reward", "best_reward", "entropy")) for record in given]
    plot({"latent": [nothing]}, tmp_path / "nothing.png")
    assert set(picture(tmp_path / "nothing.png")["runs"]["latent"][0]["reward"]) == {None}


def test_runs_that_will_not_do(tmp_path: Path) -> None:
    for runs, message in (
        ({"latent": [[]]}, "latent has no records"),
        ({"latent": [records(3), []]}, "latent has no records"),
        ({"gru": [[{"step": 1, "reward": 2.0}]]}, "gru lacks best_reward, entropy, seconds; each needs step"),
    ):
        with pytest.raises(ValueError, match=message):
            plot(runs, tmp_path / "curves.png")
    with pytest.raises(ValueError, match=r"\.png"):
        plot({"latent": [records(2)]}, tmp_path / "curves.txt")
    assert not list(tmp_path.iterdir())


def test_what_is_drawn() -> None:
    """The lines themselves, not only the numbers beside the picture: mean and best reward by step and by second, entropy."""
    found = records(30)
    figure, _ = plot_reward_curves({"one": [found]}, best_known=1234)
    by_step, by_second, entropy = figure.axes[:3]
    for axis, clock, names in ((by_step, "step", ("reward", "best_reward")), (by_second, "seconds", ("reward", "best_reward")),
                               (entropy, "step", ("entropy",))):  # fmt: skip
        drawn = [(line.get_xdata(), line.get_ydata()) for line in axis.get_lines()]
        for name in names:
            wanted = [[record[clock] for record in found], [record[name] for record in found]]
            assert any(len(x) == 30 and np.allclose(x, wanted[0]) and np.allclose(y, wanted[1]) for x, y in drawn), (clock, name)
