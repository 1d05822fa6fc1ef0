"""The study `table1`: its t-test, its claims, what is published, and the command killed, started again and added to."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dohyo import IWAE, Annealed, evaluate
from dohyo.lab.cli import main
from dohyo.lab.data import load
from dohyo.lab.experiments.density import DensityRun
from dohyo.lab.folder import read_records
from dohyo.lab.plots.nll import plot_table
from dohyo.lab.studies.study import picked, reproduce
from dohyo.lab.studies.table1 import Table1
from dohyo.lab.studies.table1_findings import DATA, Entry, Findings
from dohyo.lab.studies.table1_rows import COSTS, PUBLISHED, ROWS, SOURCES
from dohyo.lab.studies.verdicts import Contrast, all_below
from real import command, finished, killed_when, picture

SAMPLE = st.lists(st.integers(-1000, 1000).map(lambda n: n / 8), min_size=2, max_size=5).filter(lambda s: len(set(s)) > 1)


@given(SAMPLE, SAMPLE)
def test_the_t_test_is_welchs(a: list[float], b: list[float]) -> None:
    found, wanted = Contrast.of((1, a), (-1, b)), stats.ttest_ind(a, b, equal_var=False)
    assert found.p == pytest.approx(wanted.pvalue, rel=1e-9)
    low, high = wanted.confidence_interval(0.95)
    assert found.half() == pytest.approx((high - low) / 2, rel=1e-9)
    assert found.half(5) == pytest.approx(float(stats.t.ppf(1 - 0.025 / 5, wanted.df)) * found.stderr, rel=1e-9)


def test_one_sample_and_no_spread() -> None:
    values = [1.0, 2.0, 4.0]
    assert Contrast.of((1, values)).p == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue)
    assert Contrast.of((1, [2.0, 2.0]), (-1, [1.0, 1.0])) == Contrast(1.0, 0.0, float("inf"))
    assert (Contrast(1.0, 0.0, 1.0).p, Contrast(0.0, 0.0, 1.0).p, Contrast(1.0, 0.0, 1.0).half()) == (0.0, 1.0, 0.0)


def test_a_claim_about_many_differences() -> None:
    below, above, unknown = Contrast(-1.0, 0.01, 3.0), Contrast(1.0, 0.01, 3.0), Contrast(-0.1, 1.0, 3.0)
    assert [all_below(c) for c in ([below, below], [below, unknown], [below, unknown, above], [])] == [True, None, False, None]
    once = Contrast(-1.0, 1 / 3.3, 3.0)  # p = 0.046: enough alone, not as one of three
    assert (all_below([once]), all_below([once] * 3)) == (True, None)


def test_what_is_published_is_whole() -> None:
    assert len(PUBLISHED) == 11
    assert {published.source for published in PUBLISHED} == set(SOURCES)
    numbers = {data: sum(len(published.at(data)) for published in PUBLISHED) for data in DATA}
    assert numbers == {"digits": 0, "mnist": 24, "mnist-static": 0, "omniglot": 22}
    ours = [published for published in PUBLISHED if published.in_paper]
    assert [published.row for published in ours] == ["elbo", "iwae", "jvi", "sumo-variance"]
    assert all(sd is not None for published in ours for data in ("mnist", "omniglot") for _, sd in published.at(data).values())
    assert all(published.row in ("", *ROWS) for published in PUBLISHED)
    sumo = ours[-1]
    assert all(sumo.at(d)[k][0] < p.at(d)[k][0] for p in ours[:-1] for d in ("mnist", "omniglot") for k in p.at(d))


def test_one_cell_is_picked_and_sumo_is_trained_both_ways() -> None:
    study = Table1.at("paper")
    assert len(study.cells()) == 2 * 3 * len(ROWS)
    assert picked(study, {"data": ["mnist"], "cost": ["5"], "estimator": ["sumo"]}) == ["mnist_005_sumo"]
    cells = study.cells()
    assert (cells["mnist_050_iwae"]["encoder"], cells["mnist_050_sumo-variance"]["encoder"]) == ("same", "variance")
    assert cells["mnist_050_sumo"]["max_terms"] is None
    assert cells["mnist_050_multilevel-rr"]["max_terms"] == 1024
    assert all(cell["epochs"] >= 2000 and cell["test_terms"] == 5000 and cell["replicas"] == 3 for cell in cells.values())
    assert "recipe" not in cells["mnist_050_sumo"]  # cells that are kept were made with these very options
    rows = ("chains", "chains-early", "chains-unbiased", "sumo-ours")
    chains, early, unbiased, ours = (study.run_of("", cells[f"mnist_015_{row}"], Path("none")).config for row in rows)
    assert (early.estimator, early.cost, early.anneal, early.anneal_from, early.epochs) == ("iwae", 2, 8, 0.25, 3500)
    assert (early.recipe, early.encoder, early.learning_rate) == ("ours", "dreg", ours.learning_rate)
    assert (unbiased.estimator, unbiased.max_terms, unbiased.cost, unbiased.anneal) == ("multilevel-rr", 64, 2, 8)
    assert (chains.estimator, chains.cost, chains.anneal, chains.schedule, chains.epochs) == ("iwae", 2, 8, "cosine", 875)
    assert (ours.estimator, ours.cost, ours.encoder, ours.recipe) == ("sumo", 15, "dreg", "ours")
    assert len(Table1.at("small").cells()) == 3 * 8 + 2


def entry(data: str, cost: int, row: str, nll: float, epochs: int = 20, most: int = 20) -> Entry:
    result: dict[str, Any] = {
        "test_nll": [nll - 0.01, nll, nll + 0.01],
        "epochs": [epochs] * 3,
        "expected_cost": float(cost),
        "clipped_decoder": [0.25, 0.25, 0.25],
        "test_terms": 5000,
    }
    return Entry({"data": data, "cost": cost, "estimator": row, "epochs": most}, result)


def holds(entries: list[Entry]) -> dict[str, bool | None]:
    return {conclusion.claim: conclusion.holds for conclusion in Findings(entries).conclusions()}


def test_claims_follow_the_numbers() -> None:
    paper = [
        entry(data, cost, p.row, nll, 2500, 3500)
        for p in PUBLISHED if p.in_paper
        for data in ("mnist", "omniglot")
        for cost, (nll, _) in p.at(data).items()
    ]  # fmt: skip
    found = holds(paper)
    best = found.pop("Our best models have a lower test NLL than the best published")
    assert list(found.values()) == [True, True, True, True]  # the paper's own numbers bear out its claims
    assert best is False  # others have lower ones
    assert "Our test NLL are the paper's, to 0.3 nats" in found
    first = "SUMO's models have a lower test NLL than IWAE's at the same cost"
    assert holds([entry("digits", 5, "iwae", 24.0), entry("digits", 5, "sumo-variance", 24.0)]) == {first: None}
    assert holds([entry("digits", 5, "iwae", 24.0), entry("digits", 5, "sumo-variance", 24.1)]) == {first: False}
    short = holds([entry("mnist", 5, "iwae", 130.0)])
    assert short == {"Our test NLL are the paper's, to 0.3 nats": None}
    assert list(holds([entry("mnist", 5, "iwae", 130.0, 3500, 3500)]).values()) == [False, False]
    (conclusion,) = Findings([entry("digits", 5, "iwae", 24.0), entry("digits", 5, "sumo-variance", 24.1)]).conclusions()
    assert conclusion.found.startswith("in short runs (epochs: digits 20): difference in nats from IWAE")
    assert "digits at 5: +0.10 ± 0.02" in conclusion.found
    later = [entry("digits", 5, row, nll) for row, nll in {"sumo": 24.0, "symmetric-sumo": 23.8, "multilevel-rr": 24.2}.items()]
    assert list(holds(later).values()) == [False]
    ours = [
        entry("digits", 5, row, nll) for row, nll in {"iwae-ours": 24.0, "chains-early": 23.8, "chains-unbiased": 23.9}.items()
    ]
    assert list(holds(ours).values()) == [True, False]  # chains less samples, and debiased chains less chains
    assert Findings([]).conclusions() == []


def test_the_tables_say_whose_a_row_is() -> None:
    entries = [entry("mnist", 5, "iwae", 130.0), entry("mnist", 5, "sumo", 130.001), entry("mnist", 5, "elbo", 131.0)]
    mnist, omniglot, details = Findings(entries).tables()
    assert mnist.columns == ["objective", "whose", *(f"k = {cost}" for cost in COSTS)]
    assert [str(row[1]).startswith("published: ") for row in mnist.rows] == [True] * 11 + [False] * 3
    assert mnist.rows[3] == ["IWAE", "published: Luo et al. 2020 (the paper)", "85.28 ± 0.01", "84.89 ± 0.03", "84.50 ± 0.02"]
    assert [row[2] for row in mnist.rows[11:]] == ["131.00 ± 0.01", "130.00 ± 0.01 *", "130.00 ± 0.01 *"]
    assert "far shorter than the published" in mnist.note
    assert len(omniglot.rows) == 10
    assert all(len(row) == len(table.columns) for table in (mnist, omniglot, details) for row in table.rows)
    p = {row[2]: row[6] for row in details.rows}
    wanted = float(stats.ttest_ind(entries[2].nll, entries[0].nll, equal_var=False).pvalue)
    assert p["IWAE"] is None
    assert p["ELBO"] == pytest.approx(wanted, rel=0.1)


def test_the_picture_shows_the_papers_where_it_is_near() -> None:
    near = {"epochs": 3000, "rows": {"iwae": {"cost": [5, 15], "mean": [85.3, 84.9], "sd": [0.1, 0.1]}}}
    far = {"epochs": 1, "rows": {"iwae": {"cost": [5], "mean": [130.0], "sd": [0.1]}}}
    labels = {row: each.label for row, each in ROWS.items()}
    for panel, words in ((near, []), (far, ["the paper's, far longer trained: 85.28 to 85.28"])):
        figure, numbers = plot_table({"mnist": panel}, labels, {"mnist": {"iwae": {5: 85.28, 15: 84.89}}}, DATA)
        axis = figure.axes[0]
        assert [text.get_text() for text in axis.texts] == words
        low, high = axis.get_ylim()
        assert (low < 85.28 < high) == (not words)
        assert numbers["mnist"]["paper"]["iwae"][5] == 85.28
        assert numbers["mnist"]["ours"]["iwae"]["mean"][0] == panel["rows"]["iwae"]["mean"][0]  # type: ignore[index]


def test_killed_it_goes_on_and_another_command_adds_a_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The smoke preset, a cell at a time."""
    arguments = ["reproduce", "table1", "--scale", "smoke", "--device", "cpu", "--epochs", "4", "--out", "t"]
    line = command(*arguments, "--estimator", "iwae")
    replicas = [tmp_path / "t/work/digits_005_iwae" / f"replica_{i}" for i in range(2)]
    killed_when(lambda: all((replica / "checkpoint.pt").exists() for replica in replicas), line, tmp_path)
    assert json.loads((tmp_path / "t/study.json").read_text())["cells_done"] == 0
    first = [(replica / "metrics.jsonl").read_text().split("\n")[0] for replica in replicas]
    done = finished(line, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 of 2 cells" in " ".join(done.stdout.split())
    for replica, begun in zip(replicas, first, strict=True):  # with the time it took: the first epoch was not trained again
        records = (replica / "metrics.jsonl").read_text().split("\n")
        assert (records[0], len(records)) == (begun, 5)
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--estimator", "sumo", "--cost", "5.0", "--data", "digits", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["cells_done"], report["cells_total"]) == (2, 2)
    assert report == json.loads(Path("t/study.json").read_text())
    ours = picture(Path("t/table1.png"))["digits"]["ours"]
    for row in ("iwae", "sumo"):
        nlls = report["cells"][f"digits_005_{row}"]["result"]["test_nll"]
        assert len(set(nlls)) == 2
        assert all(20 < nll < 35 for nll in nlls)
        assert ours[row]["mean"] == [pytest.approx(sum(nlls) / 2, rel=1e-5)]
    test, model = load("digits", seed=0).test, DensityRun.open(replicas[1]).trained()  # one test set for all replicas
    alone = -evaluate(model, test, IWAE(20), seed=1).mean
    assert report["cells"]["digits_005_iwae"]["result"]["test_nll"][1] == pytest.approx(alone, rel=1e-6)
    assert [len(table["rows"]) for table in report["tables"]] == [11, 10, 2, 2]
    assert main([*arguments, "--epochs", "5"]) == 2
    assert "was made with epochs 4, and 5 is wanted now" in capsys.readouterr().err


def test_chains_follow_samples_and_go_on_after_a_kill_in_either_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that was killed twice, and moved meanwhile, ends with the numbers of one that was not."""
    tune = Annealed.tune
    monkeypatch.setattr(Annealed, "tune", lambda *given, **known: tune(*given, **known | {"iterations": 1}))  # most of the time
    monkeypatch.setattr(DensityRun, "_plot", lambda *given: None)
    options = {"epochs": 8, "rows": ("chains",), "hidden": 8, "latent": 2, "test_terms": 5, "device": "cpu"}
    study, name = Table1.at("smoke", **options), "digits_005_chains"
    whole = reproduce(study, tmp_path / "whole")["cells"][name]["result"]

    def killed(cell: str, done: float, total: int, at: float) -> None:
        if done >= at:
            raise KeyboardInterrupt

    for before, after, at in (("a", "b", 0.4), ("b", "c", 0.85)):
        with pytest.raises(KeyboardInterrupt):
            reproduce(study, tmp_path / before, partial(killed, at=at))
        (tmp_path / before).rename(tmp_path / after)
    assert not (tmp_path / "c" / "cells" / f"{name}.json").exists()
    again = reproduce(study, tmp_path / "c")["cells"][name]["result"]
    first, second = whole["stages"]
    assert (first["epochs"], second["epochs"], again["epochs"]) == (6, 2, [8, 8])
    assert sum(first["decoder_passes"].values()) == sum(second["decoder_passes"].values()) == 15
    assert [again[key] for key in ("test_nll", "test_nll_annealed")] == [whole[key] for key in ("test_nll", "test_nll_annealed")]
    work = tmp_path / "c" / "work" / name
    by_samples, by_chains = (read_records(work / stage / "replica_1") for stage in ("first", ""))
    assert [record["learning_rate"] for record in by_samples] == [1e-3] * 6
    assert by_chains[0]["learning_rate"] == 1e-3 > by_chains[1]["learning_rate"]
    began = DensityRun.open(work / "replica_1").config.init_from
    assert began is not None
    assert began.parts[-2:] == ("first", "replica_1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", '["sum"]'], "unknown rows 'sum': did you mean 'sumo'"),
        (["--sets", '["minst"]'], "unknown sets 'minst': did you mean 'mnist'"),
        (["--replicas", "1"], "replicas is 1; it must be at least 2"),
        (["--costs", "[1]"], "each must be at least 5"),
        (["--rows", "[chains]", "--epochs", "1"], "the row chains needs at least 2"),
        (["--estimator", "sume"], "did you mean 'sumo'"),
    ],
)
def test_bad_words_get_one_line(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "table1", *arguments, "--out", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "x").exists()
