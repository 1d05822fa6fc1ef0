"""How fast the terms of each series fall: the paper's appendix, on its toy and on a trained VAE."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

from dohyo.contract import bound
from dohyo.errors import DohyoError
from dohyo.evaluation import isolated
from dohyo.lab.experiments.density import DensityRun
from dohyo.lab.folder import Conclusion, Picture, Table
from dohyo.lab.plots.convergence import plot_cross_terms, plot_rates
from dohyo.lab.studies.convergence_findings import MOMENTS, Findings
from dohyo.lab.studies.differences import SERIES, cross_moments, second_moments
from dohyo.lab.studies.runs import complete, given_or
from dohyo.lab.studies.study import Advance, Cell, Study, StudyConfig, save_picture
from dohyo.lab.training.config import option
from dohyo.lab.training.processes import launch
from dohyo.models import LatentVariableModel
from dohyo.packing import rows

_CHUNK = 1000  # sequences of log-weights at a time, for the cross terms


@dataclass(frozen=True)
class ConvergenceConfig(StudyConfig):
    """The numbers of the study."""

    dimension: int = option(20, "The dimension of x and z in the toy.")
    points: int = option(1000, "How many data points the toy has.")
    perturbation: float = option(0.01, "The standard deviation of the noise on the toy's optimal parameters.")
    trials: int = option(10, "Each with perturbed parameters and noise of its own.")
    samples: int = option(1000, "Sequences of log-weights in a trial of the toy.")
    max_k: int = option(1024, "The largest k on the toy, a power of two.")
    cross_samples: int = option(1_000_000, "Sequences in a trial for the cross terms.")
    cross_max_k: int = option(64, "The largest index of the cross terms, a power of two.")
    fit_from: int = option(16, "Slopes are fitted from this k on; those of the cross terms from a quarter of it.")
    vae_data: str = option("mnist", "What the VAE is trained on: digits, mnist, or a file.")
    vae_hidden: int = option(200, "Units in each of its hidden layers.")
    vae_latent: int = option(50, "Its latent dimensions.")
    vae_epochs: int = option(100, "How long it is trained, by IWAE with 5 terms.")
    vae_samples: int = option(1000, "Sequences of log-weights in a trial of the VAE.")
    vae_max_k: int = option(1024, "The largest k on the VAE, a power of two.")
    run: Path | None = option(None, "The folder of a run of `dohyo train`, to use its model instead.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.run is not None:
            DensityRun.open(self.run)  # so that a wrong folder is reported before anything begins
        self._at_least(trials=2, samples=1, cross_samples=1, vae_samples=1, dimension=1, points=2)
        for name in ("max_k", "cross_max_k", "vae_max_k"):
            k = getattr(self, name)
            if k < 2 or k & (k - 1):
                raise DohyoError(f"{name} is {k}; it must be a power of two, at least 2")


class Convergence(Study[ConvergenceConfig]):
    """The study `convergence`."""

    name = "convergence"
    title = "How fast the terms of the series fall"
    question = (
        "SUMO adds up differences of consecutive IWAE bounds; how fast they fall decides whether its variance is finite. "
        "The paper proves that E[Δ_k²] and E‖Δᵍ_k‖² are O(k⁻²), sees them fall faster on a Gaussian toy, and argues that the "
        "cross terms E[Δ_i Δ_j] are O(i⁻² j⁻²) and may be dropped. What are the rates there and on a trained VAE, and what are "
        "they for leave-one-out and multilevel differences?"
    )
    SCALES = {  # noqa: RUF012
        "smoke": ConvergenceConfig(
            trials=3, samples=60, max_k=64, cross_samples=4000, cross_max_k=16, fit_from=4,
            vae_data="digits", vae_hidden=16, vae_latent=4, vae_epochs=2, vae_samples=20, vae_max_k=32,
        ),
        "small": ConvergenceConfig(
            max_k=512, cross_samples=100_000,
            vae_data="digits", vae_hidden=100, vae_latent=20, vae_samples=500, vae_max_k=256,
        ),
        "paper": ConvergenceConfig(),
    }  # fmt: skip
    picks = ("part",)

    @property
    def seeds(self) -> list[int]:
        return sorted({_seed(options) for options in self.cells().values()})

    def cells(self) -> dict[str, Cell]:
        c = self.config
        training = ("run",) if c.run is not None else ("vae_data", "vae_hidden", "vae_latent", "vae_epochs")
        parts = {
            "toy": ("dimension", "points", "perturbation", "samples", "max_k"),
            "cross": ("dimension", "points", "perturbation", "cross_samples", "cross_max_k"),
            "vae": (*training, "vae_samples", "vae_max_k"),
        }
        values = {key: str(c.run) if key == "run" else getattr(c, key) for keys in parts.values() for key in keys}
        return {
            f"{part}_{trial:02d}": {"part": part, "trial": trial, "seed": c.seed, **{key: values[key] for key in keys}}
            for part, keys in parts.items()
            for trial in range(1, c.trials + 1)
        }

    def run_of(self, name: str, options: Cell, folder: Path) -> DensityRun:
        c = self.config
        return given_or(
            c.run, folder.parent / "vae", data=c.vae_data, hidden=c.vae_hidden, latent=c.vae_latent, estimator="iwae", cost=5,
            epochs=c.vae_epochs, test_terms=100, seed=c.seed, device=c.device,
        )  # fmt: skip

    def run_cell(self, name: str, options: Cell, folder: Path, advance: Advance) -> Cell:
        part, seed, device = options["part"], _seed(options), launch(self.config.device).device
        model: Any
        if part == "vae":
            run, whole = self.run_of(name, options, folder), advance
            if self.config.run is None:
                complete(run, lambda share: whole(share / 2))
            order = torch.randperm(len(run.data.test), generator=torch.Generator().manual_seed(seed))
            model, x, advance = run.trained(), run.data.test[order], lambda share: whole(0.5 + share / 2)
        else:
            x = toy_data(options["dimension"], options["points"], options["seed"])
            model = Toy(x, options["perturbation"], seed)
        prefix = "" if part == "toy" else f"{part}_"
        samples, ks = options[f"{prefix}samples"], [2**i for i in range(options[f"{prefix}max_k"].bit_length())]
        with isolated(model.to(device), seed):
            if part == "cross":
                return {"k": ks} | _crosses(model, x.to(device), samples, ks, advance)
            with torch.enable_grad():
                squares = second_moments(model, x[torch.arange(samples) % len(x)].to(device), ks, advance)
        return {"k": ks} | {series: dict(zip(MOMENTS, found.tolist(), strict=True)) for series, found in squares.items()}

    def summarise(self, cells: dict[str, Cell]) -> tuple[list[Conclusion], list[Table]]:
        found = Findings(cells, self.config.fit_from)
        return found.conclusions(), found.tables()

    def plot(self, cells: dict[str, Cell], folder: Path) -> list[Picture]:
        found, pictures = Findings(cells, self.config.fit_from), []
        titles = {"toy": "Gaussian toy", "vae": f"VAE ({self.config.run or self.config.vae_data})"}
        shown = {title: part for part, title in titles.items() if len(found.trials[part]) > 1}
        if shown:
            figure, numbers = plot_rates(
                {title: found.ks(part) for title, part in shown.items()},
                {title: {s: found.curves(part, s) for s in SERIES} for title, part in shown.items()},
                {title: {s: [str(found.rate(part, s, w)) for w in MOMENTS] for s in SERIES} for title, part in shown.items()},
                SERIES,
                self.config.fit_from,
            )
            title = "Second moments of the terms, and of their gradients, against k"
            alt = (
                "Log-log plots of the second moment against k for SUMO's, leave-one-out and multilevel terms, with lines of k to "
                "the -2 and to the -4 beside them and the fitted slopes in the legend."
            )
            pictures.append(save_picture(figure, numbers, folder, "convergence.png", title, alt))
        if len(found.trials["cross"]) > 1:
            figure, numbers = plot_cross_terms(found.ks("cross"), {s: found.cross_terms(s) for s in SERIES}, SERIES)
            alt = (
                "Cross terms of each series, multiplied by the claimed rate, against j with a line for each i: they would be "
                "level if the rate is right."
            )
            pictures.append(save_picture(figure, numbers, folder, "cross_terms.png", "Cross terms on the toy", alt))
        return pictures


class Toy(LatentVariableModel):
    r"""Gaussians throughout, in float64, with the best parameters for data x and noise added to each of them.

    .. math:: p(z) = N(\theta, I), \quad p(x \mid z) = N(z, I), \quad q(z; x) = N(A x + b, \tfrac23 I)

    At the optimum theta is the mean of the data, A is I/2 and b half that mean.

    References:
        Rainforth et al., Tighter variational bounds are not necessarily better (ICML 2018); Luo et al., SUMO (ICLR 2020),
        the appendix.

    Example:
        >>> x = toy_data(20, 1000, seed=0)
        >>> Toy(x, perturbation=0.01, seed=1).exact(x).shape
        torch.Size([1000])
    """

    def __init__(self, x: Tensor, perturbation: float, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        dimension, mean = x.shape[1], x.mean(0)

        def near(best: Tensor) -> nn.Parameter:
            noise = torch.randn(best.shape, generator=generator, dtype=torch.float64)
            return nn.Parameter(best + perturbation * noise)

        self.encoder = nn.utils.skip_init(nn.Linear, dimension, dimension, dtype=torch.float64)
        self.encoder.weight, self.encoder.bias = near(torch.eye(dimension, dtype=torch.float64) / 2), near(mean / 2)
        self.theta = near(mean)

    def encode(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.encoder(x))

    def posterior(self, code: Tensor) -> Distribution:
        return _normal(code, math.sqrt(2 / 3))

    def prior(self) -> Distribution:
        return _normal(self.theta, 1.0)

    def likelihood(self, z: Tensor) -> Distribution:
        return _normal(z, 1.0)

    def exact(self, x: Tensor) -> Tensor:
        """log p(x), (batch,)."""
        return torch.as_tensor(_normal(self.theta, math.sqrt(2)).log_prob(x))


def toy_data(dimension: int, count: int, seed: int) -> Tensor:
    """Samples of x, (count, dimension), with a standard normal true theta."""
    generator = torch.Generator().manual_seed(seed)
    theta, noise = (torch.randn(n, dimension, generator=generator, dtype=torch.float64) for n in (1, count))
    return theta + math.sqrt(2) * noise


def _normal(mean: Tensor, scale: float) -> Distribution:
    return Independent(Normal(mean, scale, validate_args=False), 1, validate_args=False)


def _seed(options: Cell) -> int:
    return int(1000 * options["seed"] + options["trial"])


def _crosses(model: Toy, x: Tensor, samples: int, ks: list[int], advance: Advance) -> Cell:
    total: dict[str, Any] = dict.fromkeys(SERIES, 0.0)
    for index in torch.arange(samples).split(_CHUNK):
        part = x[index % len(x)]
        log_w = bound(model, part)(rows(torch.full((len(part),), ks[-1] + 1))).view(len(part), -1)
        for series, moments in cross_moments(log_w, model.exact(part), ks).items():
            total[series] += moments.cpu() * len(part) / samples
        advance(float(index[-1] + 1) / samples)
    return {series: moments.tolist() for series, moments in total.items()}
