"""Table 1 at full length, as README shows it: from files of results, and what follows by both yardsticks."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from dohyo.lab.studies.table1_findings import Entry, Findings

sys.path.append(str(Path(__file__).parents[1] / "docs"))
blocks, full_length = importlib.import_module("blocks"), importlib.import_module("full_length")


def file_of(folder: Path, name: str, runs: dict[str, tuple[float, float | None]], ended: str = "3,500 epochs, the limit") -> None:
    """Results of rows with these means, by IWAE-5000 and by annealed weights, 0.1 between the replicas."""

    def around(mean: float) -> list[float]:
        return [mean - 0.01, mean, mean + 0.01]

    content: dict[str, Any] = {"runs": {}, "annealed": {"48_steps": {"replicas": {}}}}
    for row, (bound, annealed) in runs.items():
        replicas = [{"test_nll": nll, "epochs": 1200 if "stopped" in ended else 3500, "ended": ended} for nll in around(bound)]
        result = {"replicas": replicas, "test_terms": 5000}
        content["runs"][row.replace("-", "_")] = {"config": {"epochs": 3500}, "result": result}
        if annealed is not None:
            chains = [{"nll": nll, "sandwich": {"gap": 0.25}} for nll in around(annealed)]
            content["annealed"]["48_steps"]["replicas"][row] = chains
    (folder / f"{name}.json").write_text(json.dumps(content))


def test_the_table_says_what_was_not_run_or_stopped(tmp_path: Path) -> None:
    file_of(tmp_path, "mnist_cost_5", {"iwae": (85.4, 85.1), "sumo-variance": (85.8, None)})
    file_of(tmp_path, "omniglot_cost_15", {"iwae": (104.5, None)}, ended="stopped from outside")
    text = blocks.table(full_length.table(full_length.read(tmp_path)))
    assert "| IWAE | Luo et al. 2020 (the paper) | 85.28 | 84.89 | 84.50 | 104.96 | 104.53 | 103.99 |" in text
    assert (
        "| IWAE | ours, IWAE-5000 | 85.40 ± 0.01 | not run | not run | not run | 104.50 ± 0.01 (1,200 epochs) | not run |" in text
    )
    assert "| IWAE | ours, annealed weights | 85.10 ± 0.01 | not run | not run | not run | not run | not run |" in text
    assert "| SUMO, the paper's encoder | ours, annealed weights | not run |" in text
    assert "1,200 to 3,500 epochs" in text
    assert "0.2 to 0.2 nats apart" in text
    assert "At no cost were run: ELBO; IWAE, DReG encoder; JVI; SUMO, DReG encoder;" in text


def test_conclusions_by_both_yardsticks(tmp_path: Path) -> None:
    file_of(tmp_path, "mnist_cost_5", {"iwae": (85.4, 85.0), "sumo-variance": (85.3, 85.2), "iwae-dreg": (84.5, None)})
    found = {one.claim: one.holds for one in full_length.conclusions(full_length.read(tmp_path))}
    lower = "SUMO's models have a lower test NLL than IWAE's at the same cost"
    assert (found[lower], found[f"{lower}, by annealed weights"]) == (True, False)
    assert found["IWAE with 5000 terms puts the models in the order of annealed weights"] is False
    assert found["Our best models have a lower test NLL than the best published"] is True
    assert "Our test NLL are the paper's, to 0.3 nats, by annealed weights" not in found
    file_of(tmp_path, "mnist_cost_5", {"iwae": (85.4, None)})
    found = {one.claim: one.holds for one in full_length.conclusions(full_length.read(tmp_path))}
    assert found["Our best models have a lower test NLL than the best published"] is False
    file_of(tmp_path, "mnist_cost_5", {"iwae": (84.5, None)}, ended="stopped from outside")
    claims = [one.claim for one in full_length.conclusions(full_length.read(tmp_path))]
    assert claims == ["Our test NLL are the paper's, to 0.3 nats"]  # it may yet fall: nothing is said of the best


def test_two_yardsticks() -> None:
    def findings(*rows: tuple[str, list[float]]) -> Findings:
        options = {"data": "mnist", "cost": 5, "epochs": 3500}
        return Findings([Entry({**options, "estimator": row}, {"test_nll": nll, "epochs": [3500]}) for row, nll in rows])

    first = findings(("iwae", [2.0, 2.1]), ("sumo", [1.0, 1.1]), ("elbo", [3.0, 3.1]))
    assert first.ordered_as(findings(("iwae", [1.5, 1.6]))) is None
    same = first.ordered_as(findings(("iwae", [1.5, 1.6]), ("sumo", [0.5, 0.6])))
    assert same is not None
    assert (same.holds, "MNIST at 5: SUMO, DReG encoder < IWAE" in same.found) == (True, True)
    wide = first.ordered_as(findings(("iwae", [1.5, 1.6]), ("sumo", [0.5, 2.6])))
    assert wide is not None
    assert wide.holds is None
    other = first.ordered_as(findings(("iwae", [0.5, 0.6]), ("sumo", [1.5, 1.6])))
    assert other is not None
    assert (other.holds, "SUMO, DReG encoder < IWAE against IWAE < SUMO, DReG encoder" in other.found) == (False, True)
