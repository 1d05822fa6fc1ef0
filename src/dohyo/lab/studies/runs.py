"""Training inside a cell: a run in the cell's folder, gone on with after a kill."""

import dataclasses
from pathlib import Path
from typing import Any

from dohyo.errors import DohyoError
from dohyo.lab.experiments.density import DensityConfig, DensityRun
from dohyo.lab.experiments.run import CONFIG, Run
from dohyo.lab.studies.study import Advance
from dohyo.lab.training.processes import launch


def complete(run: Run[Any], advance: Advance = lambda share: None) -> dict[str, Any]:
    """The result of a run, which is trained only as far as it is not yet; a ValueError if its folder holds another run."""
    if (run.folder / CONFIG).exists():
        before = type(run).open(run.folder).config
        if dataclasses.replace(before, device=run.config.device) != run.config:
            raise DohyoError(f"{run.folder} holds a run with another config; remove that folder, or choose another --out")
    length = getattr(run.config, run.length)
    unit = run.length.removesuffix("s")
    return run.complete(
        launch(run.config.device),
        on_epoch=lambda record: advance(record[unit] / length),
        on_test=lambda done, total: advance(1.0),  # that a Ctrl-C is heard there too
    )


def trained(folder: Path, given: Path | None, advance: Advance, **options: Any) -> DensityRun:
    """The run in the folder `given`, or one with these options, trained in `folder` as far as it is not yet."""
    if given is not None:
        return DensityRun.open(given)
    run = DensityRun(folder, DensityConfig(**options))
    complete(run, advance)
    return run
