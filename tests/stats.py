"""Statistical checks: fixed seeds, thresholds in standard errors, and no tolerance that a biased estimator passes."""

import math

from torch import Tensor


def errors_off(samples: Tensor, exact: float | Tensor) -> float:
    """The largest distance of a column's mean from its exact value, in standard errors."""
    samples = samples.double().reshape(len(samples), -1)
    stderr = samples.std(0) / math.sqrt(len(samples))
    return float(((samples.mean(0) - exact) / stderr).abs().max())
