"""Reverse KL on the funnel: what minimising a lower bound of log p(x) does, and what minimising an unbiased estimate does."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dohyo.errors import DohyoError
from dohyo.lab.experiments.reverse_kl import ReverseKLConfig, ReverseKLRun
from dohyo.lab.folder import CONFIG, RESULT, WORK, Conclusion, Picture, Table, read_records
from dohyo.lab.plots.densities import plot_density_comparison
from dohyo.lab.plots.divergence import plot_reverse_kl_curves
from dohyo.lab.studies.funnel_findings import NAMES, Findings
from dohyo.lab.studies.runs import complete, without_place
from dohyo.lab.studies.study import Advance, Cell, Study, StudyConfig, save_picture
from dohyo.lab.targets import Funnel as Target
from dohyo.lab.training.config import ProgramName, option
from dohyo.lab.training.loop import Diverged

_MINIMAX = "minimax-iwae"
_RECORDED = (
    "step", "estimate", "estimate_stderr", "objective", "reverse_kl", "stderr", "by_encoder", "by_prior", "above", "diverged"
)  # fmt: skip
_KEPT = (
    "reverse_kl", "reverse_kl_stderr", "reverse_kl_above", "training_estimate", "training_estimate_stderr", "diverged",
    "warnings", "khat", "expected_cost", "encoder", "steps",
)  # fmt: skip
_AT_LAST = {  # what a run that ended in NaN has instead, from its last check
    "reverse_kl": "reverse_kl", "reverse_kl_stderr": "stderr", "reverse_kl_above": "above", "training_estimate": "estimate",
    "training_estimate_stderr": "estimate_stderr", "steps": "step",
}  # fmt: skip


@dataclass(frozen=True)
class FunnelConfig(StudyConfig):
    """The numbers of the study."""

    replicas: int = option(3, "Runs of each estimator at each cost, with seeds of their own.")
    steps: int = option(20_000, "The steps of each run; one that diverges ends earlier.")
    check_every: int = option(500, "Steps from one check to the next.")
    check_draws: int = option(500, "Draws of x in a check of the true reverse KL.")
    test_draws: int = option(4000, "Draws of x in the last check.")
    terms: int = option(1000, "Samples of the encoder for each of these.")
    elbo: tuple[int, ...] = option((5, 15, 50), "The costs of the ELBO.")
    iwae: tuple[int, ...] = option((5, 15, 50), "The costs of IWAE, its encoder going down with the decoder.")
    minimax_iwae: tuple[int, ...] = option((5, 15, 50, 200), "The costs of IWAE with an encoder that climbs.")
    sumo: tuple[int, ...] = option((5, 15, 50), "The costs of SUMO.")
    symmetric_sumo: tuple[int, ...] = option((5, 15, 50), "The costs of SymmetricSUMO.")
    multilevel_rr: tuple[int, ...] = option((5, 15, 50), "The costs of MultilevelRR.")
    program: ProgramName = option("plain", "How steps are run; captured pays on a CUDA GPU, and for sumo on a CPU.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(replicas=1, steps=1, check_every=1, check_draws=25, test_draws=25, terms=1)
        for name, costs in self.costs().items():
            if costs and min(costs) < 1:
                raise DohyoError(f"{name.replace('-', '_')} is {costs}; every cost must be at least 1")

    def costs(self) -> dict[str, tuple[int, ...]]:
        return {name: getattr(self, name.replace("-", "_")) for name in NAMES}


class Funnel(Study[FunnelConfig]):
    """The study `funnel`."""

    name = "funnel"
    title = "Reverse KL on the funnel"
    question = (
        "To fit a model to a density by the reverse KL is to minimise log p(x), and a lower bound of it can be lowered by making "
        "it loose. Does IWAE optimise its own bias where SUMO optimises the true divergence at the same cost, is an encoder that "
        "climbs (minimax) a remedy, and how do later estimators do?"
    )
    SCALES = {  # noqa: RUF012
        "smoke": FunnelConfig(
            replicas=1, steps=90, check_every=30, check_draws=50, test_draws=200, terms=200,
            elbo=(), iwae=(15,), minimax_iwae=(), sumo=(15,), symmetric_sumo=(), multilevel_rr=(),
        ),
        "small": FunnelConfig(
            replicas=2, steps=2000, check_every=200, test_draws=2000,
            elbo=(), minimax_iwae=(15, 50), symmetric_sumo=(15,), multilevel_rr=(15,),
        ),
        "paper": FunnelConfig(),
    }  # fmt: skip
    picks = ("estimator", "cost")

    def cells(self) -> dict[str, Cell]:
        c = self.config
        common = {key: getattr(c, key) for key in ("steps", "check_every", "check_draws", "test_draws", "terms")}
        return {
            f"{name}_{cost:03d}_{replica}": {"estimator": name, "cost": cost, "seed": c.seed + replica, **common}
            for replica in range(c.replicas)
            for name, costs in c.costs().items()
            for cost in costs
        }

    def run_of(self, name: str, options: Cell, folder: Path) -> ReverseKLRun:
        shared = {key: options[key] for key in ("cost", "seed", "steps", "check_every", "check_draws", "test_draws")}
        terms = {"check_terms": options["terms"], "test_terms": options["terms"]}
        minimax = options["estimator"] == _MINIMAX
        followed = {"estimator": "iwae", "encoder": "iwae"} if minimax else {"estimator": options["estimator"]}
        c = self.config
        return ReverseKLRun(folder, ReverseKLConfig(**shared, **terms, **followed, device=c.device, program=c.program))

    def run_cell(self, name: str, options: Cell, folder: Path, advance: Advance) -> Cell:
        run, lost = self.run_of(name, options, folder), ""
        try:
            result = complete(run, advance)
        except Diverged as error:  # to NaN between two checks; this is a result, too
            lost = without_place(error, folder)
        curve = [{key: record[key] for key in _RECORDED} for record in read_records(folder)]
        if lost:
            if not curve:
                raise DohyoError(f"{lost}; it was lost before its first check: lower check_every")
            curve[-1]["diverged"] = True
            result = {
                **{new: curve[-1][old] for new, old in _AT_LAST.items()}, "diverged": True, "warnings": [lost], "khat": None,
                "expected_cost": run.config.make_estimator().expected_cost, "encoder": run.config.encoder,
            }  # fmt: skip
        return {**{key: result[key] for key in _KEPT}, "curve": curve}

    def summarise(self, cells: dict[str, Cell]) -> tuple[list[Conclusion], list[Table]]:
        found = Findings(cells)
        return found.conclusions(), found.tables()

    def plot(self, cells: dict[str, Cell], folder: Path) -> list[Picture]:
        if not cells:
            return []
        found = Findings(cells)
        curves = {(NAMES[name], cost): [run["curve"] for run in runs] for (name, cost), runs in found.groups.items()}
        alt = (
            "Above, the training estimate of the reverse KL against steps; below, the true one; a column for each cost. A cross "
            f"marks where a run was found to have diverged: {found.diverged() or 'none was'}; a triangle, what is beyond an axis."
        )
        title = "Training estimate and true reverse KL on the funnel"
        return [save_picture(*plot_reverse_kl_curves(curves), folder, "curves.png", title, alt), *self._densities(folder)]

    def _densities(self, folder: Path) -> list[Picture]:
        """IWAE's and SUMO's model at the middle cost. Where the runs have been deleted, an existing picture stays."""
        file, shared = "densities.png", [cost for cost in self.config.iwae if cost in self.config.sumo]
        if not shared:
            return []
        cost = shared[len(shared) // 2]
        runs = {f"{NAMES[name]}, cost {cost}": folder / WORK / f"{name}_{cost:03d}_0" for name in ("iwae", "sumo")}
        alt = f"Contours and draws of the funnel, and of the models that IWAE and SUMO at cost {cost} left when training ended."
        title = f"The funnel, and models trained at cost {cost}"
        if all((run / RESULT).exists() and (run / CONFIG).exists() for run in runs.values()):
            models: dict[str, Any] = {name: ReverseKLRun.open(run).trained() for name, run in runs.items()}
            return [save_picture(*plot_density_comparison(Target(), models), folder, file, title, alt)]
        return [Picture(file, title, alt)] if (folder / file).exists() else []
