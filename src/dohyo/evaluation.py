"""An honest test log-likelihood: the mean over data with an error bar, diagnostics and warnings."""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dohyo.contract import Model, bound
from dohyo.diagnostics import khat, median_of_means
from dohyo.errors import DohyoError, whole
from dohyo.estimators import Estimator
from dohyo.files import plain
from dohyo.marginal import estimate, of_counts
from dohyo.packing import rows
from dohyo.verdict import Verdict, heavy_share, judge

_MOST_ESTIMATES = 10**8  # which are kept
_PILOT_DATA, _PILOT_REPLICATES = 256, 4


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`.

    Attributes:
        mean: The mean over the data of the estimated log p(x), in nats.
        stderr: Its standard error as an estimate for new data of this kind: the data's variation and the estimator's noise.
        noise_stderr: The estimator's noise alone, for these very data; None with a single replicate.
        interval: The confidence interval of `mean` that belongs to `stderr`.
        robust_mean, robust_interval: By median of means, if the estimator's variance is infinite; else None.
        per_datum: (data,) float64, averaged over replicates.
        replicates: The number of estimates for each datum.
        cost: The number of evaluations of p(x, z), including pilot and diagnostics: one for each log-weight, more for `Annealed`.
        khat: (examined data,) Pareto k-hat of their weights; above 0.7 the weights are too heavy for these numbers.
        kind: "lower bound", "unbiased", "unbiased for IWAE_n", or "neither a bound nor unbiased".
        verdict: Whether the error bar can be trusted, in one field and one sentence.
        fingerprint: A checksum of the data, by which `compare` recognises paired evaluations; 0 if unknown.
        per_datum_stderr: (data,) the estimator's noise in `per_datum`; None with a single replicate.
    """

    mean: float
    stderr: float
    noise_stderr: float | None
    interval: tuple[float, float]
    robust_mean: float | None
    robust_interval: tuple[float, float] | None
    per_datum: Tensor
    replicates: int
    cost: int
    khat: Tensor
    kind: str
    verdict: Verdict
    fingerprint: int = 0
    per_datum_stderr: Tensor | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to know about the numbers, also in the verdict's sentence; empty if there is nothing."""
        return self.verdict.warnings

    def __repr__(self) -> str:
        """A line to read, and the verdict; `to_dict(values=True)` has every number."""
        noise = "" if self.noise_stderr is None else f", of which noise {self.noise_stderr:.2g}"
        digits = 2 if not 0 < self.stderr < math.inf else max(2, 1 - math.floor(math.log10(self.stderr)))
        found = f"log p(x) = {self.mean:.{digits}f} ± {self.stderr:.{digits}f}{noise}"
        return f"{found} ({self.kind}; {len(self.per_datum)} data, {self.cost} evaluations); {self.verdict.reason}"

    def to_dict(self, values: bool = False) -> dict[str, Any]:
        """The numbers as JSON can hold them: k-hat summarised, null for what is not finite.

        Args:
            values: Add what there is for each datum: `log_px`, its `noise` (null with a single replicate) and `khat_values`.
        """
        fields = {name: value for name, value in vars(self).items() if not name.startswith("per_datum")}
        finite = self.khat[self.khat.isfinite()]
        fields["khat"] = {
            "examined": len(finite),
            "median": float(finite.median()) if len(finite) else None,
            "max": float(finite.max()) if len(finite) else None,
            "share_above_0.7": heavy_share(finite) if len(finite) else None,
        }
        fields["verdict"] = self.verdict.to_dict()
        every: dict[str, Any] = {}
        if values:
            noise = None if self.per_datum_stderr is None else self.per_datum_stderr.tolist()
            every = plain({"log_px": self.per_datum.tolist(), "noise": noise, "khat_values": self.khat.tolist()})
        return {"data": len(self.per_datum), **plain(fields), "warnings": list(self.warnings), **every}


@dataclass(frozen=True)
class Comparison:
    """The mean over data of log p_a(x) - log p_b(x), with the error bar of paired differences."""

    difference: float
    stderr: float
    interval: tuple[float, float]
    warnings: tuple[str, ...]


def evaluate(
    model: Model,
    data: Tensor | Iterable[Any],
    estimator: Estimator,
    *,
    replicates: int = 1,
    target_stderr: float | None = None,
    confidence: float = 0.95,
    batch_size: int | None = None,
    max_rows: int | None = None,
    khat_data: int | None = None,
    khat_samples: int | None = None,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """The mean of log p(x) over a data set, with its standard error, diagnostics and warnings.

    It runs without gradients, in evaluation mode and on a forked RNG with its own seed: nothing outside changes.

    Args:
        data: A tensor with one row for each datum, or batches (tensors, or tuples that begin with one), such as a
            DataLoader that does not shuffle.
        replicates: Independent estimates for each datum.
        target_stderr: The `noise_stderr` to reach. A pilot fixes the number of replicates and is discarded, because stopping
            when the numbers look good would bias them.
        batch_size: The data bound to the model at a time, where `data` is a tensor. None: 100 on a CPU, elsewhere as many as
            give `max_rows` rows, from 100 to 4,096.
        max_rows: The most rows given to the model at a time, which bounds memory. None: 2,000 on a CPU, where small batches
            are fastest, and 200,000 elsewhere.
        khat_data, khat_samples: k-hat is computed for the first `khat_data` data from so many weights each; 0 skips it. None:
            such that it takes about a fifth of all weights, but 8 to 64 data and 200 to 500 weights.
        progress: Called after each batch with the number of data done.
    """
    if batch_size is not None:
        whole("batch_size", batch_size)
    check_sizes(len(data) if isinstance(data, Tensor) else 1, replicates, max_rows)
    if not 0 < confidence < 1:
        raise DohyoError(f"confidence is {confidence}; it must lie strictly between 0 and 1")
    if target_stderr is not None:
        check_target(target_stderr, estimator)
    if isinstance(data, Tensor):
        batches: Iterable[Any] = data.split(batch_size or data_at_a_time(data, estimator, max_rows)) if len(data) else ()
    else:
        batches = list(data) if isinstance(data, Iterator) else data  # they are read more than once
    spent = 0
    with isolated(model, seed):
        generator = _depths(seed)

        def replicated(x: Tensor, count: int) -> Tensor:
            nonlocal spent
            source = _Counted(bound(model, x))
            values = [estimate(source, len(x), estimator, generator, max_rows=most_rows(x, max_rows)) for _ in range(count)]
            spent += source.rows
            return torch.stack(values, -1).cpu()

        if target_stderr is not None:
            pilot = [replicated(x, _PILOT_REPLICATES).var(-1) for x in _first(batches, _PILOT_DATA)]
            noise = float(torch.cat(pilot).nanmean()) if pilot else math.nan
            total = sum(len(x) for x in tensors(batches))
            if math.isfinite(noise):  # at least two, so that the error reached can be measured
                replicates = max(2, _replicates(noise, total, target_stderr, estimator))
        values, fingerprint, done = [], 0, 0
        for x in tensors(batches):
            values.append(replicated(x, replicates))
            fingerprint = checksum(x, fingerprint)
            done += len(x)
            if progress is not None:
                progress(done)
        shapes = [torch.empty(0)]
        share = 0.25 * done * replicates * estimator.expected_cost  # a fifth of all
        if khat_samples is None:
            khat_samples = max(200, min(500, round(share / 8))) if khat_data is None else 500
        if khat_data is None:
            khat_data = max(8, min(64, round(share / max(1, khat_samples))))
        for x in _first(batches, khat_data if khat_samples > 0 else 0):
            source = _Counted(bound(model, x))
            log_w = [source(part) for part in rows(torch.full((len(x),), khat_samples)).split(most_rows(x, max_rows))]
            shapes.append(khat(torch.cat(log_w).view(len(x), khat_samples).cpu()))
            spent += source.rows
    if not values:
        raise DohyoError("the data set is empty; give at least one datum")
    each = int(getattr(model, "evaluations_per_weight", 1))
    return summarise(torch.cat(values), estimator, spent * each, torch.cat(shapes), confidence, fingerprint, annealed=each > 1)


def mean_log_p(
    model: Model, data: Tensor, estimator: Estimator, *, batch_size: int, max_rows: int | None, seed: int
) -> Callable[[], float]:
    """The mean of `evaluate`, bit for bit, and nothing else: the checksum alone would copy the data from a GPU to the host.

    The work is begun; the function that is returned waits for it, so that a GPU can be given other work meanwhile.
    """

    def values(checked: bool) -> Tensor:
        with isolated(model, seed):
            generator, most, parts = _depths(seed), most_rows(data, max_rows), data.split(batch_size)
            plans = [estimator.plan(len(x), generator) for x in parts]
            found = [of_counts(bound(model, x), n, estimator, most, checked) for x, n in zip(parts, plans, strict=True)]
            return torch.cat(found)

    found = values(checked=False)

    def mean() -> float:
        each = found.cpu()
        return float((each if bool(each.isfinite().all()) else values(checked=True)).mean())  # which says what is wrong

    return mean


def _depths(seed: int) -> torch.Generator:
    """Draws K. Its seed is not the noise's: otherwise K and the first z would be made from the same random bits."""
    return torch.Generator().manual_seed(int(seed) + 1_000_003)


def most_rows(x: Tensor, wanted: int | None) -> int:
    """How many rows a model is given at a time."""
    return wanted or (2_000 if x.device.type == "cpu" else 200_000)


def data_at_a_time(x: Tensor, estimator: Estimator, max_rows: int | None) -> int:
    """How many data a model is bound to: a GPU is idle most of the time unless there are enough rows."""
    if x.device.type == "cpu":
        return 100
    return min(max(100, int(most_rows(x, max_rows) / estimator.expected_cost)), 4096)  # an encoder may need much memory for each


def checksum(x: Tensor, before: int = 0) -> int:
    """A checksum of the data's bytes, continued from an earlier one."""
    return zlib.crc32(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes(), before)


def check_sizes(data: int, replicates: int, max_rows: int | None) -> None:
    """An error if there are too many estimates to keep, or no rows at all."""
    if whole("replicates", replicates) * data > _MOST_ESTIMATES:
        raise DohyoError(f"replicates is {replicates}; {_MOST_ESTIMATES} estimates in all are the most: use a higher cost")
    if max_rows is not None:
        whole("max_rows", max_rows)


def check_target(target_stderr: float, estimator: Estimator) -> None:
    """An error if no number of replicates can reach the target."""
    if not (target_stderr > 0 and estimator.finite_variance):
        raise DohyoError(
            f"target_stderr is {target_stderr} for {estimator}; it must be positive, and the estimator's variance finite: use "
            "SymmetricSUMO or MultilevelRR, or cap the law"
        )


def _replicates(noise: float, data: int, target_stderr: float, estimator: Estimator) -> int:
    """How many estimates of each datum reach the target, if one has this variance."""
    needed = noise / data / target_stderr / target_stderr
    if needed * data > _MOST_ESTIMATES:
        weights = needed * data * estimator.expected_cost
        raise DohyoError(f"target_stderr is {target_stderr}; it would take {needed:.3g} replicates, {weights:.3g} log-weights: "
                         f"give {math.sqrt(noise / _MOST_ESTIMATES):.2g} or more, or an estimator with less noise")  # fmt: skip
    return math.ceil(needed)


def summarise(
    values: Tensor,
    estimator: Estimator,
    cost: int,
    khat: Tensor,
    confidence: float = 0.95,
    fingerprint: int = 0,
    noise: tuple[Tensor, int] | None = None,
    annealed: bool | None = False,
    averaged: int = 1,
) -> Evaluation:
    """An `Evaluation` of estimates (data, replicates) that were made elsewhere.

    Args:
        noise: The standard error of each datum's value, where it is not that between replicates, and its degrees of freedom.
        averaged: How many estimates each of the values is the mean of.
        annealed: Whether the weights are those of chains; None if they were made elsewhere.
    """
    data, replicates = values.shape
    per_datum = values.mean(-1)
    mean = float(per_datum.mean())
    if noise is None and replicates > 1:
        noise = values.std(-1) / math.sqrt(replicates), replicates - 1
    noise_stderr = None if noise is None else float(noise[0].square().sum().sqrt() / data)
    stderr, degrees = (
        (float(per_datum.std() / math.sqrt(data)), data - 1) if data > 1 else (noise_stderr, noise[1] if noise else 0)
    )
    if stderr is None or not math.isfinite(stderr):
        stderr, interval, stated = math.nan, (math.nan, math.nan), math.nan
    else:
        interval, stated = _interval(mean, stderr, confidence, degrees), stderr if noise_stderr is None else noise_stderr
    robust_mean, robust_interval = None, None
    if estimator.finite_variance is False:
        robust_mean, robust_interval = median_of_means(per_datum if data > 1 else values[0], confidence)
    return Evaluation(
        mean, stderr, noise_stderr, interval, robust_mean, robust_interval, per_datum, replicates * averaged, cost, khat,
        estimator.kind, judge(per_datum, replicates * averaged, estimator, khat, stated, annealed), fingerprint,
        None if noise is None else noise[0],
    )  # fmt: skip


def compare(a: Evaluation, b: Evaluation, confidence: float = 0.95, names: tuple[str, str] = ("a", "b")) -> Comparison:
    """How much more probable model a makes the data than model b: the data's variation cancels in paired differences."""
    if len(a.per_datum) != len(b.per_datum) or a.fingerprint != b.fingerprint:
        raise DohyoError(
            f"the evaluations are of different data ({len(a.per_datum)} and {len(b.per_datum)} of them, "
            f"checksums {a.fingerprint:x} and {b.fingerprint:x}); evaluate {names[0]} and {names[1]} on the same data"
        )
    if len(a.per_datum) < 2:
        raise DohyoError("one datum gives no error bar for the difference; compare on at least two")
    delta = a.per_datum - b.per_datum
    if not bool(delta.isfinite().all()):
        raise DohyoError("some estimates are -inf, so there is no difference; see the evaluations' warnings")
    warnings, lower = [], "lower bound"
    if a.kind != b.kind:
        one, other = (f"a {lower}" if side.kind == lower else side.kind for side in (a, b))
        warnings.append(f"{names[0]} is {one} and {names[1]} is {other}: their difference is not a difference of log p(x)")
    elif a.kind != "unbiased":
        both = f"{lower}s" if a.kind == lower else a.kind
        warnings.append(f"both are {both}: their difference is neither a bound on that of log p(x) nor unbiased for it")
    warnings += [f"{name}: {warning}" for name, side in zip(names, (a, b), strict=True) for warning in side.warnings]
    difference, stderr = float(delta.mean()), float(delta.std() / math.sqrt(len(delta)))
    return Comparison(difference, stderr, _interval(difference, stderr, confidence, len(delta) - 1), tuple(warnings))


@contextmanager
def isolated(model: object, seed: int) -> Iterator[None]:
    """No gradients, evaluation mode and a seed of its own inside; everything as before afterwards."""
    training = [module for module in model.modules() if module.training] if isinstance(model, nn.Module) else []
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), torch.no_grad():
        # Not torch.manual_seed: for each kind of device that is not there it records a stack trace, which takes a millisecond.
        torch.default_generator.manual_seed(int(seed))
        for kind in (torch.cuda, torch.xpu):
            if kind.is_available():
                kind.manual_seed_all(int(seed))
        if torch.backends.mps.is_available():
            torch.mps.manual_seed(int(seed))
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True


class _Counted:
    """A source of log-weights that counts the rows asked for."""

    def __init__(self, source: Callable[[Tensor], Tensor]) -> None:
        self.source, self.rows = source, 0

    def __call__(self, rows: Tensor) -> Tensor:
        self.rows += len(rows)
        return self.source(rows)


def _interval(mean: float, stderr: float, confidence: float, degrees: int) -> tuple[float, float]:
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # here, so that `import dohyo` does not load scipy

    half = float(stdtrit(degrees, 0.5 + confidence / 2)) * stderr
    return mean - half, mean + half


def tensors(batches: Iterable[Any]) -> Iterator[Tensor]:
    """The data of each batch, without labels and the like that follow them."""
    for batch in batches:
        x = batch[0] if isinstance(batch, tuple | list) else batch
        if not isinstance(x, Tensor):
            raise DohyoError(
                f"a batch is of type {type(x).__name__}; it must be a tensor, or a tuple that begins with one: "
                "torch.as_tensor makes a tensor of an array"
            )
        yield x


def _first(batches: Iterable[Any], count: int) -> Iterator[Tensor]:
    for x in tensors(batches) if count > 0 else ():
        yield x[:count]
        count -= len(x)
        if count <= 0:
            return
