"""Training inside a cell: a run in the cell's folder, resumed after a kill."""

import dataclasses
from pathlib import Path
from statistics import fmean
from typing import Any

from dohyo.errors import DohyoError
from dohyo.lab.experiments.density import DensityRun
from dohyo.lab.experiments.density_config import DensityConfig
from dohyo.lab.experiments.run import Run
from dohyo.lab.folder import CONFIG, read_records
from dohyo.lab.studies.study import Advance, Cell
from dohyo.lab.training.processes import launch

SHARED_K = (
    "The replicas have their own parameters, data order and noise, but the K of each step is common to them, so that their "
    "spread leaves out what another sequence of K would change: for estimators with a random K the error bars are too small."
)


def complete(run: Run[Any], advance: Advance) -> Cell:
    """The result of a run, which is finished first if it is not yet; a DohyoError if its folder holds another run."""
    if (run.folder / CONFIG).exists():
        moved, longer = ("device", "program", "init_from"), ("max_seconds",)  # what may have become of the study since
        free = [key for key in moved + longer if hasattr(run.config, key)]
        before = type(run).open(run.folder).config
        if dataclasses.replace(before, **{key: getattr(run.config, key) for key in free}) != run.config:
            raise DohyoError(f"{run.folder} holds a run with another config; remove that folder, or choose another --out")
    return run.complete(
        launch(run.config.device),
        on_epoch=lambda record: advance(record[run.config.unit] / run.config.length),
        on_test=lambda done, total: advance(1.0),  # so that a Ctrl-C is noticed there too
    )


def without_place(error: Exception, folder: Path) -> str:
    """What happened, without the folder it was in: a study's files are kept elsewhere."""
    return str(error).replace(f"{folder}/", "").replace(f" in {folder}", "")


def given_or(given: Path | None, folder: Path, **options: Any) -> DensityRun:
    """The run in the folder `given`, or else one with these options in `folder`."""
    return DensityRun(folder, DensityConfig(**options)) if given is None else DensityRun.open(given)


def train_replicas(run: DensityRun, advance: Advance) -> Cell:
    """The numbers of each replica, finished first if they are not yet."""
    found = complete(run, advance)
    keys = ["test_nll", "test_nll_stderr", "valid_nll", "epochs", "best_epoch"]
    keys += [key for key in ("test_nll_average", "test_nll_annealed") if key in found["replicas"][0]]  # of our recipe, of chains
    result: Cell = {key: [replica[key] for replica in found["replicas"]] for key in keys}
    records = [read_records(replica.folder) for replica in run.replicas]
    for key in ("clipped_decoder", "clipped_encoder"):
        result[key] = [fmean(record[key] for record in own) for own in records]
    return result | {key: found[key] for key in ("expected_cost", "estimator_arguments", "encoder", "test_terms")}
