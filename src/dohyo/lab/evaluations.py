"""Evaluations in files: the values of each datum, so that models can be compared on the same data."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dohyo.errors import DohyoError
from dohyo.estimators import Estimator, from_dict, to_dict
from dohyo.evaluation import Evaluation, summarise
from dohyo.files import regular, replacing
from dohyo.lab.claims import check_claims
from dohyo.lab.folder import CONFIG, TEST_VALUES, VALUES, read_result, replica_folder

_WANTED = "give a run's folder, or a .npz of dohyo evaluate"


@dataclass(frozen=True)
class Saved:
    """An evaluation from a file.

    Attributes:
        name: As the user wrote it: the run's folder, or the file.
        about: What was saved beside the numbers, such as the run and the split.
    """

    name: str
    evaluation: Evaluation
    estimator: Estimator
    about: dict[str, Any]


def save_evaluation(path: Path, found: Evaluation, estimator: Estimator, **about: Any) -> None:
    """Write an evaluation to a .npz file: `log_px`, `khat` and `noise` of each datum, and what `load_evaluation` needs."""
    own = {"estimator": to_dict(estimator), "cost": found.cost, "replicates": found.replicates, "fingerprint": found.fingerprint}
    arrays = {"log_px": found.per_datum.numpy(), "khat": found.khat.numpy(), "about": np.array(json.dumps({**about, **own}))}
    if found.per_datum_stderr is not None:
        arrays["noise"] = found.per_datum_stderr.numpy()
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # their stubs take them for allow_pickle


def load_evaluation(path: Path, name: str | None = None) -> Saved:
    """What `save_evaluation` wrote."""
    try:
        check_claims(regular(path), lambda names: names)
        with np.load(path, allow_pickle=False) as arrays:
            about = json.loads(str(arrays["about"]))
            log_px, khat = torch.from_numpy(arrays["log_px"]), torch.from_numpy(arrays["khat"])
            noise = torch.from_numpy(arrays["noise"]) if "noise" in arrays else None
        estimator, replicates = from_dict(about.pop("estimator")), int(about.pop("replicates"))
        known = None if noise is None else (noise, replicates - 1)
        cost, fingerprint = int(about.pop("cost")), int(about.pop("fingerprint"))
        annealed = bool(about.get("annealed", False))
        found = summarise(log_px[:, None], estimator, cost, khat, 0.95, fingerprint, known, annealed, replicates)
    except OSError as error:
        raise DohyoError(f"{path}: cannot be read ({error.strerror or error}); {_WANTED}") from error
    except Exception as error:  # whatever a stranger's or a damaged file leads to
        raise DohyoError(f"{path}: is no saved evaluation; dohyo evaluate --out writes one") from error
    return Saved(name or str(path), found, estimator, about)


def of_encoders(saved: Sequence[Saved]) -> list[str]:
    """What to know of evaluations by the weights of encoders that theta did not follow."""
    return [
        f"{one.name} was trained through chains and is tested by its encoder's weights, so that this compares encoders too: "
        "dohyo evaluate each run with --anneal 16, then compare them again"
        for one in saved
        if one.about.get("through_chains")
    ]


def is_current(path: Path) -> bool:
    """Whether a run has this file, of the parameters that its result is about."""
    if not path.is_file():
        return False
    epoch = load_evaluation(path).about.get("best_epoch")
    return epoch is None or epoch == (read_result(path.parent) or {}).get("best_epoch")


def saved_evaluations(places: Sequence[Path]) -> list[Saved]:
    """The evaluations of runs' folders and of files.

    Of runs it is what `dohyo evaluate` left in all of them, else the test of `dohyo train`, so that like is compared with like.
    """
    runs = [place for place in places if place.is_dir()]
    for run in runs:
        if (replica_folder(run, 0) / CONFIG).is_file():
            raise DohyoError(f"{run}: holds replicas; name one of them, such as {replica_folder(run, 0)}")
        if not (run / CONFIG).is_file():
            raise DohyoError(f"{run}: holds no run (there is no {CONFIG} in it); {_WANTED}")
    file = next((name for name in (VALUES, TEST_VALUES) if all(is_current(run / name) for run in runs)), None)
    if file is None:
        bare = next((run for run in runs if not (run / TEST_VALUES).is_file()), runs[0])
        raise DohyoError(f"{bare}: has no saved evaluation to share with the other runs; dohyo evaluate {bare} makes one")
    return [load_evaluation(place / file if place.is_dir() else place, str(place)) for place in places]
