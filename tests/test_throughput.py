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
    model = epochs.Counted()
    config = LoopConfig(epochs=3, valid_terms=epochs.VALID_TERMS, device="cpu")
    ours = [record["valid_nll"] for record in fit(model, (train, valid), epochs.objectives(5)["iwae"], config)]
    assert by_hand[-1] < by_hand[0] - 20
    assert by_hand == pytest.approx(ours, rel=0.03)  # other parameters at the start, and other noise
    assert model.rows >= 3 * 400 * 5


def test_the_seed_of_k_costs_what_the_law_says() -> None:
    for name, objective in epochs.objectives(5).items():
        steps, seed = 5 * epochs.STEPS, epochs.seed_of_k(objective.estimator, 5 * epochs.STEPS)
        counts = objective.estimator.shared_plans(steps, torch.Generator().manual_seed(seed + 1))[epochs.STEPS :]
        assert sum(counts) / len(counts) == pytest.approx(objective.estimator.expected_cost, rel=0.01), name


def test_the_committed_file_has_every_run_with_its_goal() -> None:
    found = json.loads((Path(__file__).parents[1] / "results" / "throughput.json").read_text(encoding="utf-8"))["epochs"]["runs"]
    on_two = {(row["run"], row["cost"]): row["ratio"] for row in found if row["threads"] == 2}
    assert set(on_two) == {(name, cost) for name in epochs.GOALS for cost in epochs.COSTS}
    for (name, _), ratio in on_two.items():
        assert ratio["goal"] == epochs.GOALS[name]
        assert ratio["met"] == (ratio["of_means"] <= ratio["goal"])
