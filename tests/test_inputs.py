"""`fit` on tensors and loaders, and the guide's own loop beside it."""

import doctest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import dohyo
from dohyo.lab import LoopConfig, fit
from dohyo.models import VAE
from dohyo.objectives import MaximumLikelihood

GUIDE = Path(__file__).parent.parent / "docs" / "guides" / "own-loop.md"
X = (torch.rand(50, 1, 3, 4, generator=torch.Generator().manual_seed(0)) < torch.linspace(0.02, 0.3, 4)).float()
LOADER = DataLoader(TensorDataset(X[:40], torch.arange(40)), batch_size=15, shuffle=True)
OBJECTIVE = MaximumLikelihood(dohyo.IWAE(3))


def fitted(data: Any, folder: Path | None = None, epochs: int = 3) -> tuple[list[float], torch.Tensor]:
    """The validation NLL after each epoch, and the trained parameters."""
    torch.manual_seed(0)
    model = VAE(data=12, hidden=6, latent=2)
    config = LoopConfig(epochs=epochs, batch_size=15, learning_rate=3e-2, checkpoint_seconds=0.0, device="cpu")
    records = list(fit(model, data, OBJECTIVE, config, folder))
    return [record["valid_nll"] for record in records], torch.cat([p.detach().flatten() for p in model.parameters()])


class OfTensors:
    """What a data set of these tensors would be."""

    train, valid = X[:40], X[40:]

    def train_batch(self, index: torch.Tensor) -> torch.Tensor:
        return self.train[index]

    def to(self, device: torch.device) -> "OfTensors":
        return self


def test_tensors_are_a_data_set() -> None:
    expected, found = fitted(OfTensors()), fitted((X[:40], X[40:]))
    assert expected[0] == found[0]
    assert torch.equal(expected[1], found[1])
    assert fitted((X[:40], DataLoader(X[40:], batch_size=4)))[0] == found[0]  # a loader to validate on


def seen(data: Any) -> list[list[float]]:
    """What a model is given in one epoch of batches of 45: the trial, then the batches, then the validation data."""
    given: list[list[float]] = []

    class Watching(VAE):
        def bind(self, x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            given.append(x.flatten().tolist())
            return super().bind(x, *arguments, **options)

    list(fit(Watching(data=1, hidden=2, latent=1), data, OBJECTIVE, LoopConfig(epochs=1, batch_size=45, device="cpu")))
    return given


def test_a_tenth_of_one_tensor_is_held_out() -> None:
    _, train, valid = map(set, seen(torch.arange(50.0)[:, None] / 50))
    assert (len(train), len(valid), len(train | valid)) == (45, 5, 50)


def test_a_loaders_batches_are_used_as_they_come() -> None:
    x = torch.arange(50.0)[:, None] / 50
    assert seen(([x[:3], (x[3:40], "labels")], x[40:])) == [part.flatten().tolist() for part in (x[:2], x[:3], x[3:40], x[40:])]


def test_a_run_on_a_loader_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    losses, parameters = fitted((LOADER, X[40:]))
    assert losses[-1] < losses[0]
    fitted((LOADER, X[40:]), tmp_path / "a", epochs=2)
    again, resumed = fitted((LOADER, X[40:]), tmp_path / "a")
    assert again == losses[2:]
    assert torch.equal(resumed, parameters)  # the shuffle comes from the run's own random numbers


BAD: dict[str, Any] = {
    "one": (X[:1], "at least 2 are needed"),
    "a loader alone": (LOADER, r"the data are a DataLoader; give .* a pair \(train, valid\)"),
    "nothing": (None, "the data are a NoneType"),
    "three": ((X, X, X), r"\(Tensor, Tensor, Tensor\)"),
    "a generator": ((iter([X]), X), "needed more than once"),
    "labels": ((X, torch.arange(50)), r"\(1, 3, 4\) in train and \(\) in valid"),
    "no validation": ((X, X[:0]), "which has 0"),
    "no batches": (([], X), "both must have data"),
    "words": ((["abc"], X), "a batch is of type str; it must be a tensor"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data(case: str) -> None:
    data, message = BAD[case]
    with pytest.raises(dohyo.DohyoError, match=message) as error:
        fitted(data)
    assert "\n" not in str(error.value)


@pytest.mark.slow  # the guide is run as a doctest, and `fit` has tests of its own
def test_the_guides_own_loop_reaches_what_fit_reaches() -> None:
    """The first blocks of the guide, as they stand there, against `fit` with the same settings."""
    parser, names = doctest.DocTestParser(), {}
    text = GUIDE.read_text(encoding="utf-8").partition("## What to log")[0]
    for example in parser.get_examples(text):
        exec(compile(example.source, str(GUIDE), "single"), names)
    model, digits, epochs = names["model"], names["digits"], names["epoch"] + 1
    torch.manual_seed(0)
    other = dohyo.models.Autoencoder(*names["networks"](), "bernoulli")
    config = LoopConfig(
        epochs=epochs, batch_size=100, optimiser="adam", learning_rate=3e-3, epsilon=1e-8, clip_decoder=20.0, clip_encoder=125.0,
        device="cpu",
    )  # fmt: skip
    before = dohyo.evaluate(other, digits.test, dohyo.IWAE(100), khat_data=0)
    list(fit(other, digits, names["objective"], config))
    own, ours = (dohyo.evaluate(each, digits.test, dohyo.IWAE(100), khat_data=0) for each in (model, other))
    assert ours.mean - before.mean > 10
    assert abs(own.mean - ours.mean) < 1.0  # over five seeds the two differed by 0.04 to 0.31
