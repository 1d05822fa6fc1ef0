"""An honest test log-likelihood: the mean over data with an error bar, and what to think of it."""

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dohyo.diagnostics import khat, median_of_means
from dohyo.errors import DohyoError
from dohyo.estimators import Estimator
from dohyo.files import plain as to_plain
from dohyo.marginal import Model, bound, estimate
from dohyo.packing import rows

_HEAVY = 0.7  # k-hat above which importance weights are not to be trusted (Vehtari et al.)
_PILOT_DATA, _PILOT_REPLICATES = 256, 4


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found.

    Attributes:
        mean: The mean over the data of the estimated log p(x), in nats.
        stderr: Its standard error as an estimate for new data like these: data and estimator noise together.
        noise_stderr: The estimator's part of it, for these very data; None with a single replicate.
        interval: The confidence interval of `mean` that goes with `stderr`.
        robust_mean, robust_interval: By median of means, where the estimator's variance is infinite; else None.
        per_datum: (data,) float64, averaged over replicates.
        replicates: Estimates made for each datum.
        cost: Evaluations of p(x, z) in all, pilot and diagnostics included: one for each log-weight, more for `Annealed`.
        khat: (examined data,) Pareto k-hat of their weights; above 0.7 they are too heavy for any of this.
        kind: "lower bound", "unbiased", "unbiased for IWAE_n", or "neither a bound nor unbiased".
        warnings: What a reader must know before trusting the numbers; empty if nothing.
        fingerprint: A checksum of the data, so that `compare` can tell whether two evaluations are paired; 0 if unknown.
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
    warnings: tuple[str, ...]
    fingerprint: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON: everything but `per_datum`, with k-hat summarised and null for what is not finite."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del plain["per_datum"]
        finite = self.khat[self.khat.isfinite()]
        plain["khat"] = {
            "examined": len(finite),
            "median": float(finite.median()) if len(finite) else None,
            "max": float(finite.max()) if len(finite) else None,
            "share_above_0.7": float((finite > _HEAVY).double().mean()) if len(finite) else None,
        }
        return {"data": len(self.per_datum), **to_plain(plain)}


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
    batch_size: int = 100,
    max_rows: int | None = None,
    khat_data: int = 64,
    khat_samples: int = 500,
    seed: int = 0,
    shared: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """The mean of log p(x) over a data set, with its standard error, diagnostics and warnings.

    Runs without gradients, in evaluation mode, with its own seed in a forked RNG: nothing outside is disturbed.

    Args:
        data: A tensor with one row for each datum, or batches of it (a tensor, or a tuple that begins with one), such as a
            DataLoader that does not shuffle.
        replicates: Independent estimates for each datum.
        target_stderr: The standard error wanted of the estimator's noise (`noise_stderr`). A pilot then fixes the number
            of replicates and is discarded: stopping when the numbers look good would bias them.
        max_rows: The most rows given to the model at a time: this bounds memory. None: 2,000 on a CPU, where few are fastest,
            and 200,000 elsewhere.
        khat_data, khat_samples: How many data, from the first on, and weights of each, k-hat is taken from; 0 skips it.
        shared: Refused: one K for all data would make them dependent and the standard error wrong.
        progress: Called after each batch with the number of data done.
    """
    if shared:
        raise DohyoError("a shared K makes the data dependent and the standard error wrong; leave shared=False here")
    if replicates < 1 or not 0 < confidence < 1 or batch_size < 1:
        raise DohyoError(
            f"replicates is {replicates}, batch_size {batch_size}, confidence {confidence}; "
            "they must be at least 1, at least 1, and strictly between 0 and 1"
        )
    if target_stderr is not None:
        check_target(target_stderr, estimator)
    if isinstance(data, Tensor):
        batches: Iterable[Any] = data.split(batch_size) if len(data) else ()
    else:
        batches = list(data) if isinstance(data, Iterator) else data  # they are gone through more than once
    spent = 0
    with apart(model, seed):
        # Not the seed of the noise: K and the first z would be made of the same random bits.
        generator = torch.Generator().manual_seed(seed + 1_000_003)

        def replicated(x: Tensor, count: int) -> Tensor:
            nonlocal spent
            source = _Counted(bound(model, x))
            values = [estimate(source, len(x), estimator, generator, max_rows=most_rows(x, max_rows)) for _ in range(count)]
            spent += source.rows
            return torch.stack(values, -1).cpu()

        if target_stderr is not None:
            pilot = [replicated(x, _PILOT_REPLICATES).var(-1) for x in _first(batches, _PILOT_DATA)]
            noise = float(torch.cat(pilot).nanmean()) if pilot else math.nan
            total = sum(len(x) for x in _tensors(batches))
            if math.isfinite(noise):  # two at least, so that the error reached can be told
                replicates = max(2, math.ceil(noise / (total * target_stderr**2)))
        values, fingerprint, done = [], 0, 0
        for x in _tensors(batches):
            values.append(replicated(x, replicates))
            fingerprint = checksum(x, fingerprint)
            done += len(x)
            if progress is not None:
                progress(done)
        shapes = []
        if khat_samples > 0:
            for x in _first(batches, khat_data):
                source = _Counted(bound(model, x))
                log_w = [source(part) for part in rows(torch.full((len(x),), khat_samples)).split(most_rows(x, max_rows))]
                shapes.append(khat(torch.cat(log_w).view(len(x), khat_samples).cpu()))
                spent += source.rows
    if not values:
        raise DohyoError("the data set is empty; give at least one datum")
    shape = torch.cat(shapes) if shapes else torch.empty(0)
    cost = spent * int(getattr(model, "evaluations_per_weight", 1))
    return summarise(torch.cat(values), estimator, cost, shape, confidence, fingerprint)


def most_rows(x: Tensor, wanted: int | None) -> int:
    """How many rows a model is given at a time."""
    return wanted or (2_000 if x.device.type == "cpu" else 200_000)


def checksum(x: Tensor, before: int = 0) -> int:
    """Of the data's bytes, going on from an earlier one."""
    return zlib.crc32(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes(), before)


def check_target(target_stderr: float, estimator: Estimator) -> None:
    """A ValueError if no number of replicates can reach the target."""
    if not (target_stderr > 0 and estimator.finite_variance):
        raise DohyoError(
            f"target_stderr is {target_stderr}, and finite_variance of {type(estimator).__name__} {estimator.finite_variance}; "
            "the one must be positive and the other True: use SymmetricSUMO or MultilevelRR, or cap the law"
        )


def summarise(
    values: Tensor, estimator: Estimator, cost: int, khat: Tensor, confidence: float = 0.95, fingerprint: int = 0
) -> Evaluation:
    """An `Evaluation` from estimates (data, replicates) that were made elsewhere."""
    data, replicates = values.shape
    per_datum = values.mean(-1)
    mean = float(per_datum.mean())
    noise = float((values.var(-1).sum() / replicates).sqrt() / data) if replicates > 1 else None
    stderr, degrees = (float(per_datum.std() / math.sqrt(data)), data - 1) if data > 1 else (noise, replicates - 1)
    warnings = []
    empty = int((per_datum == -torch.inf).sum())
    if empty:
        warnings.append(f"{empty} of {data} estimates are -inf: all weights of some block are zero, so the mean is -inf")
    if stderr is None or not math.isfinite(stderr):
        stderr, interval = math.nan, (math.nan, math.nan)
        if not empty:
            warnings.append("one datum and one replicate give no error bar: use more data or replicates")
    else:
        half = student_quantile(0.5 + confidence / 2, degrees) * stderr
        interval = (mean - half, mean + half)
    robust_mean, robust_interval = None, None
    if estimator.finite_variance is False:
        robust_mean, robust_interval = median_of_means(per_datum if data > 1 else values[0], confidence)
        warnings.append("this estimator's variance is infinite: the interval is not to be trusted (see robust_interval)")
    unseen = estimator.unseen_share(values.numel())
    if estimator.finite_variance and unseen > 0.5:
        warnings.append(
            f"about {unseen:.0%} of this estimator's variance comes from depths that {values.numel()} draws hardly reach: the "
            "standard error is far too small; use symmetric-sumo or multilevel-rr"
        )
    heavy = float((khat > _HEAVY).double().mean()) if len(khat) else 0.0
    if heavy > 0:
        warnings.append(
            f"Pareto k-hat is above {_HEAVY} for {heavy:.0%} of the {len(khat)} data examined (largest "
            f"{float(khat[khat.isfinite()].max()):.2f}): their weights may have no variance, and errors may be larger than stated"
        )
    return Evaluation(
        mean, stderr, noise, interval, robust_mean, robust_interval, per_datum, replicates, cost, khat,
        estimator.kind, tuple(warnings), fingerprint,
    )  # fmt: skip


def compare(a: Evaluation, b: Evaluation, confidence: float = 0.95) -> Comparison:
    """How much more probable model a makes the data than model b: paired differences, so the data's spread cancels."""
    if len(a.per_datum) != len(b.per_datum) or a.fingerprint != b.fingerprint:
        raise DohyoError(
            f"the evaluations are of different data ({len(a.per_datum)} and {len(b.per_datum)} of them, "
            f"checksums {a.fingerprint:x} and {b.fingerprint:x}); evaluate both models on the same"
        )
    if len(a.per_datum) < 2:
        raise DohyoError("one datum gives no error bar for the difference; compare on at least two")
    delta = a.per_datum - b.per_datum
    if not bool(delta.isfinite().all()):
        raise DohyoError("some estimates are -inf, so that there is no difference; see the evaluations' warnings")
    warnings = []
    if a.kind != b.kind:
        warnings.append(f"a is {a.kind} and b is {b.kind}: their difference is not a difference of log p(x)")
    elif a.kind != "unbiased":
        warnings.append(f"both are {a.kind}: their difference is neither a bound on that of log p(x) nor unbiased for it")
    warnings += [f"{name}: {warning}" for name, side in (("a", a), ("b", b)) for warning in side.warnings]
    difference, stderr = float(delta.mean()), float(delta.std() / math.sqrt(len(delta)))
    half = student_quantile(0.5 + confidence / 2, len(delta) - 1) * stderr
    return Comparison(difference, stderr, (difference - half, difference + half), tuple(warnings))


def student_quantile(p: float, degrees: int) -> float:
    """Student's t quantile for 1/2 < p < 1, by bisection on the closed form of its distribution function."""
    if degrees > 200:  # Hill's expansion, exact to 1e-6 from here on
        z = float(torch.special.ndtri(torch.tensor(p, dtype=torch.float64)))
        return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _central_probability(angle, degrees) < 2 * p - 1 else (low, angle)
    return math.sqrt(degrees) * math.tan(angle)


def _central_probability(angle: float, degrees: int) -> float:
    """P(|T| < sqrt(degrees) tan(angle)), a finite sum of powers of the cosine (Abramowitz and Stegun 26.7.3-4)."""
    term, total = (math.cos(angle), 0.0) if degrees % 2 else (1.0, 0.0)
    for i in range(1 + degrees % 2, degrees, 2):
        total += term
        term *= i / (i + 1) * math.cos(angle) ** 2
    return 2 / math.pi * (angle + math.sin(angle) * total) if degrees % 2 else math.sin(angle) * total


class _Counted:
    """A source of log-weights that knows how many were asked for."""

    def __init__(self, source: Callable[[Tensor], Tensor]) -> None:
        self.source, self.rows = source, 0

    def __call__(self, rows: Tensor) -> Tensor:
        self.rows += len(rows)
        return self.source(rows)


@contextmanager
def apart(model: object, seed: int) -> Iterator[None]:
    """No gradients, evaluation mode, a seed of its own; all put back afterwards."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [module.training for module in modules]
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(seed)
        for module in modules:
            module.training = False
        try:
            yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode


def _tensors(batches: Iterable[Any]) -> Iterator[Tensor]:
    for batch in batches:
        x = batch[0] if isinstance(batch, tuple | list) else batch
        if not isinstance(x, Tensor):
            raise DohyoError(f"a batch is a {type(x).__name__}; it must be a tensor, or a tuple that begins with one")
        yield x


def _first(batches: Iterable[Any], count: int) -> Iterator[Tensor]:
    for x in _tensors(batches):
        if count <= 0:
            return
        yield x[:count]
        count -= len(x)
