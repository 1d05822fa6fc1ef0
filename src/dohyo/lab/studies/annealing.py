"""Training through annealed chains against training by samples of the encoder, at equal time; not in the paper."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dohyo.annealing import Annealed
from dohyo.errors import DohyoError
from dohyo.estimators import IWAE
from dohyo.evaluation import evaluate
from dohyo.lab.experiments.density import DensityRun
from dohyo.lab.experiments.density_config import DensityConfig
from dohyo.lab.folder import Conclusion, Picture, Table
from dohyo.lab.plots.nll import plot_times
from dohyo.lab.studies.study import Advance, Cell, Row, Study, StudyConfig, save_picture
from dohyo.lab.studies.verdicts import Contrast, all_below, listed
from dohyo.lab.training.config import option
from dohyo.lab.training.processes import launch

SetName = Literal["digits", "mnist", "mnist-static", "omniglot"]
RowName = Literal[
    "iwae-5", "iwae-15", "iwae-50", "sumo-15", "chains-4x4", "chains-2x8",
    "iwae-5-then-iwae-50", "iwae-5-then-chains-4x4", "iwae-5-then-chains-2x8", "iwae-5-then-chains-8x8",
    "iwae-5-then-chains-1x16", "iwae-5-then-chains-8x2",
]  # fmt: skip
FOLLOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "iwae-5": ("IWAE-5", {"estimator": "iwae", "cost": 5}),
    "iwae-15": ("IWAE-15", {"estimator": "iwae", "cost": 15}),
    "iwae-50": ("IWAE-50", {"estimator": "iwae", "cost": 50}),
    "sumo-15": ("SUMO at 15", {"estimator": "sumo", "cost": 15}),
    "chains-4x4": ("4 chains of 4", {"estimator": "iwae", "cost": 4, "anneal": 4}),
    "chains-2x8": ("2 chains of 8", {"estimator": "iwae", "cost": 2, "anneal": 8}),
    "chains-8x8": ("8 chains of 8", {"estimator": "iwae", "cost": 8, "anneal": 8}),
    "chains-1x16": ("1 chain of 16", {"estimator": "iwae", "cost": 1, "anneal": 16}),
    "chains-8x2": ("8 chains of 2", {"estimator": "iwae", "cost": 8, "anneal": 2}),
}


def halves(row: str) -> tuple[str, str]:
    """What theta follows in the first half of the time, and in the second."""
    first, _, second = row.partition("-then-")
    return first, second or first


def label(row: str) -> str:
    first, second = (FOLLOWED[name][0] for name in halves(row))
    return first if first == second else f"{first}, then {second}"


@dataclass(frozen=True)
class AnnealingConfig(StudyConfig):
    """The numbers of the study."""

    sets: tuple[SetName, ...] = option(("mnist", "omniglot"), "What is trained on: digits, mnist, mnist-static or omniglot.")
    rows: tuple[RowName, ...] = option(
        get_args(RowName), "What theta follows, or follows first and then; phi follows DReG throughout."
    )
    hidden: int = option(200, "Units in each hidden layer.")
    latent: int = option(50, "Latent dimensions.")
    learning_rate: float = option(1e-3, "Adam's, for the first half of the time; then it falls along a cosine.")
    times: tuple[float, ...] = option((150, 300, 600), "Seconds of training; each has runs of its own.")
    test_terms: int = option(5000, "The test NLL by the encoder is by IWAE with this many terms.")
    images: int = option(2000, "Test images on which the models are compared by annealed weights.")
    steps: int = option(16, "Leapfrogs of these chains, whatever a model was trained by.")
    weights: int = option(256, "Of these chains, for each image.")
    replicas: int = option(3, "Runs in each cell, with seeds of their own; two or more, for a spread.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(replicas=2, images=2, steps=1, weights=1, test_terms=1)
        if not self.times or list(self.times) != sorted(set(self.times)) or self.times[0] <= 0:
            raise DohyoError(f"times are {self.times}; give positive numbers of seconds that rise")


class Annealing(Study[AnnealingConfig]):
    """The study `annealing`."""

    name = "annealing"
    title = "Training through annealed chains, at equal time"
    question = (
        "Theta follows samples of the encoder, or the ends of annealed chains, which are better samples of the posterior and "
        "cost more; or samples for one half of the time, and then chains. After equal times of training on the same machine, "
        "which model has the lower test NLL by annealed weights, the same for all? And does IWAE with many terms put the models "
        "in the same order?"
    )
    SCALES = {  # noqa: RUF012
        "smoke": AnnealingConfig(
            sets=("digits",), rows=("iwae-5", "chains-2x8", "iwae-5-then-chains-2x8"), hidden=16, latent=4, times=(0.01, 0.02),
            test_terms=20, images=20, steps=2, weights=4, replicas=2,
        ),
        "small": AnnealingConfig(
            sets=("digits",), rows=get_args(RowName)[:9], hidden=64, latent=16, learning_rate=2e-3, times=(60,),
            test_terms=500, images=300, weights=128,
        ),
        "paper": AnnealingConfig(),
    }  # fmt: skip
    picks = ("data", "row")

    def cells(self) -> dict[str, Cell]:
        c = self.config
        keys = ("hidden", "latent", "learning_rate", "times", "test_terms", "images", "steps", "weights", "replicas", "seed")
        common = {key: getattr(c, key) for key in keys}
        return {f"{data}_{row}": {"data": data, "row": row, **common} for data in c.sets for row in c.rows}

    def run_of(self, name: str, options: Cell, folder: Path) -> DensityRun:
        return self._half(options, folder, self._teams(options)[0], options["times"][0] / 2)

    def _teams(self, options: Cell) -> list[dict[str, int]]:
        """Seeds that are trained at once: all on a GPU; on a CPU each alone, since stacked networks are slower there."""
        seed, count = options["seed"], options["replicas"]
        if launch(self.config.device).device.type == "cpu":
            return [{"seed": seed + i, "replicas": 1} for i in range(count)]
        return [{"seed": seed, "replicas": count}]

    def _half(
        self, options: Cell, folder: Path, team: dict[str, int], seconds: float, init_from: Path | None = None
    ) -> DensityRun:
        """The first half, at a constant rate; or the second, from the first one's parameters with a rate that falls."""
        second = init_from is not None
        known = {key: options[key] for key in ("data", "hidden", "latent", "learning_rate")} | team
        known |= FOLLOWED[halves(options["row"])[second]][1] | {"anneal_from": 0.0}
        known |= dict.fromkeys(("epochs", "lr_patience", "stop_patience"), 10**9)  # the time decides
        config = DensityConfig(
            **known, data_seed=options["seed"], encoder="dreg", optimiser="adam", clip_decoder=None, clip_encoder=None,
            schedule="cosine" if second else "plateau", test_terms=options["test_terms"] if second else 1,
            max_seconds=seconds, init_from=init_from, device=self.config.device,
        )  # fmt: skip
        return DensityRun(folder, config)

    def run_cell(self, name: str, options: Cell, folder: Path, advance: Advance) -> Cell:
        """Train for each time, and test there."""
        found: dict[str, list[Any]] = {key: [] for key in ("epochs", "seconds", "test_nll", "annealed_nll")}
        teams, fabric, before = self._teams(options), launch(self.config.device), 0.0
        whole = sum(options["times"]) * len(teams)

        def trained(run: DensityRun, begun: float) -> Any:
            return run.complete(fabric, on_epoch=lambda record: advance(min(1.0, (begun + record["seconds"]) / whole)))

        for time in options["times"]:
            here: dict[str, list[Any]] = {key: [] for key in found}
            for team in teams:
                own = folder / f"{time:g}" / f"seed_{team['seed']}"
                first = trained(self._half(options, own / "first", team, time / 2), before)
                left = max(time - first["seconds"], 1e-6 * time)  # the last epoch of the first half may have taken some of it
                run = self._half(options, own / "second", team, left, own / "first")
                second = trained(run, before + time / 2)
                here["epochs"].append(first["epochs"] + second["epochs"])
                here["seconds"].append(first["seconds"] + second["seconds"])
                here["test_nll"] += [one["test_nll"] for one in second.get("replicas", [second])]
                here["annealed_nll"] += [self._annealed(one, options) for one in run.replicas or [run]]
                before += time
            of_images = torch.stack(here["annealed_nll"])
            here["annealed_nll"] = of_images.mean(1).tolist()
            for key, values in here.items():
                found[key].append(values)
        rounded = [round(value, 3) for value in of_images.mean(0).tolist()]
        return found | {"decoder_passes": second["decoder_passes"], "last_annealed_nll_of_images": rounded}

    def _annealed(self, run: DensityRun, options: Cell) -> Tensor:
        """The NLL of test images by chains tuned on them."""
        device = launch(self.config.device).device
        model, x = run.trained().to(device), run.data.test[: options["images"]].to(device)
        annealed = Annealed(model, options["steps"])  # type: ignore[arg-type]
        annealed.tune(x, iterations=100, mixing=False, seed=options["seed"])
        return -evaluate(annealed, x, IWAE(options["weights"]), khat_samples=0, seed=options["seed"]).per_datum

    @property
    def _iwae(self) -> str:
        return f"IWAE-{self.config.test_terms}"

    def _rows(self, cells: dict[str, Cell], data: str) -> dict[str, Cell]:
        return {row: cells[f"{data}_{row}"] for row in self.config.rows if f"{data}_{row}" in cells}

    def summarise(self, cells: dict[str, Cell]) -> tuple[list[Conclusion], list[Table]]:
        conclusions, tables, c = list[Conclusion](), list[Table](), self.config
        for data in c.sets:
            rows = self._rows(cells, data)
            if len(rows) == len(c.rows):
                conclusions += [*self._better(data, rows), self._order(data, rows)]
            lines: list[Row] = []
            for row, cell in rows.items():
                each = zip(c.times, cell["epochs"], cell["seconds"], cell["annealed_nll"], cell["test_nll"], strict=True)
                lines += [
                    [label(row), t, round(fmean(seconds), 1), round(fmean(epochs)), *_spread(nll), *_spread(iwae)]
                    for t, epochs, seconds, nll, iwae in each
                ]
            columns = ["theta follows", "time", "seconds", "epochs", "NLL, annealed", "sd", f"NLL, {self._iwae}", "sd of it"]
            note = (
                f"Annealed: {c.images} test images, {c.weights} weights of {c.steps} leapfrogs tuned on them. IWAE: all test "
                f"images. sd is over {c.replicas} replicas, trained one after the other on a CPU and at once on a GPU. An epoch "
                "that has begun is done, so that seconds may exceed the time. Adam: half at a constant rate, half by a cosine."
            )
            tables += [Table(f"Test NLL against time, {data}", columns, lines, note)] if lines else []
            tables += self._differences(data, rows)
        return conclusions, tables

    def _best(self, rows: dict[str, Cell], among: Callable[[str], bool]) -> str | None:
        """The row with the lowest NLL by annealed weights after the longest time."""
        return min(filter(among, rows), key=lambda row: fmean(rows[row]["annealed_nll"][-1]), default=None)

    def _differences(self, data: str, rows: dict[str, Cell]) -> list[Table]:
        """Every row less the best that follows samples of the encoder only."""
        best = self._best(rows, by_samples)
        if best is None or len(rows) < 2:
            return []
        lines: list[Row] = []
        for row, cell in rows.items():
            if row != best:
                seeds = _paired(cell["annealed_nll"][-1], rows[best]["annealed_nll"][-1])
                images = _paired(cell["last_annealed_nll_of_images"], rows[best]["last_annealed_nll_of_images"])
                errors = [stdev(values) / math.sqrt(len(values)) for values in (seeds, images)]
                iwae = fmean(cell["test_nll"][-1]) - fmean(rows[best]["test_nll"][-1])
                lines.append([label(row), *(round(value, 3) for value in (fmean(seeds), *errors, iwae))])
        columns = ["theta follows", "NLL, annealed", "stderr over seeds", "stderr over images", f"NLL, {self._iwae}"]
        note = f"Paired by seeds and by images; below zero where better than {label(best)}."
        title = f"Differences from {label(best)} after {self.config.times[-1]:g} s, {data}"
        return [Table(title, columns, lines, note)]

    def _better(self, data: str, rows: dict[str, Cell]) -> Iterator[Conclusion]:
        """The best rows with chains, throughout and in the second half, against the best with samples of the encoder."""
        samples = self._best(rows, by_samples)
        claims = {
            "through chains from the start": lambda row: row.startswith("chains"),
            "by IWAE-5 first and then through chains": lambda row: "then-chains" in row,
        }
        for text, among in claims.items():
            chains = self._best(rows, among)
            if samples is not None and chains is not None:
                contrast = Contrast.of((1, _paired(rows[chains]["annealed_nll"][-1], rows[samples]["annealed_nll"][-1])))
                shown = f"{data}, {label(chains)} less {label(samples)} after {self.config.times[-1]:g} s"
                claim = f"At equal time a model trained {text} is better than the best of those trained by samples of the encoder"
                yield Conclusion(claim, "", f"{shown}: {listed({'NLL': contrast})}", all_below([contrast]))

    def _order(self, data: str, rows: dict[str, Cell]) -> Conclusion:
        """Whether both ways of testing agree on the best row; no verdict where they do by chance as likely as not."""
        best = [min(rows, key=lambda row: fmean(rows[row][key][-1])) for key in ("annealed_nll", "test_nll")]
        gap = Contrast.of((1, rows[best[0]]["test_nll"][-1]), (-1, rows[best[1]]["test_nll"][-1]))
        text = f"{data}: the best is {label(best[0])} by annealed weights and {label(best[1])} by {self._iwae}"
        holds = True if best[0] == best[1] else False if gap.mean > gap.half() else None
        return Conclusion("IWAE with many terms finds the same model best as annealed weights do", "", text, holds)

    def plot(self, cells: dict[str, Cell], folder: Path) -> list[Picture]:
        panels: dict[str, Any] = {}
        for data in self.config.sets:
            for row, cell in self._rows(cells, data).items():
                mean, sd = ([of(each) for each in cell["annealed_nll"]] for of in (fmean, stdev))
                panels.setdefault(data, {})[label(row)] = {"seconds": self.config.times, "mean": mean, "sd": sd}
        if not panels:
            return []
        figure, numbers = plot_times(panels)
        alt = "The test NLL by annealed weights for each way to train, with error bars, a mark for each time of training."
        return [save_picture(figure, numbers, folder, "annealing.png", "Test NLL after equal times of training", alt)]


def _spread(values: list[float]) -> tuple[float, float]:
    return round(fmean(values), 3), round(stdev(values), 3)


def by_samples(row: str) -> bool:
    """Whether theta follows samples of the encoder throughout."""
    return "chains" not in row


def _paired(ours: list[float], theirs: list[float]) -> list[float]:
    """The differences by seed, where the first parameters and the data's order are the same, or by image."""
    return [a - b for a, b in zip(ours, theirs, strict=True)]
