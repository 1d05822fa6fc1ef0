"""`dohyo compare`, and the differences on the report: real runs, real files, differences by hand."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import dohyo
from dohyo.lab.cli import main
from dohyo.lab.evaluations import load_evaluation, save_evaluation

from problems import LinearGaussian

ESTIMATOR = dohyo.MultilevelRR.at_cost(15)


@pytest.fixture(scope="session")  # a worker may come back to this file
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs on the digits, one of them longer, and one on other data."""
    folder = tmp_path_factory.mktemp("runs")
    np.save(folder / "other.npy", np.random.default_rng(0).integers(0, 2, (60, 64)).astype(np.float32))
    small = ["--hidden", "8", "--latent", "2", "--estimator", "iwae", "--cost", "2", "--test-terms", "20", "--json"]
    for name, data, epochs in (("a", "digits", 1), ("b", "digits", 3), ("c", str(folder / "other.npy"), 1)):
        given = ["train", "--data", data, "--epochs", str(epochs), *small, "--out", str(folder / name)]
        assert main(given) == 0
    return folder


def compared(*arguments: object, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    capsys.readouterr()
    assert main(["compare", *map(str, arguments), "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_runs_are_compared_by_their_tests_until_both_are_evaluated(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = runs / "a", runs / "b"
    (difference,) = compared(a, b, capsys=capsys)["differences"]  # type: ignore[misc]
    values = [np.load(run / "test.npz")["log_px"] for run in (a, b)]
    assert difference["difference"] == pytest.approx((values[1] - values[0]).mean())
    assert difference["stderr"] == pytest.approx((values[1] - values[0]).std(ddof=1) / math.sqrt(len(values[0])))
    assert difference["better"] == str(b)
    assert any("both are lower bounds:" in line for line in difference["warnings"])
    assert main(["evaluate", str(a), "--cost", "8", "--json"]) == 0
    assert compared(a, b, capsys=capsys)["evaluations"][0]["kind"] == "lower bound"  # type: ignore[index]  # like with like
    assert main(["evaluate", str(b), "--cost", "8", "--json"]) == 0
    found = compared(a, b, capsys=capsys)
    assert [one["kind"] for one in found["evaluations"]] == ["unbiased"] * 2  # type: ignore[attr-defined]
    assert main(["compare", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert "better" in out
    assert "minus the first" in out
    saved = load_evaluation(a / "evaluation.npz")
    save_evaluation(a / "evaluation.npz", saved.evaluation, saved.estimator, best_epoch=-1)  # of parameters that are gone
    assert compared(a, b, capsys=capsys)["evaluations"][0]["kind"] == "lower bound"  # type: ignore[index]
    save_evaluation(a / "evaluation.npz", saved.evaluation, saved.estimator, **saved.about)
    page = runs / "page.html"
    assert main(["report", str(a), str(b), str(runs / "c"), "--out", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("Differences of log p(x) on the same 300 data") == 2  # a caption and a label
    assert "minus the best" in text
    assert any(word in text for word in ("worse", "cannot tell"))


def test_different_data_are_refused_in_one_line(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    (runs / "not.npz").write_bytes(b"no")
    np.savez(runs / "plain.npz", log_px=np.zeros(3))
    cases: list[tuple[list[Path], str]] = [
        ([runs / "a", runs / "c"], "different data"),
        ([runs / "a"], "at least two"),
        ([runs / "a", runs / "absent"], "cannot be read"),
        ([runs / "a", runs], "holds no run"),
        ([runs / "a", runs / "not.npz"], "no saved evaluation"),
        ([runs / "a", runs / "plain.npz"], "no saved evaluation"),
    ]
    for places, message in cases:
        assert main(["compare", *map(str, places)]) == 2
        out, error = capsys.readouterr()
        assert out == ""
        assert message in error
        assert "pickle" not in error  # NumPy's advice on files of other kinds
        assert error.count("\n") == 1


def test_files_of_evaluations_from_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Saved and read they are the same, and the exact difference lies within four standard errors of noise."""
    right, shifted = LinearGaussian(dimension=3), LinearGaussian(dimension=3)
    shifted.theta = shifted.theta + 0.4
    torch.manual_seed(0)
    x = right.sample(300)
    found = [dohyo.evaluate(model, x, ESTIMATOR, replicates=4) for model in (right, shifted)]
    for name, one in zip("ab", found, strict=True):
        save_evaluation(tmp_path / f"{name}.npz", one, ESTIMATOR, model=name)
    again = load_evaluation(tmp_path / "a.npz")
    assert again.about == {"model": "a"}
    assert again.evaluation.to_dict() == found[0].to_dict()
    assert torch.equal(again.evaluation.per_datum, found[0].per_datum)
    (difference,) = compared(tmp_path / "a.npz", tmp_path / "b.npz", capsys=capsys)["differences"]  # type: ignore[misc]
    exact = float((shifted.exact(x) - right.exact(x)).mean())
    noise = math.hypot(*(one.noise_stderr or 0.0 for one in found))
    assert abs(difference["difference"] - exact) < 4 * noise
    assert difference["better"] == str(tmp_path / "a.npz")
    low, high = difference["interval"]
    assert low < exact < high
