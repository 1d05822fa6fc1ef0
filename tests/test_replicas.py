"""Replicas in one program: the same numbers as the plain loop, one run at a time; and models that cannot go so."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dohyo
from dohyo.lab.fast.noise import FromGenerator
from dohyo.lab.fast.stacked import Stacked, Unbatchable
from dohyo.lab.fast.together import Replica, train_together
from dohyo.lab.fast.trial import check_batchable
from dohyo.lab.training import train
from dohyo.lab.training.state import load_checkpoint
from dohyo.lab.training.tasks import OnData
from dohyo.models import VAE, TwoLayerVAE
from teams import DATA, Handmade, alone, assert_same, config, model, objective, together


@pytest.mark.parametrize(
    ("name", "encoder"),
    [("iwae", "same"), ("elbo", None), ("jvi", None), ("sumo", "dreg"), ("sumo", "variance"), ("sumo", "iwae"),
     ("symmetric-sumo", None), ("multilevel-rr", None), ("multilevel-ss", None)],
)  # fmt: skip
def test_replicas_are_the_runs_alone(name: str, encoder: str | None) -> None:
    wanted = objective(name, encoder)
    records, models = together([3, 4], wanted)
    assert [record["seconds"] for record in records[0]] == [record["seconds"] for record in records[1]]
    for place, seed in enumerate((3, 4)):
        assert_same((records[place], models[place]), alone(seed, wanted))


def test_replicas_differ_from_each_other() -> None:
    """The power of the test above: another seed is another run."""
    wanted = objective("sumo")
    records, models = together([3, 4], wanted)
    with pytest.raises(AssertionError):
        assert_same((records[0], models[0]), alone(4, wanted))


def test_replicas_of_two_stochastic_layers_with_everything_else() -> None:
    """A proposal with parameters of its own, clipping of data, RMSprop, a last batch that is smaller."""
    wanted = objective("sumo", clip_datum=2.0)
    options: dict[str, Any] = {"optimiser": "rmsprop", "batch_size": 500, "clip_decoder": 0.5, "clip_encoder": None}
    records, models = together([0, 1, 2], wanted, TwoLayerVAE, **options)
    assert records[0][0]["clipped_decoder"] > 0
    assert records[0][0]["clipped_data"] > 0
    for seed in range(3):
        assert_same((records[seed], models[seed]), alone(seed, wanted, TwoLayerVAE, **options))


class Frozen(VAE):
    """Parts of both networks are not trained."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.decoder[0].weight.requires_grad_(False)
        self.encoder[2].bias.requires_grad_(False)


class Tied(VAE):
    """Two layers of the decoder have one matrix."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(data=64, hidden=4, latent=4)
        self.decoder[2].weight = self.decoder[0].weight


@pytest.mark.parametrize("cls", [Frozen, Tied])
def test_models_with_peculiar_parameters(cls: type[nn.Module]) -> None:
    wanted = objective("sumo")
    records, models = together([0, 1], wanted, cls)
    for seed in range(2):
        assert_same((records[seed], models[seed]), alone(seed, wanted, cls))
        if cls is Frozen:
            assert torch.equal(models[seed].decoder[0].weight, model(seed, cls).decoder[0].weight)


def test_a_model_without_bind_that_was_in_evaluation_mode() -> None:
    wanted = objective("iwae")
    records, models = together([0, 1], wanted, Handmade)
    for seed in range(2):
        assert_same((records[seed], models[seed]), alone(seed, wanted, Handmade))


def test_parameters_of_several_types_train_alone() -> None:
    made = model(0)
    made.shift = nn.Parameter(torch.zeros((), dtype=torch.float64))
    assert len(list(dohyo.lab.fit(made, DATA, objective("iwae"), config(0)))) == 2


class Poisoned(VAE):
    """One with poison overflows once its parameters have moved."""

    poison: Tensor
    start: Tensor

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.register_buffer("poison", torch.zeros(()))
        self.register_buffer("start", torch.zeros(64))

    def bind(self, x: Tensor, **options: bool) -> Any:
        source = super().bind(x, **options)
        return lambda rows: source(rows) + (self.poison * (self.decoder[-1].bias - self.start).sum()) ** 2


def test_a_replica_that_diverges_leaves_the_others(tmp_path: Path) -> None:
    models, wanted = [model(seed, Poisoned) for seed in range(3)], objective("iwae")
    for made in models:
        made.start.copy_(made.decoder[-1].bias.detach())
    models[1].poison.fill_(1e38)
    members = [Replica(m, OnData(DATA), config(seed), tmp_path / str(seed)) for seed, m in enumerate(models)]
    seen: list[tuple[int, int]] = []
    with pytest.raises(ValueError, match=r"diverged in epoch 1 .* kept in .*1 "):
        seen.extend((place, record["epoch"]) for place, record in train_together(members, wanted))
    assert seen == [(0, 1), (2, 1), (0, 2), (2, 2)]
    assert not (tmp_path / "1/checkpoint.pt").exists()
    for a, b in zip(models[2].parameters(), alone(2, wanted)[1].parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5, rtol=0)


def test_members_are_alike() -> None:
    models = [model(seed) for seed in range(2)]
    for changes, why in (({"clip_decoder": 1.0}, "clip_decoder is 1.0 and 20.0"), ({"k_seed": None}, "k_seed")):
        members = [Replica(m, OnData(DATA), config(seed, **(changes if seed else {}))) for seed, m in enumerate(models)]
        with pytest.raises(ValueError, match=why):
            list(train_together(members, objective("sumo")))


def test_noise_of_the_data_is_each_run_s_own() -> None:
    @dataclasses.dataclass(frozen=True, eq=False)
    class ByHand(type(DATA)):  # type: ignore[misc]
        def train_batch(self, index: Tensor) -> Tensor:
            return (torch.rand_like(self.train[index]) < self.train[index]).float()

    class Numpy(ByHand):
        def train_batch(self, index: Tensor) -> Tensor:
            return torch.from_numpy(np.random.default_rng().random((len(index), 64))).round().float()

    fields = {field.name: getattr(DATA, field.name) for field in dataclasses.fields(DATA)}
    wanted = objective("iwae")
    models = [model(seed) for seed in range(2)]
    members = [Replica(m, OnData(ByHand(**fields)), config(seed)) for seed, m in enumerate(models)]
    list(train_together(members, wanted))
    for seed in range(2):
        made = model(seed)
        list(dohyo.lab.fit(made, ByHand(**fields), wanted, config(seed)))
        assert_same(([], models[seed]), ([], made))
    members = [Replica(m, OnData(Numpy(**fields)), config(seed)) for seed, m in enumerate(models)]
    with pytest.raises(Unbatchable, match="other ways"):
        list(train_together(members, wanted))


def test_replicas_that_were_killed_apart_catch_up(tmp_path: Path) -> None:
    """Their checkpoints are those of runs alone: one of three epochs, one of two, one of none."""
    wanted = objective("sumo")
    for seed, epochs in ((0, 3), (1, 2)):
        list(dohyo.lab.fit(model(seed), DATA, wanted, config(seed, epochs=epochs), tmp_path / str(seed)))
    models = [model(seed) for seed in range(3)]
    members = [Replica(made, OnData(DATA), config(seed, epochs=4), tmp_path / str(seed)) for seed, made in enumerate(models)]
    seen = [(place, record["epoch"]) for place, record in train_together(members, wanted)]
    assert seen == [(2, 1), (2, 2), (1, 3), (2, 3), (0, 4), (1, 4), (2, 4)]
    for seed in range(3):
        made = model(seed)
        list(dohyo.lab.fit(made, DATA, wanted, config(seed, epochs=4)))
        best = load_checkpoint(tmp_path / str(seed))["best"]
        for key, value in made.state_dict().items():
            assert torch.allclose(best[key], value, atol=1e-5, rtol=0)
            assert best[key].untyped_storage().nbytes() == value.untyped_storage().nbytes()  # nobody else's numbers
        for own in load_checkpoint(tmp_path / str(seed))["optimiser"]["state"].values():
            assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in own.values())


def test_a_replica_that_stops_early_leaves_the_others() -> None:
    models, wanted = [model(seed) for seed in range(3)], objective("iwae")
    members = [Replica(m, OnData(DATA), config(seed, epochs=3 if seed != 1 else 1)) for seed, m in enumerate(models)]
    assert [place for place, _ in train_together(members, wanted)] == [0, 1, 2, 0, 2, 0, 2]
    for seed in range(3):
        _, made = alone(seed, wanted, epochs=members[seed].config.epochs)
        for a, b in zip(models[seed].state_dict().values(), made.state_dict().values(), strict=True):
            assert torch.allclose(a, b, atol=1e-5, rtol=0)


class InPlace(VAE):
    """Draws its noise in a way that the mapping does not see."""

    def bind(self, x: Tensor, **options: bool) -> Any:
        source = super().bind(x, **options)

        def shifted(rows: Tensor) -> Tensor:
            noise = torch.empty(len(rows))
            noise.normal_()
            return source(rows) + noise

        return shifted


class Counting(VAE):
    """Changes a buffer whenever it runs."""

    calls: Tensor

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.register_buffer("calls", torch.zeros(()))

    def encode(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().encode(x)


class Shared(VAE):
    """Has one layer in two places."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(data=64, hidden=4, latent=4)
        self.decoder[2] = self.decoder[0]


class Branching(VAE):
    """Looks at its numbers, which no map over replicas can."""

    def encode(self, x: Tensor) -> Tensor:
        code = super().encode(x)
        return code if float(code.detach().sum()) > 0 else code + 0.0


@pytest.mark.parametrize(
    ("cls", "why"),
    [(InPlace, "cannot|other"), (Counting, "buffers"), (Shared, "two places"), (Branching, "cannot be (mapped|captured)")],
)
def test_models_that_cannot_be_mapped(cls: type[nn.Module], why: str) -> None:
    models = [model(seed, cls) for seed in range(2)]
    with pytest.raises(Unbatchable, match=why):
        check_batchable(models, DATA.valid[:2], torch.tensor([0, 0, 1, 1]), "same")
    with pytest.raises(Unbatchable, match=why):
        list(train_together([Replica(m, OnData(DATA), config(seed)) for seed, m in enumerate(models)], objective("sumo")))
    list(dohyo.lab.fit(models[0], DATA, objective("iwae"), config(0, "auto", epochs=1)))  # alone it trains as ever
    with pytest.raises(Unbatchable, match=why):
        list(dohyo.lab.fit(models[0], DATA, objective("iwae"), config(0, "captured", epochs=1)))


def test_a_parameter_that_is_listed_twice() -> None:
    class Twice(VAE):
        def decoder_parameters(self) -> Any:
            return [*super().decoder_parameters(), self.decoder[0].weight]

    with pytest.raises(ValueError, match="twice"):
        alone(0, objective("iwae"), Twice)

    class Both(VAE):
        def decoder_parameters(self) -> Any:
            return [*super().decoder_parameters(), self.encoder[0].weight]

    with pytest.raises(ValueError, match="Both lists a parameter in both"):
        alone(0, objective("iwae"), Both)


def test_noise_from_a_generator_is_the_global_noise() -> None:
    p = torch.rand(50)
    torch.manual_seed(5)
    wanted = torch.bernoulli(p), torch.randn(3), torch.distributions.Normal(0.0, 1.0).sample((4,))
    with FromGenerator(torch.Generator().manual_seed(5)):
        found = torch.bernoulli(p), torch.randn(3), torch.distributions.Normal(0.0, 1.0).sample((4,))
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_each_model_gets_the_noise_of_its_own_generator() -> None:
    x, rows = DATA.valid[:4], torch.arange(2).repeat_interleave(3)
    models = [model(0), model(1)]
    stacked = Stacked(models, [torch.Generator().manual_seed(seed) for seed in (5, 6)], "same")
    log_w, factors = stacked(x, rows, stacked.noise(x, rows))
    alone = []
    for place, made in enumerate(models):
        torch.manual_seed(5 + place)
        alone.append(made.log_weights(x[2 * place :][:2], torch.arange(2).repeat_interleave(3)))
    assert factors == []
    torch.testing.assert_close(log_w, torch.cat(alone))


def test_batches_of_one_s_own_train_alone() -> None:
    class Half(OnData):
        def batches(self, config: Any, progress: Any, order: torch.Generator) -> Any:
            yield from torch.randperm(len(self.data.train), generator=order)[:600].split(300)

    members = [Replica(model(seed), Half(DATA), config(seed)) for seed in range(2)]
    with pytest.raises(Unbatchable, match="Half makes batches of its own"):
        list(train_together(members, objective("iwae")))
    alone = train(members[0].model, members[0].task, objective("iwae"), members[0].config)
    assert [record["step"] for record in alone] == [2, 4]
