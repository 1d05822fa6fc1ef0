"""`dohyo estimate` as a user runs it: real files, a real process."""

import json
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import dohyo
from dohyo.lab.bank import estimate_bank, load_log_weights, log_mean
from dohyo.lab.cli import main
from real import command, finished


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return finished(command(*arguments), folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    log_w = 1.5 * np.random.default_rng(0).standard_normal((300, 400)) - 90
    np.save(folder / "weights.npy", log_w.astype(np.float32))
    np.savez(folder / "weights.npz", log_w=log_w, other=log_w[:3])
    np.savez(folder / "single.npz", anything=log_w)
    np.savetxt(folder / "weights.csv", log_w[:30, :50], delimiter=",")
    with_nan = log_w.copy()
    with_nan[2, 5] = math.nan
    np.save(folder / "nan.npy", with_nan)
    np.save(folder / "cube.npy", np.zeros((2, 3, 4)))
    np.save(folder / "empty.npy", np.zeros((0, 4)))
    np.save(folder / "words.npy", np.array(["a", "b"]))
    np.save(folder / "pickled.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    whole = (folder / "weights.npy").read_bytes()
    (folder / "truncated.npy").write_bytes(whole[: len(whole) // 2])
    (folder / "truncated.npz").write_bytes((folder / "weights.npz").read_bytes()[:5000])
    (folder / "text.csv").write_text("1,2,3\n4,five,6\n")
    (folder / "ragged.csv").write_text("1,2,3\n4,5\n")
    (folder / "binary.csv").write_bytes(b"\xff\xfe\x00\x01")
    (folder / "weights.txt").write_text("1 2 3\n")
    (folder / "broken.yaml").write_text("name: sumo\nm: -3\n")
    (folder / "wide.json").write_text('{"name": "sumo", "m": 999, "law": {"name": "finite", "pmf": [1.0]}}')
    (folder / "config.yaml").write_text("estimator: iwae\ncost: 20\n")
    (folder / "badkey.yaml").write_text("estimater: iwae\n")
    return folder


def test_table_plot_and_files(folder: Path, tmp_path: Path) -> None:
    done = run("estimate", str(folder / "weights.npy"), "--estimator", "symmetric-sumo", "--cost", "15",
               "--plot", "a/figure.png", "--out", "a/values.csv", folder=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "unbiased for IWAE_400" in done.stdout
    assert "k-hat" in done.stdout
    assert (tmp_path / "a/figure.png").read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((tmp_path / "a/figure.json").read_text())
    assert {point["estimator"] for point in numbers["at_cost"]} == set(dohyo.estimators.ESTIMATORS)
    assert numbers["iwae"]["k"][-1] == 400
    assert done.stdout.index("log-mean of all 400") < done.stdout.index("symmetric-sumo")
    assert numbers["iwae"]["mean"] == pytest.approx(sorted(numbers["iwae"]["mean"]), abs=0.05)
    assert len((tmp_path / "a/values.csv").read_text().splitlines()) == 301
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["figure.json", "figure.png", "values.csv"]


def test_json_is_one_object_and_nothing_else(folder: Path) -> None:
    done = run("estimate", "weights.npz", "--key", "log_w", "--estimator", "multilevel-rr", "--cost", "10",
               "--replicates", "5", "--json", folder=folder)  # fmt: skip
    report = json.loads(done.stdout)
    assert done.stderr == ""
    assert report["kind"].startswith("unbiased for IWAE_")
    assert dohyo.from_dict(report["estimator"]).target_terms <= 400 // 5
    exact = -90 + 1.5**2 / 2
    assert abs(report["mean"] - exact) < 4 * report["noise_stderr"] + 0.05  # IWAE_n is a little below


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.npy"], "no such file"),
        (["weights.txt"], "ending must be"),
        (["truncated.npy"], "truncated"),
        (["truncated.npz"], "truncated"),
        (["pickled.npy"], "cannot be read"),
        (["text.csv"], "line 2, column 2: the cell is 'five', not a number; leave headers and names out"),
        (["ragged.csv"], "line 2 has 2 cells"),
        (["binary.csv"], "is not text in UTF-8"),
        (["nan.npy"], "row 3, column 6"),
        (["cube.npy"], "(2, 3, 4)"),
        (["empty.npy"], "not empty"),
        (["words.npy"], "real numbers"),
        (["weights.npz"], "choose one with --key"),
        (["weights.npz", "--key", "logw"], "did you mean 'log_w'"),
        (["weights.npy", "--estimator", "simmetric-sumo"], "did you mean 'symmetric-sumo'"),
        (["weights.npy", "--estimator", "broken.yaml"], "m is -3"),
        (["weights.npy", "--estimator", "absent.yaml"], "absent.yaml"),
        (["weights.npy", "--cost", "500"], "lower the cost"),
        (["weights.npy", "--cost", "0"], "cost is 0"),
        (["weights.npy", "--cost", "many"], "cost"),
        (["weights.npy", "--replicates", "0"], "replicates is 0"),
        (["weights.npy", "--replicates", "50", "--cost", "15"], "lower the cost"),
        (["weights.npy", "--confidence", "95"], "--confidence is 95"),
        (["weights.npy", "--colour", "red"], "--colour"),
        (["weights.npy", "--plot", "figure"], "ending of a picture"),
        (["weights.npy", "--estimator", "wide.json"], "may need 1000 log-weights, more than the 400"),
        (["weights.npy", "--config", "badkey.yaml"], "estimater"),
        (["weights.npy", "--out", "/proc/no/such/place.csv"], "/proc/no"),
        ([], "file"),
    ],
)
def test_bad_input_gets_one_line(
    folder: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["estimate", *arguments]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("dohyo: error: ")
    assert error.count("\n") == 1
    assert message in error


def test_bad_input_in_a_real_process(folder: Path) -> None:
    for arguments in (["truncated.npy"], ["weights.npy", "--estimator", "zumo"]):
        done = run("estimate", *arguments, folder=folder)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("dohyo: error: ")
        assert done.stderr.count("\n") == 1


def test_help_version_and_config(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    for arguments, expected in ((["estimate", "--help"], "examples:"), (["--version"], dohyo.__version__)):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
        assert expected in capsys.readouterr().out
    assert main(["estimate", "weights.csv", "--config", "config.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["estimator"] == {"name": "iwae", "k": 20}
    assert main([]) == 2
    assert "estimate" in capsys.readouterr().err


def test_a_tuned_estimator_from_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    tuned = dohyo.tune(load_log_weights(Path("weights.npy"))[:50], 10, max_terms=64)
    Path("tuned.json").write_text(json.dumps(dohyo.to_dict(tuned)))
    assert main(["estimate", "weights.npy", "--estimator", "tuned.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "unbiased for IWAE_64"


def test_no_weight_is_used_twice() -> None:
    """Rows whose weights are powers of two: the ELBO of a block names the weights it used."""
    log_w = (2.0 ** torch.arange(12)).expand(4, 12).double()
    result = estimate_bank(log_w, dohyo.ELBO(3), replicates=4)
    torch.testing.assert_close(result.per_datum * 12, log_w.sum(-1))
    with pytest.raises(ValueError, match="more than the 3"):
        estimate_bank(log_w, dohyo.ELBO(4), replicates=4)
    with pytest.raises(ValueError, match="cap the law"):
        estimate_bank(log_w, dohyo.SUMO(1))


def test_a_capped_sumo_is_warned_of() -> None:
    """Its sample variance misses the rare depths that carry the variance: 0.2 is printed where 100 is true."""
    log_w = 2 * torch.randn(200, 1000, generator=torch.Generator().manual_seed(0)).double()
    warnings = estimate_bank(log_w, dohyo.SUMO.at_cost(15, 250), replicates=4).warnings
    assert any("far too small" in warning for warning in warnings)
    for estimator in (dohyo.SymmetricSUMO.at_cost(15, 250), dohyo.MultilevelRR.at_cost(15, 250), dohyo.IWAE(15)):
        assert not any("far too small" in w for w in estimate_bank(log_w, estimator, replicates=4).warnings)


def test_a_single_row_gets_its_error_bar_from_all_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The log evidence of a model: log-mean and delta method by hand, and an unbiased estimate with an error bar of its own."""
    w = np.exp(0.3 * np.random.default_rng(1).standard_normal(512))
    np.save(tmp_path / "row.npy", np.log(w) - 1.27)
    assert load_log_weights(tmp_path / "row.npy").shape == (1, 512)
    assert main(["estimate", str(tmp_path / "row.npy"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    whole = report["log_mean"]
    assert whole["mean"] == pytest.approx(math.log(w.mean()) - 1.27)
    assert whole["stderr"] == whole["noise_stderr"] == pytest.approx(w.std(ddof=1) / w.mean() / 512**0.5)
    left_out = np.log((w.sum() - w) / 511).mean()
    assert whole["bias"] == pytest.approx(511 * (left_out - math.log(w.mean())), rel=1e-6)
    assert whole["bias"] == pytest.approx(-(whole["stderr"] ** 2) / 2, rel=0.1)
    assert (whole["cost"], whole["warnings"]) == (512, [])
    assert whole["stderr"] < report["stderr"] < 0.1
    assert report["replicates"] == 8
    assert main(["estimate", str(tmp_path / "row.npy")]) == 0
    out = capsys.readouterr().out
    assert f"{whole['mean']:.4f} ± {whole['stderr']:.4f}" in out
    assert "1 datum, 512 log-weights" in out
    np.savetxt(tmp_path / "column.csv", np.log(w))  # the same numbers one to a line are 512 data
    assert main(["estimate", str(tmp_path / "column.csv")]) == 0
    assert "warning: there is one log-weight for each of 512 data; if all of them belong to one datum" in capsys.readouterr().out


def test_the_log_mean_covers_the_truth_as_often_as_it_says() -> None:
    log_w = torch.randn(8000, 40, generator=torch.Generator().manual_seed(0)).double() * 0.7 - 0.7**2 / 2
    found, bias = log_mean(log_w)
    assert found.noise_stderr is not None
    assert found.noise_stderr == pytest.approx(found.stderr, rel=0.05)  # all rows have log p(x) = 0
    assert found.mean < -4 * found.noise_stderr  # the power twin: the bias is there, and is known
    assert abs(found.mean - float(bias.mean())) < 4 * found.noise_stderr


@pytest.mark.parametrize(("rows", "mean"), [([[0.0, -math.inf]], -math.log(2)), ([[-math.inf] * 3], -math.inf), ([[1.5]], 1.5)])
def test_the_log_mean_of_few_and_of_zero_weights(rows: list[list[float]], mean: float) -> None:
    found, _ = log_mean(torch.tensor(rows, dtype=torch.float64))
    assert found.mean == pytest.approx(mean)


def test_no_warning_recommends_the_estimator_that_ran() -> None:
    log_w = torch.randn(1, 512, generator=torch.Generator().manual_seed(0)).double()
    for cls in (dohyo.SUMO, dohyo.SymmetricSUMO, dohyo.MultilevelRR, dohyo.MultilevelSS):
        for replicates in (1, 2, 8):
            estimator = cls.at_cost(15, 512 // replicates)
            advice = [w.split(";")[-1] for w in estimate_bank(log_w, estimator, replicates).warnings]
            assert not any(estimator.name in one.replace(",", "").split() for one in advice)
