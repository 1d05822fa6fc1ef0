import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from dohyo import ELBO, IWAE, SUMO, Finite, MultilevelRR, SymmetricSUMO, compare, evaluate
from dohyo.evaluation import data_at_a_time, summarise
from dohyo.models import VAE

from problems import LinearGaussian
from stats import errors_off

PROBLEM = LinearGaussian()


@pytest.fixture(scope="module")
def data() -> Tensor:
    torch.manual_seed(0)
    return PROBLEM.sample(2000)


def test_mean_and_errors_on_the_toy(data: Tensor) -> None:
    result = evaluate(PROBLEM, data, MultilevelRR(4), replicates=4)
    exact = PROBLEM.exact(data)
    assert result.kind == "unbiased"
    assert result.noise_stderr is not None
    assert abs(result.mean - float(exact.mean())) < 4 * result.noise_stderr
    assert result.stderr > float(exact.std()) / math.sqrt(2000)
    assert result.interval[0] < result.mean < result.interval[1]
    bound = evaluate(PROBLEM, data, ELBO(4), replicates=4)
    assert bound.kind == "lower bound"
    assert bound.noise_stderr is not None
    assert bound.mean < float(exact.mean()) - 4 * bound.noise_stderr  # the power twin


def test_the_noise_error_is_calibrated(data: Tensor) -> None:
    """Repeated evaluations of the same data scatter by `noise_stderr`."""
    few = data[:100]
    runs = [evaluate(PROBLEM, few, MultilevelRR(2), replicates=4, seed=seed, khat_samples=0) for seed in range(60)]
    scatter = float(torch.tensor([run.mean for run in runs]).std())
    stated = math.sqrt(sum((run.noise_stderr or 0) ** 2 for run in runs) / len(runs))
    assert scatter == pytest.approx(stated, rel=0.35)


def test_the_noise_does_not_know_k() -> None:
    """One datum over many seeds: were K and z made of the same random bits, the mean would be off by 0.25."""

    class LogNormal:
        def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
            return torch.randn(len(rows), dtype=torch.float64)

    estimator = SUMO(1, Finite((0.4, 0.3, 0.3)))
    log_w = torch.randn(400_000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    truth = float((log_w.logsumexp(-1) - math.log(4)).mean())
    values = [evaluate(LogNormal(), torch.zeros(1, 1), estimator, khat_samples=0, seed=seed).mean for seed in range(1000)]
    assert errors_off(torch.tensor(values), truth) < 4


def test_the_whole_error_covers_new_data() -> None:
    torch.manual_seed(1)
    truth = float(PROBLEM.exact(PROBLEM.sample(400_000)).mean())
    covered = 0
    for seed in range(100):
        low, high = evaluate(PROBLEM, PROBLEM.sample(50), MultilevelRR(2), seed=seed, khat_samples=0).interval
        covered += low <= truth <= high
    assert covered >= 84  # of a 95% interval: four standard errors below


def test_a_target_error_is_met(data: Tensor) -> None:
    loose = evaluate(PROBLEM, data, MultilevelRR(1), khat_samples=0)
    tight = evaluate(PROBLEM, data, MultilevelRR(1), target_stderr=0.01, khat_samples=0)
    assert tight.replicates > loose.replicates
    assert tight.noise_stderr == pytest.approx(0.01, rel=0.4)
    assert evaluate(PROBLEM, data[:200], IWAE(2), target_stderr=9.0, khat_samples=0).noise_stderr is not None
    with pytest.raises(ValueError, match="finite"):
        evaluate(PROBLEM, data, SUMO(1), target_stderr=0.01)
    with pytest.raises(ValueError, match="empty"):
        evaluate(PROBLEM, data[:0], IWAE(2), target_stderr=0.01)


def test_an_infinite_variance_is_said_and_a_robust_interval_given(data: Tensor) -> None:
    result = evaluate(PROBLEM, data, SUMO(4))
    assert any("infinite" in warning for warning in result.warnings)
    assert result.robust_interval is not None
    low, high = result.robust_interval
    assert low < float(PROBLEM.exact(data).mean()) < high
    capped = evaluate(PROBLEM, data, SUMO(4, Finite((0.5, 0.5))))
    assert capped.kind == "unbiased for IWAE_6"
    assert capped.robust_interval is None
    assert not any("infinite" in warning for warning in capped.warnings)


def test_cost_counts_every_log_weight(data: Tensor) -> None:
    class Counting(LinearGaussian):
        rows = 0

        def log_weights(self, x: Tensor, rows: Tensor, theta: Tensor | None = None) -> Tensor:
            self.rows += len(rows)
            return super().log_weights(x, rows, theta)

    model = Counting()
    result = evaluate(model, data[:130], SymmetricSUMO(), replicates=2, khat_samples=30)
    assert result.cost == model.rows
    model.rows = 0
    assert evaluate(model, data[:130], IWAE(7), target_stderr=0.1).cost == model.rows


def test_heavy_weights_are_warned_of(data: Tensor) -> None:
    class Heavy:
        def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
            return 5 * torch.randn(len(rows))

    assert any("k-hat" in warning for warning in evaluate(Heavy(), data[:20], IWAE(5)).warnings)
    light = evaluate(PROBLEM, data[:20], IWAE(5), khat_data=7)
    assert len(light.khat) == 7


def test_nothing_outside_is_disturbed_and_seeds_decide(data: Tensor) -> None:
    model = VAE(data=20, hidden=8, latent=3)
    model.decoder.eval()  # a part that the user froze
    binary = (data > 0).float()[:150]
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    a = evaluate(model, binary, SUMO(2), seed=1)
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.training
    assert not model.decoder.training
    assert torch.equal(a.per_datum, evaluate(model, binary, SUMO(2), seed=1).per_datum)
    assert not torch.equal(a.per_datum, evaluate(model, binary, SUMO(2), seed=2).per_datum)
    assert torch.equal(a.per_datum, evaluate(model, binary, SUMO(2), seed=np.int64(1)).per_datum)


def test_batches_of_any_kind(data: Tensor) -> None:
    whole = evaluate(PROBLEM, data[:250], IWAE(3), batch_size=100)
    generator = evaluate(PROBLEM, (part for part in data[:250].split(100)), IWAE(3))
    assert torch.equal(generator.per_datum, whole.per_datum)
    loader = DataLoader(TensorDataset(data[:250], torch.zeros(250)), batch_size=100)  # it draws a seed of its own
    loaded = evaluate(PROBLEM, loader, IWAE(3))
    assert compare(whole, loaded).difference == pytest.approx(0, abs=0.5)
    assert len(loaded.khat) == len(generator.khat) >= 8


@pytest.mark.parametrize(
    ("device", "estimator", "max_rows", "expected"),
    [
        ("cpu", IWAE(1), None, 100),
        ("meta", IWAE(1), None, 4096),
        ("meta", IWAE(64), None, 3125),
        ("meta", IWAE(64), 12_800, 200),
        ("meta", IWAE(5000), None, 100),
    ],
)
def test_data_at_a_time(device: str, estimator: IWAE, max_rows: int | None, expected: int) -> None:
    """Off the CPU, as many as fill `max_rows`: with 100 at a time an H200 took 13 s instead of 2 for 10,000 images."""
    assert data_at_a_time(torch.empty(2, 3, device=device), estimator, max_rows) == expected


def test_compare_pairs_the_data(data: Tensor) -> None:
    other = LinearGaussian()
    other.theta = other.theta + 0.1
    a, b = (evaluate(model, data, MultilevelRR(4)) for model in (PROBLEM, other))
    found = compare(a, b)
    exact = PROBLEM.exact(data) - other.exact(data)
    assert abs(found.difference - float(exact.mean())) < 4.5 * found.stderr
    assert found.stderr < 0.5 * math.hypot(a.stderr, b.stderr)
    assert found.warnings == ()
    bound = evaluate(PROBLEM, data, IWAE(2))
    assert "not a difference" in compare(a, bound).warnings[0]
    with pytest.raises(ValueError, match="different data"):
        compare(a, evaluate(PROBLEM, data + 1, MultilevelRR(4)))
    with pytest.raises(ValueError, match="different data"):
        compare(a, evaluate(PROBLEM, data[:9], MultilevelRR(4)))


def test_zero_weights_are_said() -> None:
    class Empty:
        def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
            return torch.where(rows == 3, -torch.inf, 0.0)

    result = evaluate(Empty(), torch.zeros(10, 1), IWAE(5))
    assert result.mean == -math.inf
    assert "1 of 10 estimates are -inf" in result.warnings[0]
    assert json.loads(json.dumps(result.to_dict()))["mean"] is None


def test_one_datum() -> None:
    x = PROBLEM.sample(1)
    single = evaluate(PROBLEM, x, IWAE(5))
    assert math.isnan(single.stderr)
    assert "no error bar" in single.warnings[-1]
    several = evaluate(PROBLEM, x, IWAE(5), replicates=10)
    assert several.stderr == several.noise_stderr


@pytest.mark.parametrize(("data", "quantile"), [(2, 12.7062), (4, 3.1824), (31, 2.0423), (1001, 1.9623)])
def test_the_interval_is_students(data: int, quantile: float) -> None:
    values = torch.randn(data, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    result = summarise(values, IWAE(2), 0, torch.empty(0))
    low, high = result.interval
    assert (high - result.mean, result.mean - low) == pytest.approx((quantile * result.stderr,) * 2, rel=1e-4)


def test_summary_is_json() -> None:
    result = summarise(torch.randn(50, 3, dtype=torch.float64), SUMO(2), 100, torch.rand(50))
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["data"] == 50
    assert set(plain["khat"]) == {"examined", "median", "max", "share_above_0.7"}


def test_bad_input(data: Tensor) -> None:
    for arguments, message in (
        ({"replicates": 0}, "replicates"),
        ({"confidence": 1.0}, "confidence"),
        ({"target_stderr": -1.0}, "positive"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(PROBLEM, data, IWAE(3), **arguments)
    with pytest.raises(ValueError, match="empty"):
        evaluate(PROBLEM, data[:0], IWAE(3))
    with pytest.raises(ValueError, match="must be a tensor"):
        evaluate(PROBLEM, [["a"]], IWAE(3))

    class Broken:
        def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
            return torch.full((len(rows),), math.nan)

    with pytest.raises(ValueError, match="NaN"):
        evaluate(Broken(), data[:5], IWAE(3))


def test_it_prints_as_a_short_summary_and_has_every_value(data: Tensor) -> None:
    found = evaluate(PROBLEM, data[:100], MultilevelRR(4), replicates=3)
    assert repr(found).startswith(f"log p(x) = {found.mean:.2f}")
    assert len(repr(found)) < 300
    assert "unbiased; 100 data" in repr(found)
    assert "tensor" not in repr(found)
    heavy = evaluate(PROBLEM, data[:3], SUMO(2), khat_samples=0)
    assert heavy.verdict.reason in repr(heavy)
    values = json.loads(json.dumps(found.to_dict(values=True)))
    assert values["log_px"] == found.per_datum.tolist()
    assert found.per_datum_stderr is not None
    assert values["noise"] == found.per_datum_stderr.tolist()
    assert len(values["khat_values"]) == len(found.khat)
    assert {"log_px", "noise", "khat_values"} & set(found.to_dict()) == set()


def test_khat_takes_a_small_share_of_the_weights(data: Tensor) -> None:
    """300 data at cost 15: it took 32,000 of 36,330 weights. At a higher cost more data are examined."""
    few = evaluate(PROBLEM, data[:300], IWAE(15))
    assert (len(few.khat), few.cost) == (8, 300 * 15 + 8 * 200)
    many = evaluate(PROBLEM, data[:300], IWAE(200))
    assert (len(many.khat), many.cost) == (30, 300 * 200 + 30 * 500)
    assert evaluate(PROBLEM, data[:300], IWAE(15), khat_data=0).cost == 300 * 15
    assert evaluate(PROBLEM, data[:300], IWAE(15), khat_data=9).cost == 300 * 15 + 9 * 500
