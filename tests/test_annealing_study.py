"""The study of training through chains: it runs, says what the cells say, and refuses what makes no sense."""

from pathlib import Path
from typing import Any

import pytest

from dohyo.errors import DohyoError
from dohyo.lab.folder import read_json
from dohyo.lab.studies import STUDIES, reproduce
from dohyo.lab.studies.annealing import Annealing

CHANGES: dict[str, Any] = {"device": "cpu"}


def cell(annealed: list[float], iwae: list[float]) -> dict[str, Any]:
    return {"epochs": [[9, 9]] * 2, "test_nll": [iwae, iwae], "annealed_nll": [[99.0, 98.0], annealed]}


def test_the_smallest_study(tmp_path: Path) -> None:
    study = STUDIES["annealing"].at("smoke", times=(0.01,), **CHANGES)
    report = reproduce(study, tmp_path)
    assert len(report["conclusions"]) == 2
    assert [row[0] for row in report["tables"][0]["rows"]] == ["IWAE-5", "2 chains of 8"]
    numbers = read_json(tmp_path / "annealing.json", "")
    assert set(numbers["digits"]) == {"IWAE-5", "2 chains of 8"}
    assert (tmp_path / "annealing.png").exists()


def test_what_is_concluded() -> None:
    study = Annealing.at("smoke", times=(1, 2), **CHANGES)
    better, order = study.summarise({
        "digits_iwae-5": cell([90.0, 90.1], [90.5, 90.6]), "digits_chains-2x8": cell([88.0, 88.1], [92.5, 92.6]),
    })[0]  # fmt: skip
    assert (better.holds, order.holds) == (True, False)
    assert "-2.00" in better.found
    better, order = study.summarise({
        "digits_iwae-5": cell([88.0, 88.2], [90.5, 90.6]), "digits_chains-2x8": cell([88.1, 88.3], [92.5, 92.6]),
    })[0]  # fmt: skip
    assert (better.holds, order.holds) == (None, True)
    assert study.summarise({"digits_iwae-5": cell([1.0, 2.0], [1.0, 2.0])})[0] == []


def test_what_is_refused() -> None:
    with pytest.raises(DohyoError, match=r"times are \(2, 1\); give positive numbers of seconds that rise"):
        Annealing.at("smoke", times=(2, 1))
    with pytest.raises(DohyoError, match="weights is 0"):
        Annealing.at("smoke", weights=0)
