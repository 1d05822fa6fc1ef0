"""The study of training through chains: it runs, says what the cells say, and refuses what makes no sense."""

from pathlib import Path
from typing import Any

import pytest

from dohyo.annealing import Annealed
from dohyo.errors import DohyoError
from dohyo.lab.folder import read_config, read_json, read_records
from dohyo.lab.studies import STUDIES, reproduce
from dohyo.lab.studies.annealing import Annealing

CHANGES: dict[str, Any] = {"device": "cpu"}


def cell(annealed: list[float], iwae: list[float]) -> dict[str, Any]:
    of_images = [sum(annealed) / 2 + offset for offset in (-1.0, 1.0)]
    return {
        "epochs": [[9, 9]] * 2, "seconds": [[1.0, 1.0], [2.0, 2.0]], "test_nll": [iwae] * 2,
        "annealed_nll": [[99.0, 98.0], annealed],
        "last_annealed_nll_of_images": of_images,
    }  # fmt: skip


def test_the_smallest_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune = Annealed.tune
    monkeypatch.setattr(
        Annealed, "tune", lambda *given, **options: tune(*given, **options | {"iterations": 3})
    )  # most of its time
    study = STUDIES["annealing"].at("smoke", rows=("iwae-5", "iwae-5-then-chains-2x8"), times=(0.1,), **CHANGES)
    report = reproduce(study, tmp_path)
    labels = ["IWAE-5", "IWAE-5, then 2 chains of 8"]
    assert len(report["conclusions"]) == 2
    assert [row[0] for row in report["tables"][0]["rows"]] == labels
    assert [row[0] for row in report["tables"][1]["rows"]] == labels[1:]
    numbers = read_json(tmp_path / "annealing.json", "")
    assert set(numbers["digits"]) == set(labels)
    assert (tmp_path / "annealing.png").exists()
    first, second = (
        tmp_path / "work" / "digits_iwae-5-then-chains-2x8" / "0.1" / "seed_1" / half for half in ("first", "second")
    )
    assert (read_config(first)["anneal"], read_config(second)["anneal"]) == (0, 8)
    assert read_config(second)["init_from"] == str(first)
    done = report["cells"]["digits_iwae-5-then-chains-2x8"]["result"]
    halves = [read_json(half / "result.json", "") for half in (first, second)]
    assert done["seconds"][0][1] == sum(half["seconds"] for half in halves)
    assert read_config(second)["max_seconds"] == max(0.1 - halves[0]["seconds"], 1e-7)  # what the first half has left
    assert [read_config(half)["schedule"] for half in (first, second)] == ["plateau", "cosine"]
    assert read_records(second)[0]["learning_rate"] == 1e-3


def test_what_is_concluded() -> None:
    study = Annealing.at("smoke", times=(1, 2), **CHANGES)
    cells = {"digits_iwae-5": cell([90.0, 91.0], [90.5, 90.6]), "digits_chains-2x8": cell([88.0, 89.0], [92.5, 92.6]),
             "digits_iwae-5-then-chains-2x8": cell([90.2, 90.9], [93.5, 93.6])}  # fmt: skip
    (scratch, switched, order), (_, differences) = study.summarise(cells)
    assert (scratch.holds, switched.holds, order.holds) == (True, None, False)
    assert "-2.00" in scratch.found
    assert "+0.05" in switched.found
    assert differences.rows == [
        ["2 chains of 8", -2.0, 0.0, 0.0, 2.0], ["IWAE-5, then 2 chains of 8", 0.05, 0.15, 0.0, 3.0],
    ]  # fmt: skip
    cells |= {"digits_chains-2x8": cell([90.1, 91.3], [92.5, 92.6]), "digits_iwae-5": cell([88.0, 91.0], [90.5, 90.6])}
    assert [conclusion.holds for conclusion in study.summarise(cells)[0]] == [None, None, True]
    assert study.summarise({"digits_iwae-5": cells["digits_iwae-5"]})[0] == []


def test_what_is_refused() -> None:
    with pytest.raises(DohyoError, match=r"times are \(2, 1\); give positive numbers of seconds that rise"):
        Annealing.at("smoke", times=(2, 1))
    with pytest.raises(DohyoError, match="weights is 0"):
        Annealing.at("smoke", weights=0)
