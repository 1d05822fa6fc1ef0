"""What `dohyo.evaluate` found, for ArviZ: as `InferenceData`, and as what `arviz.compare` ranks models by."""

import math

import torch

from dohyo.errors import DohyoError
from dohyo.evaluation import Evaluation
from dohyo.integrations import missing

try:
    import arviz
    import xarray
    from arviz.stats.stats_utils import ELPDData
except ModuleNotFoundError as error:
    raise missing(error, "arviz") from None


def to_inference_data(evaluation: Evaluation) -> arviz.InferenceData:
    """An `InferenceData` with one group, `log_marginal`, and in it for each datum `log_px`, `noise` and `khat`.

    `noise` is the standard error of `log_px` that the estimator's noise makes, NaN with one replicate; `khat` is NaN for data
    that were not examined. The means, the kind and the warnings are attributes of the group. It is no `log_likelihood`, which
    ArviZ takes for that of posterior samples: log p(x) has no latents left to average over.

    Example:
        >>> import dohyo, torch
        >>> model = dohyo.models.VAE(data=6, hidden=8, latent=2)
        >>> found = dohyo.evaluate(model, torch.rand(50, 6).round(), dohyo.MultilevelRR.at_cost(15), replicates=2, khat_data=20)
        >>> group = to_inference_data(found).log_marginal
        >>> list(group), group.attrs["kind"], int(group.khat.notnull().sum())
        (['log_px', 'noise', 'khat'], 'unbiased', 20)
    """
    data = len(evaluation.per_datum)
    nothing = torch.full((data,), math.nan, dtype=torch.float64)
    noise = nothing if evaluation.per_datum_stderr is None else evaluation.per_datum_stderr
    khat = torch.cat([evaluation.khat.double(), nothing[len(evaluation.khat) :]])
    columns = {"log_px": evaluation.per_datum, "noise": noise, "khat": khat}
    known = {"mean", "stderr", "noise_stderr", "replicates", "cost", "kind", "warnings", "fingerprint"}
    # NetCDF has no null and no list of strings.
    attributes = {name: value for name, value in evaluation.to_dict().items() if name in known and value is not None}
    attributes["warnings"] = "; ".join(evaluation.warnings)
    dataset = xarray.Dataset({name: ("datum", column.numpy()) for name, column in columns.items()}, attrs=attributes)
    return arviz.InferenceData(log_marginal=dataset)


def elpd(evaluation: Evaluation) -> ELPDData:
    r"""The sum of log p(x) over the data, held out from training, as `arviz.compare` takes it.

    .. math:: \text{elpd} = \sum_i \log p(x_i)

    Nothing is left out and nothing smoothed: the keys say `loo` because `compare` knows no other, and `p_loo`, a number of
    parameters, is NaN. The standard error is that of the data and of the estimator's noise together. `warning` is set where
    the evaluation has warnings, or is not unbiased for log p(x).

    Example:
        >>> import arviz, dohyo, torch
        >>> _ = torch.manual_seed(0)
        >>> x = torch.rand(50, 6).round()
        >>> a, b = (dohyo.models.VAE(data=6, hidden=8, latent=2) for _ in range(2))
        >>> found = {name: dohyo.evaluate(model, x, dohyo.MultilevelRR.at_cost(15)) for name, model in (("a", a), ("b", b))}
        >>> table = arviz.compare({name: elpd(each) for name, each in found.items()})
        >>> bool(abs(table["elpd_diff"].iloc[1] - 50 * abs(dohyo.compare(found["a"], found["b"]).difference)) < 1e-9)
        True
    """
    values = evaluation.per_datum
    if len(values) < 2:
        raise DohyoError(f"{len(values)} datum gives no error bar for a comparison; evaluate at least two")
    if not bool(values.isfinite().all()):
        raise DohyoError("some estimates are -inf, so that there is nothing to compare; see the evaluation's warnings")
    khat = to_inference_data(evaluation).log_marginal.khat
    known = {
        "elpd_loo": float(values.sum()),
        "se": float(values.std() * math.sqrt(len(values))),
        "p_loo": math.nan,
        "n_samples": evaluation.replicates,
        "n_data_points": len(values),
        "warning": bool(evaluation.warnings) or evaluation.kind != "unbiased",
        "loo_i": xarray.DataArray(values.numpy(), dims="datum"),
        "scale": "log",
        "pareto_k": khat,
        "good_k": 0.7,
    }
    return ELPDData(list(known.values()), index=list(known))
