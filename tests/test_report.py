"""`dohyo report`: real folders and a real page. How the page behaves is in test_report_page.py."""

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dohyo.lab.cli import main
from dohyo.lab.report import find, read
from dohyo.lab.report.grids import NOTHING, grid, number, with_error
from dohyo.lab.report.runs import compare
from folders import write_runs, write_study

RUNS = ("iwae", "replicas", "funnel", "bits", "unfinished")


@pytest.fixture(scope="session")  # a worker may come back to this file
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_runs(tmp_path_factory.mktemp("report"), *RUNS)


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def report(*arguments: str | Path) -> Page:
    assert main(["report", *map(str, arguments), "--out", "page.html"]) == 0
    return Page(Path("page.html"))


def test_every_folder_in_one_page(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path / "out/rates")
    page = report("out/rates", *(runs / name for name in RUNS))
    assert page.all("html") == [{"lang": "en"}]
    result = json.loads((runs / "iwae/result.json").read_text())
    assert f"{result['test_nll']:.2f} ± {result['test_nll_stderr']:.2f}" in page.text
    spread = json.loads((runs / "replicas/result.json").read_text())["test_nll_spread"]
    assert f"Spread over 2 replicas{spread:.3g}" in page.text
    for text in ("holds", "does not hold", "cannot tell", "The paper", "slope -2.01 ± 0.02", "trials: 10", "0, 1, 2", "IWAE-5",
                 "Not finished: 2 of 2 epochs are done", "torch 2", "learning_rate:", "reverse KL", "Best reward"):  # fmt: skip
        assert text in page.text, text
    ids = [attributes["id"] for _, attributes in page.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = [str(link["href"])[1:] for link in page.all("a")]
    targets += [str(found["aria-labelledby"]) for _, found in page.found if "aria-labelledby" in found]
    assert set(targets) <= set(ids)
    assert {tag for tag, _ in page.found} >= {"header", "nav", "main", "footer", "details", "figure"}


def test_the_page_loads_nothing(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path / "rates")
    page = report("rates", runs / "iwae", runs / "bits")
    (policy,) = [str(meta["content"]) for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert "unsafe" not in policy
    for image in page.all("img"):
        assert str(image["src"]).startswith("data:image/")
        assert len(str(image["alt"])) > 20
    assert all(str(link["href"]).startswith("data:") for link in page.all("link"))
    assert not [found for _, found in page.found if "style" in found or any(name.startswith("on") for name in found)]
    assert len(page.all("img")) == 1 + 3 + 1


def test_the_smaller_picture_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_study(Path("rates"))
    png, svg = Path("rates/rates.png"), Path("rates/rates.svg")
    assert svg.stat().st_size < png.stat().st_size
    (small,) = report("rates").all("img")
    assert str(small["src"]).startswith("data:image/svg+xml")
    svg.write_text(svg.read_text() + f"<!-- {'many points ' * 9999} -->")
    (large,) = report("rates").all("img")
    assert str(large["src"]).startswith("data:image/png")
    assert [small["width"], small["height"]] == [large["width"], large["height"]]


def test_a_partial_study_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write_study(Path("rates"), cells_done=1)
    page = report("rates")
    assert "Not finished: 1 of 2 cells are done" in page.text
    assert "dohyo reproduce rates --scale small --out rates continues" in page.text
    assert "1 of 2 cells" in capsys.readouterr().out


def test_a_real_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "convergence", "--scale", "smoke", "--part", "cross", "--out", "out/convergence", "--json"]) == 0
    found = json.loads(Path("out/convergence/study.json").read_text())
    page = report()
    told = " ".join(page.text.split())
    assert f"Not finished: 3 of {found['cells_total']} cells are done" in told
    assert found["conclusions"]
    texts = [found["title"], found["question"], *(one["title"] for one in (*found["tables"], *found["pictures"]))]
    texts += [one[key] for one in found["conclusions"] for key in ("claim", "paper", "found")]
    for text in texts:
        assert " ".join(text.split()) in told
    assert [image["alt"] for image in page.all("img")] == [picture["alt"] for picture in found["pictures"]]


def test_json(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write_study(Path("rates"))
    assert main(["report", "rates", str(runs / "iwae"), str(runs / "iwae"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["report"] == "report.html"
    study, run = said["entries"]
    assert [one["holds"] for one in study["conclusions"]] == [True, None, False]
    assert (study["kind"], study["state"], study["outcome"]) == ("study", "finished", "1 holds, 1 does not hold, 1 cannot tell")
    assert (run["kind"], run["name"], run["state"]) == ("train", "iwae", "finished")


def test_without_folders_all_below_runs_and_out_are_taken(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 2
    assert "neither runs nor out" in capsys.readouterr().err
    shutil.copytree(runs / "replicas", "runs/deep/er/replicas")
    write_study(Path("out/rates"))
    shutil.copytree(runs / "iwae", "out/rates/work/cell")  # a part of the study
    assert find([Path("runs"), Path("out")]) == [Path("runs/deep/er/replicas"), Path("out/rates")]
    page = report()
    assert "no folders given: took the 2 below runs and out" in capsys.readouterr().out
    assert "1 study and 1 run" in page.text


def damage(folder: Path, how: str) -> None:
    study = folder / "rates/study.json"
    whole: dict[str, Any] = json.loads(study.read_text())
    match how:
        case "cut":
            study.write_text(study.read_text()[:200])
        case "list":
            study.write_text("[1, 2]")
        case "missing":
            study.write_text(json.dumps({key: value for key, value in whole.items() if key != "tables"}))
        case "holds":
            study.write_text(json.dumps(whole | {"conclusions": [whole["conclusions"][0] | {"holds": "perhaps"}]}))
        case "ragged":
            study.write_text(json.dumps(whole | {"tables": [{"title": "t", "columns": ["a", "b"], "rows": [[1]], "note": ""}]}))
        case "version":
            study.write_text(json.dumps(whole | {"schema_version": 2}))
        case "words":
            study.write_text(json.dumps(whole | {"cells_done": "many"}))
        case "outside":
            study.write_text(json.dumps(whole | {"pictures": [whole["pictures"][0] | {"file": "../rates.png"}]}))
        case "png":
            (folder / "rates/rates.png").write_bytes((folder / "rates/rates.png").read_bytes()[:3000])
        case "svg":
            (folder / "rates/rates.svg").write_text("<svg viewBox='0 0 1 1'>")
        case "no picture":
            (folder / "rates/rates.png").unlink()
        case "yaml":
            (folder / "run/config.yaml").write_text("seed: [")
        case "other yaml":
            (folder / "run/config.yaml").write_text("colour: red\n")
        case "old config":
            (folder / "run/config.yaml").write_text("data: digits\n")
        case "cost" | "anneal":
            config, good = folder / "run/config.yaml", {"cost": "5.0", "anneal": "0"}[how]
            config.write_text(config.read_text().replace(f"{how}: {good}", f"{how}: much"))
        case "picture of a run":
            (folder / "run/samples.png").write_bytes(b"")
        case "result":
            (folder / "run/result.json").write_text('{"test_nll": 3')


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut", "rates/study.json: is damaged"),
        ("list", "rates/study.json: holds a list"),
        ("missing", "rates/study.json: tables is missing"),
        ("holds", "holds is 'perhaps'; it must be true or false or null"),
        ("ragged", "a row has 1 cells for 2 columns"),
        ("version", "schema_version is 2"),
        ("words", "cells_done is 'many'; it must be a whole number"),
        ("outside", "does not lie in the study's own folder"),
        ("png", "rates/rates.png: is not a whole PNG"),
        ("svg", "rates/rates.svg: is not a whole SVG"),
        ("no picture", "rates/rates.png"),
        ("yaml", "run/config.yaml: is damaged"),
        ("other yaml", "run/config.yaml: is not the config of a run of dohyo train, reverse-kl, qpbo"),
        ("old config", "run/config.yaml: seed is missing"),
        ("cost", "run/config.yaml: cost is 'much'; it must be a number; it was written by another version of dohyo"),
        ("anneal", "run/config.yaml: anneal is 'much'; it must be a whole number"),
        ("picture of a run", "error: run/samples.png: is not a whole PNG"),
        ("result", "run/result.json: is damaged"),
    ],
)
def test_damage_gets_one_line_and_no_page(
    how: str, message: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_study(Path("rates"))
    shutil.copytree(runs / "iwae", "run")
    damage(tmp_path, how)
    Path("report.html").write_text("the old one")
    assert_one_line(["rates", "run"], message, capsys)
    assert Path("report.html").read_text() == "the old one"
    assert {path.name for path in tmp_path.iterdir()} == {"rates", "run", "report.html"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], "absent: there is no such folder"),
        (["empty"], "empty: holds neither a study nor a run; a study's folder holds study.json"),
        (["above"], "name those below it: above/rates"),
        (["above/rates", "--out", "page.pdf"], "page.pdf: the ending of a page must be .html"),
        (["above/rates", "--out", "folder.html"], "folder.html"),
        (["above/rates", "--colour", "red"], "--colour"),
    ],
)
def test_wrong_arguments_get_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_study(Path("above/rates"))
    Path("empty").mkdir()
    Path("folder.html").mkdir()
    assert_one_line(arguments, message, capsys)
    assert {path.name for path in tmp_path.iterdir()} == {"above", "empty", "folder.html"}


def assert_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *arguments]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("dohyo: error: ")
    assert error.count("\n") == 1
    assert message in error


def test_comparable_runs_share_an_axis(runs: Path) -> None:
    from dohyo.lab.report.runs import compare

    entries = [read(runs / name) for name in ("iwae", "replicas", "bits", "unfinished")]
    train, qpbo = compare(entries)
    at = train.columns.index("test NLL")
    marks = [row[at].marks for row in train.rows]
    assert marks[2] is None  # there is no result
    assert sorted(end for three in marks[:2] if three for end in three)[::5] == [0, 100]
    order = sorted(range(2), key=lambda i: train.rows[i][at].key)
    assert order == sorted(range(2), key=lambda i: marks[i][1])  # type: ignore[index]
    assert "replicas" not in compare(entries[:1])[0].columns  # none has several
    assert all(cell.marks is None for row in qpbo.rows for cell in row)  # one run alone
    assert train.numeric[at]
    spread = json.loads((runs / "replicas/result.json").read_text())["test_nll_spread"]
    assert [row[train.columns.index("replicas")].key for row in train.rows] == [None, 2, None]
    assert [row[train.columns.index("their spread")].key for row in train.rows] == [None, spread, None]


def test_a_diverged_run_has_no_numbers(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "iwae", tmp_path / "run")
    result = json.loads((runs / "iwae/result.json").read_text())
    numbers = ("test_nll", "test_nll_stderr", "valid_nll")
    (tmp_path / "run/result.json").write_text(json.dumps(result | dict.fromkeys(numbers)))
    assert read(tmp_path / "run").outcome == f"test NLL {NOTHING}"


@pytest.mark.parametrize(
    ("values", "texts", "numeric"),
    [
        ([1.0, 2.0, None], ["1", "2", NOTHING], True),
        ([0.0731, 26.6], ["0.073", "26.600"], True),
        ([1e-9, 12345.678], ["1e-09", "1.235e+04"], True),
        (["1.5 ± 0.1", "-2 ± 1", ""], ["1.5 ± 0.1", "-2 ± 1", NOTHING], True),
        (["5%", 3], ["5%", "3"], True),
        (["2-layer", "3"], ["2-layer", "3"], False),
        ([True, None, float("nan")], ["yes", NOTHING, NOTHING], False),
        ([None, None], [NOTHING, NOTHING], False),
        ([10**14, -3], ["100000000000000", "-3"], True),
    ],
)
def test_columns(values: list[Any], texts: list[str], numeric: bool) -> None:
    made = grid("", ["a"], [[value] for value in values])
    assert [row[0].text for row in made.rows] == texts
    assert made.numeric == [numeric]
    assert [row[0].key is None for row in made.rows] == [text == NOTHING for text in texts]


@given(st.lists(st.one_of(st.none(), st.floats(-1e300, 1e300), st.integers(-(10**9), 10**9)), min_size=1))
def test_no_number_loses_its_size(values: list[float | None]) -> None:
    """What is shown has two digits of the number at least; what it is sorted by is the number itself."""
    for row, value in zip(grid("", ["a"], [[value] for value in values]).rows, values, strict=True):
        assert row[0].key == value
        if value is not None:
            assert float(row[0].text) == pytest.approx(value, rel=0.05)


def changed(run: Path, copy: Path, config: dict[str, Any] | None = None, **result: Any) -> Path:
    """A copy of a run with another config or result."""
    shutil.copytree(run, copy)
    (copy / "config.yaml").write_text(yaml.safe_dump(yaml.safe_load((run / "config.yaml").read_text()) | (config or {})))
    (copy / "result.json").write_text(json.dumps(json.loads((run / "result.json").read_text()) | result))
    return copy


def test_replicas_are_told_one_by_one(runs: Path, tmp_path: Path) -> None:
    entry, replicas = read(runs / "replicas"), json.loads((runs / "replicas/result.json").read_text())["replicas"]
    assert entry.seconds.key == max(one["seconds"] for one in replicas)
    assert dict(entry.facts)["Seeds"] == "0, 1"
    assert [heading for heading, _, _ in entry.more] == ["Pictures of replica 0", "Pictures of replica 1", "Every number"]
    for one, (_, _, figures) in zip(replicas, entry.more, strict=False):
        assert [figure.title for figure in figures] == ["Learning curves", "Samples", "Reconstructions"]
        assert f"the best validation NLL is {number(one['valid_nll'])} in epoch {one['best_epoch']}" in figures[0].alt
    (table,) = entry.tables
    assert [row[1].text for row in table.rows] == [with_error(one["test_nll"], one["test_nll_stderr"]) for one in replicas]
    shutil.copytree(runs / "replicas", tmp_path / "run", ignore=lambda _, names: {"result.json"} & set(names))
    assert read(tmp_path / "run").notices[0].startswith("Not finished: 4 of 4 epochs are done.")


def test_what_a_result_says_of_itself(runs: Path, tmp_path: Path) -> None:
    short = read(changed(runs / "iwae", tmp_path / "short", {"epochs": 5}, warnings=["k-hat is large"]))
    assert (short.state, short.notices) == ("2 of 5 epochs", ["k-hat is large"])
    result = json.loads((runs / "iwae/result.json").read_text())
    nll = with_error(result["test_nll"], result["test_nll_stderr"])
    assert short.headline[0] == ("Test NLL by IWAE-5, nats", f"{nll}, trusted")
    verdict = {"trusted": False, "reason": "it is bad: heavy"}
    bad = read(changed(runs / "iwae", tmp_path / "bad", verdict=verdict, warnings=["heavy", "other"]))
    assert (bad.headline[0][1], bad.notices) == (f"{nll}, not to be trusted", ["it is bad: heavy", "other"])
    assert dict(bad.facts)["Verdict"] == "it is bad: heavy"
    old = read(changed(runs / "iwae", tmp_path / "old", verdict=None))
    assert old.headline[0][1] == nll
    unknown = read(changed(runs / "funnel", tmp_path / "unknown", reverse_kl=None, objective=1.5, reverse_kl_stderr=0.25))
    assert unknown.outcome == "reverse KL 1.50 ± 0.25 + log Z"
    numbers = {"log_normaliser": None, "log_z": 52.0, "training_estimate": -51.5, "training_estimate_stderr": 0.25}
    estimated = read(changed(runs / "funnel", tmp_path / "estimated", **numbers))
    assert ("The training's own estimate", "0.50 ± 0.25") in estimated.headline  # with log Z, as the KL beside it
    by_chains = read(changed(runs / "funnel", tmp_path / "by_chains", {"anneal": "auto"}, anneal="auto"))  # its last check alone
    assert "chains" not in by_chains.question
    known = read(changed(runs / "bits", tmp_path / "known", best_known=8, gap=0.125))
    assert [*known.headline[1:3]] == [("Best known", "8"), ("Gap", "12.50%")]


def test_runs_that_were_tested_otherwise_share_no_axis(runs: Path, tmp_path: Path) -> None:
    (table,) = compare([read(runs / "iwae"), read(changed(runs / "iwae", tmp_path / "other", {"test_terms": 6}))])
    assert [row[table.columns.index("test NLL")].marks for row in table.rows] == [None, None]
    (alone,) = compare([read(runs / "unfinished")])
    assert "test NLL" in alone.columns


def test_words_are_sorted_by_the_numbers_that_they_begin_with() -> None:
    made = grid("", ["a"], [["1,234 ± 5"], ["\N{MINUS SIGN}2 ± 1"], ["-3%"], ["+.5"]])
    assert [row[0].key for row in made.rows] == [1234, -2, -3, 0.5]
