"""What clipping theta's gradient does to SUMO: the figure of the paper's appendix."""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from dohyo.errors import DohyoError
from dohyo.estimators import SUMO
from dohyo.lab.experiments.density import DensityRun
from dohyo.lab.experiments.density_config import DensityConfig
from dohyo.lab.folder import Conclusion, Picture, Table
from dohyo.lab.plots.nll import plot_clipping
from dohyo.lab.studies.runs import SHARED_K, train_replicas, without_place
from dohyo.lab.studies.study import Advance, Cell, Row, Study, StudyConfig, save_picture
from dohyo.lab.studies.verdicts import Contrast, all_below, listed
from dohyo.lab.training.config import option
from dohyo.lab.training.loop import Diverged
from dohyo.objectives import Encoder

NONE = "none"  # no clipping
_IWAE = "iwae"
_EVERY = 0.99  # a share above this is every step


@dataclass(frozen=True)
class ClippingConfig(StudyConfig):
    """The numbers of the study."""

    data: str = option("mnist", "What is trained on: mnist, digits, omniglot, or a file.")
    cost: float = option(15.0, "Expected log-weights for each image in a step.")
    encoder: Encoder = option("variance", "What phi follows; variance is the paper's.")
    norms: tuple[float, ...] = option(
        (1, 5, 10, 20, 40, 60, 100, 200, 500), "The largest norms of theta's gradient; training without clipping is always added."
    )
    hidden: int = option(200, "Units in each hidden layer.")
    latent: int = option(50, "Latent dimensions.")
    epochs: int = option(3500, "At most; training ends earlier if nothing is gained for 300.")
    test_terms: int = option(5000, "The test NLL is by IWAE with this many terms.")
    replicas: int = option(3, "Runs at each norm, with seeds of their own; two or more, for a spread.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.norms) < 2 or list(self.norms) != sorted(set(self.norms)) or self.norms[0] <= 0:
            raise DohyoError(f"norms are {self.norms}; give two or more positive numbers that rise")
        self._at_least(replicas=2)


class Clipping(Study[ClippingConfig]):
    """The study `clipping`."""

    name = "clipping"
    title = "Clipping SUMO's gradient: bias against variance"
    question = (
        "SUMO's gradient is unbiased and now and then huge; clipping it trades bias for variance. The paper's appendix trains "
        "with SUMO at cost 15 and many clip norms, and says that neither full clipping nor no clipping is desirable. What is the "
        "test NLL against the norm, and against the share of steps that are clipped?"
    )
    SCALES = {  # noqa: RUF012
        "smoke": ClippingConfig(data="digits", cost=6, norms=(0.1, 5), hidden=32, latent=8, epochs=1, test_terms=20, replicas=2),
        "small": ClippingConfig(
            data="digits", norms=(0.01, 0.1, 0.5, 1, 1.5, 2, 5, 10, 20), hidden=64, latent=16,
            epochs=40, test_terms=200, replicas=4,
        ),
        "paper": ClippingConfig(),
    }  # fmt: skip
    picks = ("norm",)

    def cells(self) -> dict[str, Cell]:
        c = self.config
        keys = ("data", "cost", "hidden", "latent", "epochs", "test_terms", "replicas", "seed")
        common = {key: getattr(c, key) for key in keys}
        sumo = {"estimator": "sumo", "encoder": c.encoder}
        cells: dict[str, Cell] = {f"norm_{norm:g}": {**common, **sumo, "norm": float(norm)} for norm in c.norms}
        cells[f"norm_{NONE}"] = {**common, **sumo, "norm": NONE}
        cells[_IWAE] = {**common, "estimator": "iwae", "encoder": "same"}  # its own norm is 10, as in the paper
        return cells

    def run_of(self, name: str, options: Cell, folder: Path) -> DensityRun:
        options = dict(options)
        norm = options.pop("norm", "auto")
        config = DensityConfig(**options, clip_decoder=None if norm == NONE else norm, device=self.config.device)
        return DensityRun(folder, config)

    def run_cell(self, name: str, options: Cell, folder: Path, advance: Advance) -> Cell:
        try:
            return train_replicas(self.run_of(name, options, folder), advance)
        except Diverged as error:
            return {"diverged": without_place(error, folder)}  # this is a result, too

    def _trained(self, cells: dict[str, Cell]) -> dict[str, Cell]:
        """The results of SUMO by norm, in order, without those that diverged."""
        names = [name for name, options in self.cells().items() if "norm" in options and "test_nll" in cells.get(name, {})]
        return {name.removeprefix("norm_"): cells[name] for name in names}

    def summarise(self, cells: dict[str, Cell]) -> tuple[list[Conclusion], list[Table]]:
        conclusions, found = [], self._trained(cells)
        diverged = f"norm_{NONE}" in cells and NONE not in found
        if all(name in cells for name in self.cells()):
            conclusions = [*self._full_and_none(found, diverged), *self._beside_iwae(found, cells[_IWAE], diverged)]
        rows: list[Row] = [[f"SUMO, {norm}", *_numbers(cell)] for norm, cell in found.items()]
        rows += [["IWAE, 10", *_numbers(cells[_IWAE])]] if "test_nll" in cells.get(_IWAE, {}) else []
        note = (
            f"sd is over {self.config.replicas} replicas; {self.config.epochs} epochs at most. SUMO's encoder follows "
            f"{self.config.encoder}, IWAE's climbs IWAE, and the norm of IWAE is the paper's. {SHARED_K}"
        )
        if diverged:
            note += f" Without clipping: {cells[f'norm_{NONE}']['diverged']}"
        columns = ["clip norm", "test NLL", "sd", "steps clipped", "epochs"]
        cost = f"cost {self.config.cost:g} (SUMO's expected cost is {SUMO.at_cost(self.config.cost).expected_cost:.4g})"
        title = f"Test NLL on {self.config.data} at {cost}, by IWAE with {self.config.test_terms} terms"
        return conclusions, [Table(title, columns, rows, note)]

    def _full_and_none(self, found: dict[str, Cell], diverged: bool) -> list[Conclusion]:
        """No clipping against every norm; norms that clip every step against all that clip some, for a small one may be slow."""
        paper = "says that neither full nor no clipping is desirable"
        shares = {norm: fmean(cell["clipped_decoder"]) for norm, cell in found.items() if norm != NONE}
        full = [norm for norm, share in shares.items() if share > _EVERY]
        some = [norm for norm in shares if norm not in full]
        without = ("without clipping training diverged", True) if diverged else _ends(found, [NONE], list(shares))
        every = _ends(found, full, some) if full and some else ("no norm clips every step, or none clips only some", None)
        return [
            Conclusion("No clipping is worse than some clipping", paper, *without),
            Conclusion("Clipping every step is worse than clipping some, at any norm", paper, *every),
        ]

    def _beside_iwae(self, found: dict[str, Cell], iwae: Cell, diverged: bool) -> list[Conclusion]:
        """SUMO is worse than IWAE without clipping, and not with it."""
        if "test_nll" not in iwae:
            return []
        best = min((norm for norm in found if norm != NONE), key=lambda norm: fmean(found[norm]["test_nll"]))
        clipped = Contrast.of((1, found[best]["test_nll"]), (-1, iwae["test_nll"]))
        contrasts, worse = {f"clipped at {best}": clipped}, True if diverged else None
        if not diverged:
            contrasts["without clipping"] = Contrast.of((1, found[NONE]["test_nll"]), (-1, iwae["test_nll"]))
            worse = all_below([Contrast.of((1, iwae["test_nll"]), (-1, found[NONE]["test_nll"]))])
        behind = clipped.mean > clipped.half(len(found))  # the norm was chosen: the interval is that of all norms together
        holds = False if worse is False or behind else True if worse else None
        without = ", diverged without clipping" if diverged else ""
        text = f"SUMO's NLL less IWAE's at the same cost: {listed(contrasts)}{without}"
        claim = "Without clipping SUMO trains worse models than IWAE; clipped it is not behind"
        paper = "poor beside IWAE because of its variance; clipping makes it competitive"
        return [Conclusion(claim, paper, text, holds)]

    def plot(self, cells: dict[str, Cell], folder: Path) -> list[Picture]:
        found = self._trained(cells)
        if len(found) < 2:
            return []
        curve: dict[str, list[Any]] = {
            "norm": [None if norm == NONE else float(norm) for norm in found],
            "mean": [fmean(cell["test_nll"]) for cell in found.values()],
            "sd": [stdev(cell["test_nll"]) for cell in found.values()],
            "share": [fmean(cell["clipped_decoder"]) for cell in found.values()],
        }
        iwae = cells.get(_IWAE, {}).get("test_nll")
        figure, numbers = plot_clipping(curve, (fmean(iwae), stdev(iwae)) if iwae else None)
        c = self.config
        title = f"Test NLL against the clip norm and the share of clipped steps, on {c.data} at cost {c.cost:g}"
        alt = (
            "Two plots of SUMO's test NLL with the spread of its replicas: against the clip norm, at last without clipping, and "
            "against the share of the steps that are clipped. A band shows IWAE at the same cost."
        )
        return [save_picture(figure, numbers, folder, "clipping.png", title, alt)]


def _ends(found: dict[str, Cell], ends: list[str], others: list[str]) -> tuple[str, bool | None]:
    """Whether each of the ends is worse than one of the others; False if one is better than all. At 95% for all pairs."""
    pairs = {(e, o): Contrast.of((1, found[e]["test_nll"]), (-1, found[o]["test_nll"])) for e in ends for o in others}
    worse = all(any(pairs[e, o].mean > pairs[e, o].half(len(pairs)) for o in others) for e in ends)
    better = any(all(pairs[e, o].mean < -pairs[e, o].half(len(pairs)) for o in others) for e in ends)
    best_end, best_other = (min(norms, key=lambda norm: fmean(found[norm]["test_nll"])) for norms in (ends, others))
    best = pairs[best_end, best_other]
    names = [f"{norm} ({fmean(found[norm]['clipped_decoder']):.0%} of the steps clipped)" for norm in (best_end, best_other)]
    text = f"at norm {names[0]} the NLL is {best.mean:+.2f} ± {best.half(len(pairs)):.2f} from that at norm {names[1]}"
    return text, True if worse else False if better else None


def _numbers(cell: Cell) -> Row:
    nll = cell["test_nll"]
    return [round(fmean(nll), 3), round(stdev(nll), 3), f"{fmean(cell['clipped_decoder']):.1%}", max(cell["epochs"])]
