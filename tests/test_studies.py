"""Studies in general: cells, their folder, what `dohyo reproduce` makes of wrong words."""

import contextlib
import dataclasses
import json
import re
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from matplotlib.figure import Figure

from dohyo.lab.cli import main
from dohyo.lab.studies import STUDIES, Conclusion, Picture, Study, StudyConfig, Table, reproduce
from dohyo.lab.studies.runs import complete, given_or
from dohyo.lab.studies.study import Advance, Cell, picked, save_picture

KEYS = [
    "schema_version", "study", "title", "question", "scale", "config", "seeds", "versions", "seconds", "cells_done",
    "cells_total", "cells", "conclusions", "tables", "pictures",
]  # fmt: skip


@dataclass(frozen=True)
class SquaresConfig(StudyConfig):
    most: int = 4
    power: float = 2.0


class Squares(Study[SquaresConfig]):
    """A study of squares, whose third cell can be made to fail."""

    name, title, question = "squares", "Squares", "Are squares positive?"
    SCALES = {"smoke": SquaresConfig(most=3), "small": SquaresConfig(), "paper": SquaresConfig(most=9)}  # noqa: RUF012
    picks = ("side", "sign")
    fails: ClassVar[bool] = False

    def cells(self) -> dict[str, Cell]:
        c = self.config
        return {f"n_{n}": {"n": n, "power": c.power, "side": "even" if n % 2 == 0 else "odd", "sign": 5.0} for n in range(c.most)}

    def run_cell(self, name: str, options: Cell, folder: Path, advance: Advance) -> Cell:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log").open("a") as log:
            log.write("done\n")
        advance(0.5)
        if self.fails and options["n"] == 2:
            raise KeyboardInterrupt
        return {"square": options["n"] ** options["power"], "nothing": float("nan")}

    def summarise(self, cells: dict[str, Cell]) -> tuple[list[Conclusion], list[Table]]:
        squares = [cell["square"] for cell in cells.values()]
        table = Table("Squares", ["square"], [[square] for square in squares])
        return [Conclusion("Squares are positive", "", f"the least is {min(squares)}", min(squares) > 0)], [table]

    def plot(self, cells: dict[str, Cell], folder: Path) -> list[Picture]:
        figure = Figure()
        figure.subplots().plot([cell["square"] for cell in cells.values()])
        return [save_picture(figure, {"count": len(cells)}, folder, "squares.png", "Squares", "A rising line")]


def times_done(folder: Path) -> dict[str, int]:
    return {path.parent.name: path.read_text().count("done") for path in sorted(folder.glob("work/*/log"))}


def test_a_study_fills_its_folder(tmp_path: Path) -> None:
    seen: list[tuple[str, float, int]] = []
    report = reproduce(Squares.at("small", seed=7), tmp_path, lambda *progress: seen.append(progress))
    assert list(report) == KEYS
    assert json.loads((tmp_path / "study.json").read_text()) == report
    assert (report["study"], report["scale"], report["seeds"]) == ("squares", "small", [7])
    assert report["config"] == {"seed": 7, "device": "auto", "most": 4, "power": 2.0}
    assert (report["cells_done"], report["cells_total"]) == (4, 4)
    assert report["cells"]["n_3"]["result"] == {"square": 9.0, "nothing": None}
    assert report["cells"]["n_3"]["options"] == {"n": 3, "power": 2.0, "side": "odd", "sign": 5.0}
    assert report["seconds"] == pytest.approx(sum(cell["seconds"] for cell in report["cells"].values()))
    assert report["conclusions"] == [{"claim": "Squares are positive", "paper": "", "found": "the least is 0.0", "holds": False}]
    assert report["tables"] == [{"title": "Squares", "columns": ["square"], "rows": [[0], [1], [4], [9]], "note": ""}]
    assert report["pictures"] == [{"file": "squares.png", "title": "Squares", "alt": "A rising line"}]
    assert {path.name for path in tmp_path.iterdir()} == {
        ".dohyo.lock",
        "cells",
        "work",
        "study.json",
        "squares.png",
        "squares.svg",
        "squares.json",
    }
    assert [progress[1] for progress in seen] == [0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4]
    assert {progress[2] for progress in seen} == {4}


def test_what_is_done_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = Squares.at("small")
    monkeypatch.setattr(Squares, "fails", True)
    with pytest.raises(KeyboardInterrupt):
        reproduce(study, tmp_path)
    report = json.loads((tmp_path / "study.json").read_text())
    assert (report["cells_done"], report["cells_total"]) == (2, 4)
    monkeypatch.undo()
    assert reproduce(study, tmp_path)["cells_done"] == 4
    assert times_done(tmp_path) == {"n_0": 1, "n_1": 1, "n_2": 2, "n_3": 1}
    again = reproduce(study, tmp_path)
    assert times_done(tmp_path) == {"n_0": 1, "n_1": 1, "n_2": 2, "n_3": 1}
    assert again["cells_done"] == 4


def test_a_study_that_was_stopped_in_its_first_cell_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Squares, "fails", True)
    with pytest.raises(KeyboardInterrupt):
        reproduce(Squares.at("small"), tmp_path, only=["n_2"])
    report = json.loads((tmp_path / "study.json").read_text())
    assert list(report) == KEYS
    assert (report["cells_done"], report["conclusions"], report["tables"], report["pictures"]) == (0, [], [], [])
    monkeypatch.undo()
    assert reproduce(Squares.at("small"), tmp_path)["cells_done"] == 4


def test_cells_can_be_picked_and_the_report_tells_of_all(tmp_path: Path) -> None:
    study = Squares.at("small")
    assert picked(study, {"side": ["odd"]}) == ["n_1", "n_3"]
    assert picked(study, {"side": ["odd", "even"], "sign": ["5"]}) == ["n_0", "n_1", "n_2", "n_3"]
    with pytest.raises(ValueError, match="unknown side 'od': did you mean 'odd'"):
        picked(study, {"side": ["od"]})
    assert reproduce(study, tmp_path, only=["n_1"])["cells_done"] == 1
    assert list(reproduce(study, tmp_path, only=["n_0"])["cells"]) == ["n_0", "n_1"]
    assert json.loads((tmp_path / "squares.json").read_text()) == {"count": 2}
    # More cells of the same kind: those that are there stay.
    assert reproduce(Squares.at("paper"), tmp_path, only=["n_8"])["cells_done"] == 3


def test_cells_that_were_made_shorter_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = reproduce(Squares.at("small"), tmp_path, only=["n_1", "n_2"])["cells"]
    monkeypatch.setattr(Squares, "lengths", ("power",))
    after = reproduce(Squares.at("small", power=3.0), tmp_path, only=["n_2", "n_3"])
    assert {name: cell["result"]["square"] for name, cell in after["cells"].items()} == {"n_2": 8, "n_3": 27}  # n_1 is too short
    assert after["cells"]["n_2"]["seconds"] > before["n_2"]["seconds"]
    assert times_done(tmp_path) == {"n_1": 1, "n_2": 2, "n_3": 1}
    with pytest.raises(ValueError, match=r"n_2.json: was made with power 3.0, and 2.0 is wanted now"):
        reproduce(Squares.at("small"), tmp_path)
    assert list(reproduce(Squares.at("small", power=3.0), tmp_path)["cells"]) == ["n_0", "n_1", "n_2", "n_3"]
    assert times_done(tmp_path) == {"n_0": 1, "n_1": 2, "n_2": 2, "n_3": 1}


def test_study_json_alone_is_enough_to_go_on(tmp_path: Path) -> None:
    before = reproduce(Squares.at("small"), tmp_path, only=["n_1", "n_2"])
    shutil.rmtree(tmp_path / "cells")
    shutil.rmtree(tmp_path / "work")
    (tmp_path / "squares.png").unlink()
    again = reproduce(Squares.at("small"), tmp_path, only=["n_1"])
    assert {**again, "pictures": []} == {**before, "pictures": []}
    assert (tmp_path / "squares.png").exists()
    assert times_done(tmp_path) == {}
    (tmp_path / "cells/n_1.json").unlink()  # to do a cell again
    assert reproduce(Squares.at("small"), tmp_path, only=["n_1"])["cells_done"] == 2
    assert times_done(tmp_path) == {"n_1": 1}


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    reproduce(Squares.at("smoke"), tmp_path)
    with pytest.raises(ValueError, match=r"n_0.json: was made with power 2.0, and 3.0 is wanted now; choose another --out"):
        reproduce(Squares.at("smoke", power=3.0), tmp_path)
    (tmp_path / "cells/n_1.json").write_text("{")
    with pytest.raises(ValueError, match=r"n_1.json: is damaged .*; remove it, and the same command writes it again"):
        reproduce(Squares.at("smoke"), tmp_path)
    (tmp_path / "study.json").write_text('{"study": "table1"}')
    with pytest.raises(ValueError, match="holds the study 'table1', not 'squares'"):
        reproduce(Squares.at("smoke"), tmp_path)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(STUDIES, "squares", Squares)
    line = ["reproduce", "squares", "--out", "s", "--power", "3", "--device", "cpu"]
    with monkeypatch.context() as patch:
        patch.setattr(Squares, "fails", True)
        assert main(line) == 130
    assert capsys.readouterr().err == "dohyo: interrupted; the same command continues with s\n"
    assert main([*line, "--side", "even"]) == 0
    assert "3 of 4 cells" in capsys.readouterr().out
    assert main([*line, "--json"]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    report = json.loads(out)
    assert report == json.loads(Path("s/study.json").read_text())
    assert report["config"]["power"] == 3.0
    assert report["cells"]["n_2"]["result"]["square"] == 8.0
    assert times_done(tmp_path / "s") == {"n_0": 1, "n_1": 1, "n_2": 2, "n_3": 1}


@pytest.mark.parametrize("study", STUDIES.values(), ids=list(STUDIES))
def test_every_study_keeps_the_contract(study: type[Study[StudyConfig]]) -> None:
    assert STUDIES[study.name] is study
    assert list(study.SCALES) == ["smoke", "small", "paper"]
    fields = {field.name for field in dataclasses.fields(study.SCALES["paper"])}
    assert not fields & {*study.picks, "scale", "out", "json", "study", "workers", "scheduler"}
    assert study.question.endswith("?")
    for scale in study.SCALES:
        cells = study.at(scale).cells()
        assert cells == study.at(scale).cells()
        assert all(re.fullmatch(r"[a-z0-9_.-]+", name) for name in cells)
        assert json.loads(json.dumps(cells, default=str, allow_nan=False))
        assert set(study.picks) <= {key for options in cells.values() for key in options}
        assert all(isinstance(seed, int) for seed in study.at(scale).seeds)
    assert all("device" not in options for options in cells.values())  # another machine may go on


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a study (convergence, estimates"),
        (["convergenc", "--out", "x"], "unknown study 'convergenc': did you mean 'convergence'?"),
        (["convergence", "--scale", "smal", "--out", "x"], "unknown scale 'smal': did you mean 'small'?"),
        (["convergence", "--scale", "smoke"], "--out FOLDER"),
        (["convergence", "--part", "toi", "--out", "x"], "did you mean 'toy'"),
        (["convergence", "--trials", "1", "--out", "x"], "trials is 1; it must be at least 2"),
        (["convergence", "--max-k", "100", "--out", "x"], "max_k is 100; it must be a power of two"),
        (["convergence", "--trails", "3", "--out", "x"], "--trails"),
        (["convergence", "--scale", "smoke", "--device", "tpu", "--out", "x"], "unknown device 'tpu'"),
        (["convergence", "--scale", "smoke", "--run", "nowhere", "--part", "vae", "--out", "x"], "nowhere: holds no run"),
        (["estimates", "--estimator", "sumo", "--out", "x"], "did you mean 'sumo-"),
        (["estimates", "--always", "[0]", "--out", "x"], "always is"),
    ],
)
def test_bad_words_get_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *arguments]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("dohyo: error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "x/study.json").exists()


@pytest.mark.parametrize("arguments", [[], ["convergence"]])
def test_help_has_examples(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", *arguments, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "dohyo reproduce convergence --scale smoke --out out/convergence" in text
    assert ("--cross-samples" in text) == bool(arguments)


def test_an_option_that_is_gone_is_another_option(tmp_path: Path) -> None:
    reproduce(Squares.at("smoke"), tmp_path)
    cell = json.loads((tmp_path / "cells/n_0.json").read_text())
    (tmp_path / "cells/n_0.json").write_text(json.dumps(cell | {"options": cell["options"] | {"colour": "red"}}))
    with pytest.raises(ValueError, match=r"n_0.json: was made with colour 'red', and None is wanted now"):
        reproduce(Squares.at("smoke"), tmp_path)


def test_picks_are_joined_by_and() -> None:
    study = Squares.at("small")
    assert picked(study, {"side": ["odd"], "n": ["1", "2"]}) == ["n_1"]
    with pytest.raises(ValueError, match="no cell has side odd and n 2; leave one of these out"):
        picked(study, {"side": ["odd"], "n": ["2"]})


def test_progress_counts_the_cells_to_do(tmp_path: Path) -> None:
    seen: list[tuple[str, float, int]] = []
    reproduce(Squares.at("small"), tmp_path, lambda *progress: seen.append(progress), only=["n_1", "n_3"])
    assert [progress[1:] for progress in seen] == [(0.5, 2), (1, 2), (1.5, 2), (2, 2)]


def test_pictures_are_there_from_the_first_cell_on(tmp_path: Path) -> None:
    seen: dict[float, list[str]] = {}

    def look(name: str, done: float, total: int) -> None:
        seen[done] = [picture["file"] for picture in json.loads((tmp_path / "study.json").read_text())["pictures"]]

    reproduce(Squares.at("small"), tmp_path, look)
    assert [seen[done] for done in (0.5, 1.5, 2.5, 3.5)] == [[], ["squares.png"], ["squares.png"], ["squares.png"]]


def test_a_run_in_a_cell(tmp_path: Path) -> None:
    """Gone on with on any device and by any program, but with no other config; or one that is given."""
    options = {"estimator": "iwae", "cost": 2, "hidden": 4, "latent": 2, "epochs": 2, "valid_terms": 2, "test_terms": 2}
    shares: list[float] = []
    run = given_or(None, tmp_path / "run", **options, device="cpu")
    complete(run, shares.append)
    assert (shares[:2], set(shares[2:])) == ([0.5, 1.0], {1.0})
    assert complete(given_or(None, tmp_path / "run", **options, device="auto", program="captured"), shares.append) == run.result
    with pytest.raises(ValueError, match="run holds a run with another config; remove that folder, or choose another --out"):
        complete(given_or(None, tmp_path / "run", **options | {"cost": 3}, device="cpu"), shares.append)
    assert given_or(tmp_path / "run", tmp_path / "other", **options).folder == tmp_path / "run"
    assert not (tmp_path / "other").exists()


def test_the_verdicts_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(STUDIES, "squares", Squares)
    for sides, verdict in (("odd", "holds"), ("even", "does not hold")):  # at 0 the square is not positive
        assert main(["reproduce", "squares", "--out", "s", "--side", sides, "--device", "cpu"]) == 0
        assert f" {verdict} " in capsys.readouterr().out


def test_every_seed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Squares, "seeds", [7, 8])
    assert reproduce(Squares.at("smoke", seed=7), tmp_path)["seeds"] == [7, 8]


def test_an_interrupt_that_python_loses_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It lets no exception out of `__del__`, such as that of a library's lock."""

    class Lock:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def run_cell(self: Squares, name: str, options: Cell, folder: Path, advance: Advance) -> Cell:
        Lock()
        time.sleep(60)
        return {"square": 1.0}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(STUDIES, "squares", Squares)
    monkeypatch.setattr(Squares, "run_cell", run_cell)
    hook = sys.unraisablehook
    assert main(["reproduce", "squares", "--out", "s", "--device", "cpu"]) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "dohyo: interrupted; the same command continues with s\n"
    assert not list(Path("s/cells").glob("n_*"))
    assert sys.unraisablehook is hook


def test_an_interrupt_that_a_cell_swallowed_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_cell(self: Squares, name: str, options: Cell, folder: Path, advance: Advance) -> Cell:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return {"square": 1.0}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(STUDIES, "squares", Squares)
    monkeypatch.setattr(Squares, "run_cell", run_cell)
    assert main(["reproduce", "squares", "--out", "s", "--device", "cpu"]) == 130
    assert capsys.readouterr().err == "dohyo: interrupted; the same command continues with s\n"
    assert [path.name for path in Path("s/cells").glob("n_*")] == ["n_0.json"]
