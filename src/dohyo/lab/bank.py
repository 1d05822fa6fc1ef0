"""Log-weights from another program: one row for each datum, i.i.d. along the row."""

import math
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dohyo.diagnostics import khat
from dohyo.errors import DohyoError
from dohyo.estimators import IWAE, Estimator
from dohyo.evaluation import Evaluation, summarise
from dohyo.lab.data.readers import read_numpy
from dohyo.lab.data.tables import column_names, csv_rows, numbers
from dohyo.names import named
from dohyo.packing import reduce_packed

_LARGEST = 1e300  # beyond it sums and differences of log-weights overflow


def load_log_weights(path: Path, key: str | None = None) -> Tensor:
    """(data, samples) float64 from a .npy, .npz or .csv file; one row is one datum. `key`: the array, if a .npz has several."""
    if path.suffix not in (".npy", ".npz", ".csv"):
        raise DohyoError(f"{path}: the ending must be .npy, .npz or .csv")
    if not path.is_file():
        raise DohyoError(f"{path}: there is no such file")
    if key is not None and path.suffix != ".npz":
        raise DohyoError(f"{path}: --key names an array of a .npz file; leave it out")
    try:
        array = _read_csv(path) if path.suffix == ".csv" else _read_numpy(path, key)
    except DohyoError as error:
        raise DohyoError(f"{path}: {error}") from error
    if array.dtype.kind not in "fiu" or array.ndim not in (1, 2) or array.size == 0:
        raise DohyoError(f"{path}: holds {array.dtype} {array.shape}; it must be real numbers, (data, samples), not empty")
    with np.errstate(over="ignore"):
        log_w = torch.from_numpy(np.atleast_2d(array).astype(np.float64))
    bad = (~(log_w < _LARGEST) | (log_w.isfinite() & (log_w <= -_LARGEST))).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        raise DohyoError(
            f"{path}: {len(bad)} of {log_w.numel()} log-weights are NaN, +inf or beyond {_LARGEST:g}, first in row {row + 1}, "
            f"column {column + 1}; they must be finite, or -inf for a weight of zero"
        )
    return log_w


def estimate_bank(
    log_w: Tensor, estimator: Estimator, replicates: int = 1, confidence: float = 0.95, seed: int = 0
) -> Evaluation:
    """Estimates from a bank: each row is shuffled and cut into `replicates` disjoint blocks, one estimate from each.

    No weight is used twice, and the number of estimates is fixed beforehand (going on while weights are left would favour
    small K), so each block must be long enough for the estimator's largest number of terms.
    """
    data, samples = log_w.shape
    width = block_width(samples, replicates)
    if estimator.max_terms > width:
        raise DohyoError(
            f"this {type(estimator).__name__} may need {estimator.max_terms:.0f} log-weights, more than the {width} of a block; "
            "lower the cost, cap the law, or use fewer replicates"
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(log_w.shape, generator=generator).argsort(-1)
    blocks = log_w.gather(1, order)[:, : width * replicates].reshape(data * replicates, width)
    counts = estimator.plan(data * replicates, generator)
    packed = blocks[torch.arange(width) < counts[:, None]]
    values = reduce_packed(estimator.reduce, packed, counts).view(data, replicates)
    return summarise(values, estimator, int(counts.sum()), khat(log_w), confidence, annealed=None)


def log_mean(log_w: Tensor, confidence: float = 0.95) -> tuple[Evaluation, Tensor]:
    r"""log of the mean of all weights of each row, and the jackknife's estimate of its bias for each row, (data,).

    The standard error of each row is that of the delta method, sd(w) / (mean(w) sqrt(n)); the bias is about minus half its
    square. A finite set of weights says no more than this: every other estimate from it is noisier.
    """
    samples = log_w.shape[1]
    top = log_w.amax(-1, keepdim=True).clamp(min=torch.finfo(log_w.dtype).min)  # a row without weight stays -inf
    w = (log_w - top).exp()
    total = w.sum(-1, keepdim=True)
    value = total.log() + top - math.log(samples)
    noise = w.std(-1, correction=min(1, samples - 1)) * math.sqrt(samples) / total[:, 0]
    without = (-(w / total).clamp(max=1)).log1p().mean(-1)  # of each weight in turn, against the whole
    bias = (samples - 1) * (without + math.log(samples / (samples - 1))) if samples > 1 else torch.full_like(noise, math.nan)
    known = (noise, samples - 1) if samples > 1 else None
    return summarise(value, IWAE(samples), log_w.numel(), khat(log_w), confidence, noise=known, annealed=None), bias


def block_width(samples: int, replicates: int) -> int:
    """The number of log-weights in each of `replicates` disjoint blocks of a row."""
    if not 1 <= replicates <= samples:
        raise DohyoError(f"replicates is {replicates}; it must be between 1 and the {samples} log-weights of a row")
    return samples // replicates


def _read_numpy(path: Path, key: str | None) -> NDArray[Any]:
    arrays = read_numpy(path, lambda names: [key] if key in names else names)
    if key is None and len(arrays) != 1:
        raise DohyoError(f"holds {len(arrays)} arrays ({', '.join(arrays)}); choose one with --key")
    return next(iter(arrays.values())) if key is None or path.suffix == ".npy" else named(arrays, key, "array")


def _read_csv(path: Path) -> NDArray[Any]:
    rows = (row for row in csv_rows(path, ",") if row[1])
    first = next(rows, (0, []))
    return numbers(chain([first], rows), column_names([""] * len(first[1])), "leave headers and names out")
