"""Training through annealed chains against training by samples of the encoder, at equal time; not in the paper."""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from dohyo.annealing import Annealed
from dohyo.errors import DohyoError
from dohyo.estimators import IWAE
from dohyo.evaluation import evaluate
from dohyo.lab.experiments.density import DensityRun
from dohyo.lab.experiments.density_config import DensityConfig
from dohyo.lab.folder import Conclusion, Picture, Table
from dohyo.lab.plots.nll import plot_times
from dohyo.lab.studies.study import Advance, Cell, Study, StudyConfig, save_picture
from dohyo.lab.studies.study import Row as TableRow
from dohyo.lab.studies.verdicts import Contrast, all_below, listed
from dohyo.lab.training.config import option
from dohyo.lab.training.processes import launch

SetName = Literal["digits", "mnist", "mnist-static", "omniglot"]
RowName = Literal["iwae-5", "iwae-15", "iwae-50", "sumo-15", "chains-4x4", "chains-2x8", "chains-8x8"]
ROWS: dict[str, dict[str, Any]] = {
    "iwae-5": {"estimator": "iwae", "cost": 5},
    "iwae-15": {"estimator": "iwae", "cost": 15},
    "iwae-50": {"estimator": "iwae", "cost": 50},
    "sumo-15": {"estimator": "sumo", "cost": 15},
    "chains-4x4": {"estimator": "iwae", "cost": 4, "anneal": 4},
    "chains-2x8": {"estimator": "iwae", "cost": 2, "anneal": 8},
    "chains-8x8": {"estimator": "iwae", "cost": 8, "anneal": 8},
}
LABELS = {
    "iwae-5": "IWAE-5", "iwae-15": "IWAE-15", "iwae-50": "IWAE-50", "sumo-15": "SUMO at 15",
    "chains-4x4": "4 chains of 4", "chains-2x8": "2 chains of 8", "chains-8x8": "8 chains of 8",
}  # fmt: skip


@dataclass(frozen=True)
class AnnealingConfig(StudyConfig):
    """The numbers of the study."""

    sets: tuple[SetName, ...] = option(("mnist", "omniglot"), "What is trained on: digits, mnist, mnist-static or omniglot.")
    rows: tuple[RowName, ...] = option(tuple(ROWS), "What theta follows; phi follows DReG throughout.")
    hidden: int = option(200, "Units in each hidden layer.")
    latent: int = option(50, "Latent dimensions.")
    times: tuple[float, ...] = option((75, 150, 300, 600), "Seconds of training after which the models are tested.")
    test_terms: int = option(5000, "The test NLL by the encoder is by IWAE with this many terms.")
    images: int = option(2000, "Test images on which the models are compared by annealed weights.")
    steps: int = option(16, "Leapfrogs of these chains, whatever a model was trained by.")
    weights: int = option(256, "Of these chains, for each image.")
    replicas: int = option(3, "Runs in each cell, with seeds of their own; two or more, for a spread.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(replicas=2, images=2, steps=1, weights=1)
        if not self.times or list(self.times) != sorted(set(self.times)) or self.times[0] <= 0:
            raise DohyoError(f"times are {self.times}; give positive numbers of seconds that rise")


class Annealing(Study[AnnealingConfig]):
    """The study `annealing`."""

    name = "annealing"
    title = "Training through annealed chains, at equal time"
    question = (
        "Theta follows samples of the encoder, or the ends of annealed chains, which are better samples of the posterior and "
        "cost more. After equal times of training on the same machine, which model has the lower test NLL by annealed weights, "
        "the same for all? And does IWAE with many terms put the models in the same order?"
    )
    SCALES = {  # noqa: RUF012
        "smoke": AnnealingConfig(
            sets=("digits",), rows=("iwae-5", "chains-2x8"), hidden=16, latent=4, times=(0.01, 0.02), test_terms=20,
            images=20, steps=2, weights=4, replicas=2,
        ),
        "small": AnnealingConfig(
            sets=("digits",), hidden=64, latent=16, times=(15, 30, 60), test_terms=200, images=300, weights=64
        ),
        "paper": AnnealingConfig(),
    }  # fmt: skip
    picks = ("data", "row")

    def cells(self) -> dict[str, Cell]:
        c = self.config
        keys = ("hidden", "latent", "times", "test_terms", "images", "steps", "weights", "replicas", "seed")
        common = {key: getattr(c, key) for key in keys}
        return {f"{data}_{row}": {"data": data, "row": row, **common} for data in c.sets for row in c.rows}

    def run_of(self, name: str, options: Cell, folder: Path) -> DensityRun:
        keys = ("data", "hidden", "latent", "test_terms", "replicas", "seed")
        known = {key: options[key] for key in keys} | ROWS[options["row"]]
        config = DensityConfig(**known, encoder="dreg", epochs=10**6, max_seconds=options["times"][-1], device=self.config.device)
        return DensityRun(folder, config)

    def run_cell(self, name: str, options: Cell, folder: Path, advance: Advance) -> Cell:
        """Train up to each time in turn, and test there."""
        found: dict[str, list[Any]] = {"epochs": [], "seconds": [], "test_nll": [], "annealed_nll": []}
        last = options["times"][-1]
        for seconds in options["times"]:
            run = self.run_of(name, options, folder)
            run.config.max_seconds = seconds
            result = run.complete(
                launch(self.config.device),
                on_epoch=lambda record: advance(min(1.0, record["seconds"] / last)),
                on_test=lambda done, total: advance(1.0),
            )
            for key in ("epochs", "seconds", "test_nll"):
                found[key].append([replica[key] for replica in result["replicas"]])
            found["annealed_nll"].append([self._annealed(replica, options) for replica in run.replicas])
        return found | {key: result[key] for key in ("expected_cost", "decoder_passes", "test_terms")}

    def _annealed(self, run: DensityRun, options: Cell) -> float:
        """The NLL of the test images by chains tuned on them."""
        device = launch(self.config.device).device
        model, x = run.trained().to(device), run.data.test[: options["images"]].to(device)
        annealed = Annealed(model, options["steps"])  # type: ignore[arg-type]
        annealed.tune(x, seed=options["seed"])
        return -evaluate(annealed, x, IWAE(options["weights"]), khat_samples=0, seed=options["seed"]).mean

    def _rows(self, cells: dict[str, Cell], data: str) -> dict[str, Cell]:
        return {row: cells[f"{data}_{row}"] for row in self.config.rows if f"{data}_{row}" in cells}

    def summarise(self, cells: dict[str, Cell]) -> tuple[list[Conclusion], list[Table]]:
        conclusions, tables = [], []
        for data in self.config.sets:
            rows = self._rows(cells, data)
            if len(rows) == len(self.config.rows):
                conclusions += [*self._better(data, rows), *self._order(data, rows)]
            lines: list[TableRow] = []
            for row, cell in rows.items():
                each = zip(self.config.times, cell["epochs"], cell["annealed_nll"], cell["test_nll"], strict=True)
                lines += [[LABELS[row], t, round(fmean(epochs)), *_spread(nll), *_spread(iwae)] for t, epochs, nll, iwae in each]
            c = self.config
            columns = ["theta follows", "seconds", "epochs", "NLL, annealed", "sd", f"NLL, IWAE-{c.test_terms}", "sd"]
            note = (
                f"Annealed: {c.images} test images, {c.weights} weights of {c.steps} leapfrogs tuned on them. IWAE: all test "
                f"images. sd is over {c.replicas} replicas. Times are of training on one machine, so that no two runs are alike."
            )
            tables += [Table(f"Test NLL against time, {data}", columns, lines, note)] if lines else []
        return conclusions, tables

    def _better(self, data: str, rows: dict[str, Cell]) -> list[Conclusion]:
        """The best chains against the best samples of the encoder, after the longest time."""
        last = {row: cell["annealed_nll"][-1] for row, cell in rows.items()}
        groups = [[row for row in last if row.startswith("chains") == chains] for chains in (True, False)]
        if not all(groups):
            return []
        chains, samples = (min(group, key=lambda row: fmean(last[row])) for group in groups)
        contrast = Contrast.of((1, last[chains]), (-1, last[samples]))
        text = f"{data}, {LABELS[chains]} less {LABELS[samples]} after {self.config.times[-1]:g} s: {listed({'NLL': contrast})}"
        claim = "At equal time a model trained through chains is better than the best of those trained by samples of the encoder"
        return [Conclusion(claim, "", text, all_below([contrast]))]

    def _order(self, data: str, rows: dict[str, Cell]) -> list[Conclusion]:
        """Whether both ways of testing agree on the best row; no verdict where they do by chance as likely as not."""
        best = [min(rows, key=lambda row: fmean(rows[row][key][-1])) for key in ("annealed_nll", "test_nll")]
        gap = Contrast.of((1, rows[best[0]]["test_nll"][-1]), (-1, rows[best[1]]["test_nll"][-1]))
        same = best[0] == best[1]
        text = f"{data}: the best is {LABELS[best[0]]} by annealed weights and {LABELS[best[1]]} by IWAE-{self.config.test_terms}"
        holds = True if same else False if gap.mean > gap.half() else None
        return [Conclusion("IWAE with many terms finds the same model best as annealed weights do", "", text, holds)]

    def plot(self, cells: dict[str, Cell], folder: Path) -> list[Picture]:
        panels: dict[str, Any] = {}
        for data in self.config.sets:
            for row, cell in self._rows(cells, data).items():
                curve = {"seconds": list(self.config.times)} | {
                    key: [of(each) for each in cell["annealed_nll"]] for key, of in (("mean", fmean), ("sd", stdev))
                }
                panels.setdefault(data, {})[LABELS[row]] = curve
        if not panels:
            return []
        figure, numbers = plot_times(panels)
        alt = "The test NLL by annealed weights against seconds of training, a curve for each way to train, with error bars."
        return [save_picture(figure, numbers, folder, "annealing.png", "Test NLL against the time of training", alt)]


def _spread(values: list[float]) -> tuple[float, float]:
    return round(fmean(values), 3), round(stdev(values), 3)
