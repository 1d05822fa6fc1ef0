"""How many files and functions of dohyo one call passes: the table in docs/architecture.md, counted again."""

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dohyo
from dohyo.lab.data import load
from dohyo.lab.training.config import LoopConfig
from dohyo.lab.training.processes import launch
from dohyo.lab.training.state import State
from dohyo.lab.training.step import Totals, train_step
from dohyo.objectives import MaximumLikelihood

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
SOURCE = str(Path(dohyo.__file__).parent)
DATA = load("digits").flat()


class Own(nn.Module):
    """What a user writes: one method, and the two marks."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 8), nn.Linear(4, 64)

    def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
        mean, log_scale = self.encoder(x)[rows].chunk(2, -1)
        q = torch.distributions.Normal(mean, log_scale.exp(), validate_args=False)
        z = q.rsample()
        log_q, z = dohyo.proposed(q.log_prob(z).sum(-1)), dohyo.proposed(z)
        log_lik = torch.distributions.Bernoulli(logits=self.decoder(z), validate_args=False).log_prob(x[rows]).sum(-1)
        return torch.as_tensor(log_lik - 0.5 * z.square().sum(-1) - log_q)


def passed(work: Callable[[], object]) -> tuple[int, int]:
    """Files and functions of a second call, without comprehensions and lambdas."""
    seen = set()
    work()  # what the first call alone computes, and keeps, depends on the tests before

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and not code.co_name.startswith("<"):
            seen.add((code.co_filename, code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return len({file for file, _ in seen}), len(seen)


def step(model: nn.Module, estimator: dohyo.Estimator) -> tuple[int, int]:
    """A plain step with both gradients clipped."""
    config, fabric, objective = LoopConfig(clip_decoder=20.0, clip_encoder=125.0), launch("cpu"), MaximumLikelihood(estimator)
    state, totals = State.start(model, config, fabric, objective.shared), Totals.start(None, fabric.device)
    return passed(lambda: train_step(state, DATA.train[:100], 100, objective, config, fabric, totals))


def vae() -> dohyo.models.VAE:
    return dohyo.models.VAE(data=64, hidden=16, latent=4)


WALKS: dict[str, Callable[[], tuple[int, int]]] = {
    "a plain step": lambda: step(Own(), dohyo.IWAE(5)),
    "the same with `dohyo.models.VAE`": lambda: step(vae(), dohyo.IWAE(5)),
    "the same with SUMO and DReG": lambda: step(vae(), dohyo.SUMO.at_cost(15)),
    "`dohyo.evaluate`": lambda: passed(partial(dohyo.evaluate, vae(), DATA.test[:10], dohyo.MultilevelRR.at_cost(15))),
}


@pytest.mark.parametrize("row", WALKS)
def test_no_walk_is_longer_than_the_page_says(row: str) -> None:
    torch.manual_seed(0)
    files, functions = WALKS[row]()
    written = re.search(rf"^\| {re.escape(row)}.*\| (\d+) \| (\d+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert written is not None
    assert files <= int(written[1])
    assert functions <= int(written[2])
    if row == "a plain step":
        assert files <= 8
        assert functions <= 25
