"""What an estimate gives for its cost: SUMO under different laws of K, IWAE and later estimators, on one trained model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from dohyo.contract import bound
from dohyo.errors import DohyoError
from dohyo.estimators import ESTIMATORS, IWAE, SUMO, Estimator, MultilevelRR, to_dict
from dohyo.estimators.roulette import PrefixRoulette, power_law_with_mean
from dohyo.evaluation import evaluate, isolated, most_rows
from dohyo.lab.experiments.density import DensityRun
from dohyo.lab.folder import Conclusion, Picture, Table
from dohyo.lab.plots.nll import plot_estimates
from dohyo.lab.studies.estimates_findings import LAWS, NAMES, Findings
from dohyo.lab.studies.runs import complete, given_or
from dohyo.lab.studies.study import Advance, Cell, Study, StudyConfig, save_picture
from dohyo.lab.training.config import option
from dohyo.lab.training.processes import launch
from dohyo.laws import Geometric, HarmonicTail
from dohyo.marginal import log_marginal
from dohyo.packing import rows

_MORE = 5  # terms that the laws add on average
_MOST_DRAWS = 32  # of one stratum for each datum
_CHUNK = 10  # data at a time


@dataclass(frozen=True)
class EstimatesConfig(StudyConfig):
    """The numbers of the study."""

    data: str = option("mnist", "What the VAE is trained on: mnist, digits, or a file.")
    hidden: int = option(200, "Units in each hidden layer of the VAE.")
    latent: int = option(50, "Its latent dimensions.")
    epochs: int = option(2000, "How long it is trained, by the ELBO.")
    images: int = option(10_000, "How many test images the estimates are of.")
    runs: int = option(100, "Each makes one estimate for every image.")
    always: tuple[int, ...] = option((1, 5, 10, 20, 45), "The terms m that are always computed; the cost is 5 more.")
    truth_terms: int = option(2048, "The m of the multilevel estimates that serve as the truth; they cost three times as much.")
    truth_replicates: int = option(8, "How many of those for each image.")
    depth: int = option(2048, "The deepest K where every K is counted.")
    run: Path | None = option(None, "The folder of a run of `dohyo train`, to use its model instead.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.run is not None:
            DensityRun.open(self.run)  # so that a wrong folder is reported before anything begins
        self._at_least(images=2, runs=2, truth_terms=1, truth_replicates=2)
        if not self.always or min(self.always) < 1:
            raise DohyoError(f"always is {self.always}; it must be one or more numbers of terms of at least 1")
        if not 8 <= self.depth <= 2048:
            raise DohyoError(f"depth is {self.depth}; it must be from 8 to 2048, beyond which the geometric law underflows")


class Estimates(Study[EstimatesConfig]):
    """The study `estimates`."""

    name = "estimates"
    title = "SUMO under different laws, and IWAE, at the same cost"
    question = (
        "A VAE is trained by IWAE_1, and its test NLL is then estimated again and again, at costs of m + 5 log-weights for each "
        "image. Does SUMO give the right value where IWAE does not, how much does the law of K matter, and what do later "
        "estimators give for the same cost?"
    )
    SCALES = {  # noqa: RUF012
        "smoke": EstimatesConfig(
            data="digits", hidden=32, latent=8, epochs=15, images=40, runs=20, always=(1, 10), truth_terms=128, depth=64
        ),
        "small": EstimatesConfig(epochs=20, images=200, truth_terms=512),
        "paper": EstimatesConfig(),
    }
    picks = ("estimator", "cost")

    def cells(self) -> dict[str, Cell]:
        c = self.config
        training = ("run",) if c.run is not None else ("data", "hidden", "latent", "epochs")
        model = {"seed": c.seed} | {key: str(c.run) if key == "run" else getattr(c, key) for key in training}
        cells: dict[str, Cell] = {"model": model}
        cells["truth"] = model | {key: getattr(c, key) for key in ("images", "truth_terms", "truth_replicates", "depth")}
        cells["every-k"] = {**model, "images": c.images, "depth": c.depth, "always": c.always}
        for name in NAMES:
            for m in c.always:
                options = {"estimator": name, "cost": m + _MORE, "images": c.images, "runs": c.runs}
                cells[f"{name}_{m + _MORE:03d}"] = {**model, **options, "arguments": to_dict(estimator_at(name, m))}
        return cells

    def run_of(self, name: str, options: Cell, folder: Path) -> DensityRun:
        c = self.config
        return given_or(
            c.run, folder.parent / "model", data=c.data, hidden=c.hidden, latent=c.latent, estimator="elbo", cost=1,
            epochs=c.epochs, test_terms=50, seed=c.seed, device=c.device,
        )  # fmt: skip

    def run_cell(self, name: str, options: Cell, folder: Path, advance: Advance) -> Cell:
        run = self.run_of(name, options, folder)
        if self.config.run is None:
            complete(run, advance if name == "model" else lambda share: None)
        if name == "model":
            result = run.result or {}
            return {key: result.get(key) for key in ("test_nll", "test_nll_stderr", "test_terms", "valid_nll", "epochs")}
        device = launch(self.config.device).device
        model: Any = run.trained().to(device)
        x = run.data.test[: options["images"]].to(device)
        seed = (options["seed"] << 32) + crc32(name.encode())  # each cell has its own noise
        max_rows = most_rows(x, None)
        if name == "truth":
            return _truth(model, x, options, seed, max_rows, advance)
        if name == "every-k":
            laws = {f"{law}_{m + _MORE:03d}": estimator_at(law, m) for law in LAWS for m in options["always"]}
            with isolated(model, seed):
                found = mean_over_every_k(model, x, laws, options["depth"], max_rows, advance)
            return {key: {"nll": -mean, "stderr": stderr} for key, (mean, stderr) in found.items()}
        estimator, means = estimator_at(options["estimator"], options["cost"] - _MORE), []
        with isolated(model, seed):
            generator = torch.Generator().manual_seed(seed + 1_000_003)  # not the bits that make z
            for number in range(options["runs"]):
                means.append(float(log_marginal(model, x, estimator, generator, max_rows=max_rows).mean()))
                advance((number + 1) / options["runs"])
        known = {"expected_cost": estimator.expected_cost, "finite_variance": estimator.finite_variance}
        return {**known, "nll": [-mean for mean in means]}

    def summarise(self, cells: dict[str, Cell]) -> tuple[list[Conclusion], list[Table]]:
        if "truth" not in cells:
            return [], []
        found = self._findings(cells)
        return found.conclusions(), found.tables(f"{self.config.runs} runs on {self.config.images} images")

    def _findings(self, cells: dict[str, Cell]) -> Findings:
        return Findings(cells, [m + _MORE for m in self.config.always])

    def plot(self, cells: dict[str, Cell], folder: Path) -> list[Picture]:
        found = self._findings(cells) if "truth" in cells else None
        if found is None or not found.offsets:
            return []
        curves: dict[str, Any] = {
            name: {key: [getattr(offset, key) for offset in each] for key in ("cost", "mean", "sd")}
            for name, each in found.offsets.items()
        }
        for name, each in found.every_k.items():
            if len(each) == len(found.offsets.get(name, ())):
                curves[name] |= {"every_k": [e["nll"] for e in each], "every_k_stderr": [e["stderr"] for e in each]}
        truth, c = cells["truth"], self.config
        figure, numbers = plot_estimates(curves, NAMES, (truth["nll"], truth["stderr"]), c.runs, c.images)
        title = f"Test NLL of a VAE trained by the ELBO on {c.run or c.data}: mean and spread of {c.runs} runs against cost"
        alt = (
            "A panel for each estimator beside IWAE: means against cost with their errors, a band of one standard deviation of a "
            "run, the true NLL as a line, and for SUMO the mean with every K counted. The last panel has the standard deviations."
        )
        return [save_picture(figure, numbers, folder, "estimates.png", title, alt)]


def estimator_at(name: str, m: int) -> Any:
    """The estimator of this name at cost m + 5; SUMO always computes m terms, and its law adds 5 on average."""
    if name in LAWS:
        laws = {"sumo-harmonic": HarmonicTail(), "sumo-geometric": Geometric(1 / _MORE)}
        return SUMO(m, laws.get(name) or power_law_with_mean(_MORE, 1.5, math.inf))
    return ESTIMATORS[name].at_cost(m + _MORE)


def _truth(model: Any, x: Tensor, options: Cell, seed: int, max_rows: int, advance: Advance) -> Cell:
    """The NLL without bias, and the bound with as many terms as the deepest K where every K is counted."""

    def found(estimator: Estimator, replicates: int, begin: float, end: float) -> Any:
        return evaluate(
            model, x, estimator, replicates=replicates, seed=seed, batch_size=10, max_rows=max_rows,
            progress=lambda done: advance(begin + (end - begin) * done / len(x)),
        )  # fmt: skip

    truth = found(MultilevelRR(options["truth_terms"]), options["truth_replicates"], 0.0, 0.8)
    bound = found(IWAE(options["depth"]), 2, 0.8, 1.0)
    khat = truth.to_dict()["khat"]
    iwae = {"iwae_terms": options["depth"], "iwae_nll": -bound.mean, "iwae_stderr": bound.noise_stderr}
    return {"nll": -truth.mean, "stderr": truth.noise_stderr, **iwae, "khat": khat}


def strata(depth: int) -> list[tuple[int, int]]:
    """First and last K of each stratum, doubling in length.

    Example:
        >>> strata(8)
        [(0, 0), (1, 1), (2, 3), (4, 7), (8, 8)]
    """
    firsts = [0, *(2**i for i in range(depth.bit_length()))]
    return [(first, min(depth, after - 1)) for first, after in zip(firsts, [*firsts[1:], depth + 1], strict=True)]


@torch.no_grad()
def mean_over_every_k(
    model: Any, x: Tensor, estimators: Mapping[str, PrefixRoulette], depth: int, max_rows: int, advance: Advance
) -> dict[str, tuple[float, float]]:
    r"""The mean over x of each roulette estimator, and the standard error of its noise; all use the same log-weights.

    .. math:: E[\hat Y] = \sum_b \sum_{K \in b} P(K)\, E[\hat Y_K]

    Plain draws hardly ever have a deep K, and so miss what those add to the mean. Here the depths are cut into strata b, each
    gets log-weights of its own, and in each every K counts with its probability.

    Args:
        depth: A deeper K counts as this one, so that the mean is that of IWAE with m + depth terms.
    """
    most = max(estimator.m for estimator in estimators.values())
    found = {name: torch.zeros(2, dtype=torch.float64) for name in estimators}
    parts, done = strata(depth), 0
    for data in x.split(_CHUNK):
        source = bound(model, data)
        for first, last in parts:
            draws = min(_MOST_DRAWS, max(2, depth // (last + 1)))
            wanted = rows(torch.full((len(data),), draws * (most + last)))
            packed = torch.cat([source(part) for part in wanted.split(max_rows)])
            log_w = packed.view(len(data) * draws, most + last).double()
            for name, estimator in estimators.items():
                own = contribution(estimator, log_w, first, last, last == depth).view(len(data), draws)
                found[name] += torch.stack([own.mean(-1).sum(), own.var(-1).sum() / draws]).cpu()
        done += len(data)
        advance(done / len(x))
    return {name: (float(total[0]) / len(x), math.sqrt(total[1]) / len(x)) for name, total in found.items()}


def contribution(estimator: PrefixRoulette, log_w: Tensor, first: int, last: int, deepest: bool) -> Tensor:
    """The sum over K from first to last of P(K) times the estimate at K, for each row; the deepest takes what is beyond it."""
    survival = estimator.law.survival(torch.arange(first, last + 2))
    survival[0] = 1.0 if first == 0 else survival[0]
    if deepest:
        survival[-1] = 0.0
    probability = (survival[:-1] - survival[1:]).to(log_w.device)
    paths = estimator.paths(log_w[:, : estimator.m + last])[:, first : last + 1]
    return (paths * probability).sum(-1)
