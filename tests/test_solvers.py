"""Reference solvers: what they return is checked by the problem itself, and their time by the clock."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dohyo.lab.rewards import Custom, Quadratic, random_qpbo

from benchmarks import solvers
from benchmarks.solvers import SOLVERS, Solution, polish

ROOT = Path(__file__).parent.parent
BQP = "1\n3 4\n1 1 3\n1 2 -4\n2 3 7\n3 3 -2\n"  # the most is 12 at (0, 1, 1)


def needs_samplers(name: str) -> None:
    if name != "descent":
        pytest.importorskip("dwave.samplers", reason="needs dwave-samplers: pip install 'dohyo[solvers]'")


@pytest.mark.parametrize("name", SOLVERS)
def test_they_find_the_optimum(name: str) -> None:
    needs_samplers(name)
    weights = torch.randint(-9, 10, (12, 12), generator=torch.Generator().manual_seed(0))
    weights[3] = weights[:, 3] = 0  # a variable that nothing depends on
    for problem in (random_qpbo(12, seed=1), Quadratic(weights), Quadratic([[-1]])):
        everything = torch.tensor(list(itertools.product([0, 1], repeat=problem.variables)))
        found = SOLVERS[name](problem, 0.05, 0)
        assert isinstance(found, Solution)
        assert len(found.best_x) == problem.variables
        assert found.best_reward == problem(torch.tensor([found.best_x])).item()
        assert found.best_reward == pytest.approx(float(problem(everything).max()), abs=1e-12)
        assert 0 < found.seconds_to_best <= found.seconds
        assert found.seconds >= 0.05
        assert found.rounds >= 1


@pytest.mark.parametrize("weights", ["whole", "huge", "real"])
def test_polish_climbs_the_steepest_flip(weights: str) -> None:
    torch.manual_seed(0)
    most = 2**55 if weights == "huge" else 50
    problem = Quadratic(torch.rand(9, 9) - 0.5 if weights == "real" else torch.randint(-most, most, (9, 9)))
    x = torch.tensor(list(itertools.product([0, 1], repeat=9)))
    before = x.clone()
    polished = polish(problem, x)
    assert torch.equal(x, before)
    neighbours = torch.arange(512)[:, None] ^ 2 ** torch.arange(8, -1, -1)  # the rows of x that one flip leads to
    rewards = problem(x)
    for row in range(0, 512, 37):
        place = row
        while float((rewards[neighbours[place]] - rewards[place]).max()) > problem.tolerance:
            place = int(neighbours[place, (rewards[neighbours[place]]).argmax()])
        assert torch.equal(x[place], polished[row])


@pytest.mark.parametrize("name", SOLVERS)
def test_the_given_time_is_kept(name: str) -> None:
    needs_samplers(name)
    found = SOLVERS[name](random_qpbo(60, seed=0), 0.5, 0)
    assert 0.5 <= found.seconds < 2
    assert found.rounds > 3


@pytest.mark.parametrize("name", SOLVERS)
def test_errors(name: str) -> None:
    needs_samplers(name)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="seconds is"):
            SOLVERS[name](random_qpbo(3, seed=0), seconds, 0)
    with pytest.raises(ValueError, match="needs a quadratic problem, this is Custom"):
        SOLVERS[name](Custom(lambda x: x.sum(1), 3), 1.0, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["anneal", "tabu"])
def test_without_dwave_samplers_the_error_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dwave.samplers", None)
    with pytest.raises(ValueError, match=r"pip install 'dohyo\[solvers\]'"):
        SOLVERS[name](random_qpbo(3, seed=0), 1.0, 0)
    assert "dwave" not in vars(solvers)


def test_the_comparison(tmp_path: Path) -> None:
    needs_samplers("anneal")
    (tmp_path / "bqp.txt").write_text(BQP)
    result: dict[str, Any] = {"policy": "latent", "estimator": "sumo", "problem": "bqp.txt", "variables": 3, "entropy": 0.1}
    result |= {"best_reward": 5, "best_x": [0, 0, 1], "seconds_to_best": 1.5, "seconds": 2.0}
    (tmp_path / "result.json").write_text(json.dumps(result | {"best_reward": -2}))
    (tmp_path / "wrong.json").write_text(json.dumps(result))
    command = [sys.executable, "-m", "benchmarks.qpbo_solvers", "--instance", str(tmp_path / "bqp.txt"), "--seconds", "0.1"]
    done = subprocess.run(
        [*command, "--result", str(tmp_path / "result.json"), "--out", str(tmp_path / "found.json")],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["solver"] for row in found["rows"]] == ["policy latent", "simulated annealing", "tabu search", "1-flip descent"]
    assert [row["best_reward"] for row in found["rows"]] == [-2, 12, 12, 12]
    assert found["config"]["best_known"] is None
    assert "simulated annealing" in done.stdout
    wrong = subprocess.run(
        [*command, "--result", str(tmp_path / "wrong.json"), "--out", str(tmp_path / "none.json")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert wrong.returncode == 2
    assert "is not that of this problem" in wrong.stderr
    assert not (tmp_path / "none.json").exists()
