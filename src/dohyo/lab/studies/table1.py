"""The paper's table 1: test NLL of one network trained by every objective, at three costs, on two sets of images."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, get_args

from dohyo.errors import DohyoError
from dohyo.lab.experiments.density import DensityRun
from dohyo.lab.experiments.density_config import DensityConfig
from dohyo.lab.folder import Conclusion, Picture, Table
from dohyo.lab.plots.nll import plot_table
from dohyo.lab.studies.runs import complete, train_replicas
from dohyo.lab.studies.study import Advance, Cell, Study, StudyConfig, save_picture
from dohyo.lab.studies.table1_findings import DATA, Entry, Findings
from dohyo.lab.studies.table1_rows import PUBLISHED, ROWS
from dohyo.lab.training.config import option

SetName = Literal["digits", "mnist", "mnist-static", "omniglot"]
PaperRow = Literal["elbo", "iwae", "iwae-dreg", "jvi", "sumo-variance", "sumo", "symmetric-sumo", "multilevel-rr"]
RowName = Literal[PaperRow, "multilevel-each", "iwae-ours", "sumo-ours", "chains", "chains-early", "chains-unbiased"]
FIRST = "first"  # in the folder of a run through chains, the run by samples that it begins with


@dataclass(frozen=True)
class Table1Config(StudyConfig):
    """The numbers of the study."""

    sets: tuple[SetName, ...] = option(("mnist", "omniglot"), "What is trained on: digits, mnist, mnist-static or omniglot.")
    costs: tuple[int, ...] = option((5, 15, 50), "Expected log-weights for each image in a step.")
    rows: tuple[RowName, ...] = option(get_args(RowName), "How it is trained, a row of the table each.")
    hidden: int = option(200, "Units in each hidden layer.")
    latent: int = option(50, "Latent dimensions.")
    epochs: int = option(3500, "At most; training ends earlier if nothing is gained for 300.")
    test_terms: int = option(5000, "The test NLL is by IWAE with this many terms.")
    replicas: int = option(3, "Runs in each cell, with seeds of their own; two or more, for a spread.")
    short_sets: tuple[SetName, ...] = option(
        (), "More sets, for which only a few cells are trained, for a few epochs, with the paper's network."
    )
    short_costs: tuple[int, ...] = option((5,), "Their costs.")
    short_rows: tuple[RowName, ...] = option(("iwae", "sumo-variance"), "Their rows.")
    short_epochs: int = option(1, "Their epochs.")
    short_test_terms: int = option(20, "The terms of their test NLL.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(replicas=2)
        if min((*self.costs, *self.short_costs), default=0) < 5:
            raise DohyoError(f"costs are {self.costs} and {self.short_costs}; each must be at least 5, for SUMO's law")
        for epochs, rows in ((self.epochs, self.rows), (self.short_epochs, self.short_rows if self.short_sets else ())):
            if "chains" in rows and epochs < 2:
                raise DohyoError(f"epochs is {epochs}; the row chains needs at least 2, some by samples and then some by chains")


class Table1(Study[Table1Config]):
    """The study `table1`."""

    name = "table1"
    title = "Test NLL of models trained by bounds and by unbiased estimators"
    question = (
        "One network is trained by the ELBO, IWAE, JVI, SUMO and later unbiased estimators, with the same expected number of "
        "log-weights for each image. In the paper SUMO's models have a slightly lower test NLL than IWAE's at each of the costs "
        "5, 15 and 50, on MNIST and on OMNIGLOT. Do they here, and do later estimators do better?"
    )
    SCALES = {  # noqa: RUF012
        "smoke": Table1Config(
            sets=("digits",), costs=(5,), rows=("iwae", "sumo"), hidden=32, latent=8, epochs=2, test_terms=20, replicas=2
        ),
        "small": Table1Config(
            sets=("digits",), rows=get_args(PaperRow), hidden=64, latent=16, epochs=20, test_terms=200, short_sets=("mnist",)
        ),
        "paper": Table1Config(),
    }
    picks = ("data", "cost", "estimator")

    def cells(self) -> dict[str, Cell]:
        c = self.config
        common = {"replicas": c.replicas, "seed": c.seed}
        full = {"hidden": c.hidden, "latent": c.latent, "epochs": c.epochs, "test_terms": c.test_terms}
        paper = {"hidden": Table1Config.hidden, "latent": Table1Config.latent}
        short = paper | {"epochs": c.short_epochs, "test_terms": c.short_test_terms}
        cells: dict[str, Cell] = {}
        for sets, costs, rows, numbers in ((c.sets, c.costs, c.rows, full), (c.short_sets, c.short_costs, c.short_rows, short)):
            for data, cost, row in product(sets, costs, rows):
                own = {"data": data, "cost": cost, "estimator": row, **ROWS[row].options(cost, numbers["epochs"])}
                cells.setdefault(f"{data}_{cost:03d}_{row}", own | numbers | common)
        return cells

    def run_of(self, name: str, options: Cell, folder: Path) -> DensityRun:
        return self._runs(options, folder)[-1]

    def _runs(self, options: Cell, folder: Path) -> list[DensityRun]:
        """The runs of a cell, each of which begins with the last one's best parameters: two where chains come late."""
        options = options | {"estimator": ROWS[options["estimator"]].estimator, "device": self.config.device}
        last, of_chains = options.pop("chain_epochs", None), {"cost": options.pop("chains", options["cost"])}
        if last is None:
            return [DensityRun(folder, DensityConfig(**options | of_chains))]
        constant = {"schedule": "plateau", "lr_patience": 10**9, "stop_patience": 10**9, "average": 0, "test_terms": 1}
        stages = {
            folder / FIRST: {"epochs": options["epochs"] - last, "anneal": 0, **constant},
            folder: {"epochs": last, "init_from": folder / FIRST, **of_chains},
        }
        return [DensityRun(own, DensityConfig(**options | stage, learning_rate=1e-3)) for own, stage in stages.items()]

    def run_cell(self, name: str, options: Cell, folder: Path, advance: Advance) -> Cell:
        *before, last = runs = self._runs(options, folder)
        first = sum(run.config.epochs for run in before) / options["epochs"]
        for run in before:
            complete(run, lambda share: advance(share * first))
        result = train_replicas(last, lambda share: advance(first + share * (1 - first)))
        if before:
            result["stages"] = [{key: (run.result or {})[key] for key in ("epochs", "decoder_passes", "seconds")} for run in runs]
            result["epochs"] = [options["epochs"]] * options["replicas"]
        return result

    def _findings(self, cells: dict[str, Cell]) -> Findings:
        return Findings([Entry(options, cells[name]) for name, options in self.cells().items() if name in cells])

    def summarise(self, cells: dict[str, Cell]) -> tuple[list[Conclusion], list[Table]]:
        found = self._findings(cells)
        return found.conclusions(), found.tables()

    def plot(self, cells: dict[str, Cell], folder: Path) -> list[Picture]:
        panels: dict[str, dict[str, Any]] = {}
        for entry in self._findings(cells).entries:
            curves = panels.setdefault(entry.data, {"epochs": max(entry.epochs), "rows": {}})["rows"]
            curve = curves.setdefault(entry.row, {"cost": [], "mean": [], "sd": []})
            for key, value in {"cost": entry.cost, "mean": fmean(entry.nll), "sd": stdev(entry.nll)}.items():
                curve[key].append(value)
        if not panels:
            return []
        papers = {
            data: {row.row: {cost: value for cost, (value, _) in row.at(data).items()} for row in PUBLISHED if row.in_paper}
            for data in panels
        }
        figure, numbers = plot_table(panels, {row: each.label for row, each in ROWS.items()}, papers, DATA)
        alt = (
            "Test NLL with the spread of its replicas against the cost, a mark for each objective and a panel for each data set. "
            "The table beside it holds the same numbers."
        )
        title = "Test NLL of each training objective against its cost"
        return [save_picture(figure, numbers, folder, "table1.png", title, alt)]
