"""The loop by hand in `benchmarks.epochs` does what `fit` does, and the committed file holds every run with its goal."""

import json
from pathlib import Path

import pytest
import torch

from dohyo.lab import LoopConfig, fit

from benchmarks import epochs


def test_the_loop_by_hand_learns_what_fit_learns() -> None:
    torch.manual_seed(0)
    images = (torch.rand(500, 784) < torch.linspace(0.05, 0.5, 784)).float()
    train, valid = images[:400], images[400:]
    hand = epochs.by_hand(train, valid, 5, fused=True)
    by_hand = [next(hand) for _ in range(3)]
    config = LoopConfig(epochs=3, valid_terms=epochs.VALID_TERMS, device="cpu")
    ours = [record["valid_nll"] for record in fit(epochs.VAE(), (train, valid), epochs.objectives(5)["iwae"], config)]
    assert by_hand[-1] < by_hand[0] - 20
    assert by_hand == pytest.approx(ours, rel=0.03)  # other parameters at the start, and other noise


@pytest.mark.parametrize("cost", epochs.COSTS)
def test_the_mean_over_the_law_is_that_of_time_in_proportion(cost: int) -> None:
    for name, objective in epochs.objectives(cost).items():
        estimator = objective.estimator
        nodes = epochs.timed_counts(estimator)
        mean = epochs.mean_over_law(estimator, {n: 3.0 + 2.0 * n for n in nodes})
        assert mean == pytest.approx(3.0 + 2.0 * estimator.expected_cost, rel=1e-5), name
        x = torch.zeros(4, 784)
        assert all(epochs.at_count(objective, n).estimator.plan(4, None, True, False).tolist() == [n] * 4 for n in nodes)
        assert epochs.at_count(objective, nodes[-1])(epochs.VAE(), x).loss.requires_grad


def test_the_committed_file_has_every_run_with_its_goal() -> None:
    found = json.loads((Path(__file__).parents[1] / "results" / "throughput.json").read_text(encoding="utf-8"))["epochs"]["runs"]
    assert all(row["timed_at"] and 0 <= row["beyond_the_last"] < 0.5 for row in found)
    on_two = {(row["run"], row["cost"]): row["ratio"] for row in found if row["threads"] == 2}
    assert set(on_two) == {(name, cost) for name in epochs.GOALS for cost in epochs.COSTS}
    for (name, _), ratio in on_two.items():
        assert ratio["goal"] == epochs.GOALS[name]
        assert ratio["met"] == (ratio["of_means"] <= ratio["goal"])
