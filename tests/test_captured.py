"""Replicas in one program and the captured step: the same numbers as the plain loop, one run at a time."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import dohyo
from dohyo.data import load
from dohyo.estimators import ESTIMATORS
from dohyo.models import VAE, TwoLayerVAE
from dohyo.objectives import MaximumLikelihood, maximum_likelihood
from dohyo.training import graphs, programs
from dohyo.training.captured import traced
from dohyo.training.loop import Member, train_together
from dohyo.training.replicas import DrawnBy, Replicas, Unbatchable, check_batchable
from dohyo.training.state import load_checkpoint
from dohyo.training.tasks import OnData

CONFIG = dohyo.LoopConfig(epochs=2, batch_size=300, k_seed=0, clip_decoder=20.0, clip_encoder=125.0, device="cpu", tf32=False)
DATA = load("digits")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def config(seed: int, program: str = "plain", **changes: Any) -> dohyo.LoopConfig:
    return dataclasses.replace(CONFIG, seed=seed, program=program, **changes)


def model(seed: int, cls: type[nn.Module] = VAE) -> Any:
    torch.manual_seed(seed)
    made = cls(data=64, hidden=16, latent=4)  # type: ignore[call-arg]
    made.start_from(DATA.train)  # type: ignore[operator]
    return made


def objective(name: str, encoder: str | None = None, **options: Any) -> MaximumLikelihood:
    baseline = "running" if encoder == "variance" else "zero"
    return maximum_likelihood(ESTIMATORS[name].at_cost(6), encoder, baseline=baseline, **options)


def alone(seed: int, wanted: MaximumLikelihood, cls: type[nn.Module] = VAE, **changes: Any) -> tuple[list[dict[str, Any]], Any]:
    made = model(seed, cls)
    return list(dohyo.fit(made, DATA, wanted, config(seed, **changes))), made


def together(
    seeds: list[int], wanted: MaximumLikelihood, cls: type[nn.Module] = VAE, **changes: Any
) -> tuple[list[list[dict[str, Any]]], list[Any]]:
    models = [model(seed, cls) for seed in seeds]
    members = [Member(made, OnData(DATA), config(seed, **changes)) for seed, made in zip(seeds, models, strict=True)]
    records: list[list[dict[str, Any]]] = [[] for _ in seeds]
    for place, record in train_together(members, wanted):
        records[place].append(record)
    return records, models


def assert_same(one: tuple[list[dict[str, Any]], Any], other: tuple[list[dict[str, Any]], Any], tolerance: float = 1e-5) -> None:
    for a, b in zip(one[0], other[0], strict=True):
        assert a.keys() == b.keys()
        for key in set(a) - {"seconds", "program"}:
            assert a[key] == pytest.approx(b[key], rel=tolerance, abs=tolerance), key
    for a, b in zip(one[1].state_dict().values(), other[1].state_dict().values(), strict=True):
        assert torch.allclose(a.cpu(), b.cpu(), atol=20 * tolerance, rtol=0)


@pytest.mark.parametrize(
    ("name", "encoder"),
    [("iwae", "same"), ("elbo", None), ("jvi", None), ("sumo", "dreg"), ("sumo", "variance"), ("sumo", "iwae"),
     ("symmetric-sumo", None), ("multilevel-rr", None), ("multilevel-ss", None)],
)  # fmt: skip
def test_replicas_are_the_runs_alone(name: str, encoder: str | None) -> None:
    wanted = objective(name, encoder)
    records, models = together([3, 4], wanted)
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


class Handmade(nn.Module):
    """log_weights alone, noise by hand, and in evaluation mode when it arrives."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 8), nn.Linear(4, 64)
        self.eval()

    def start_from(self, train: Tensor) -> None:
        pass

    def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
        mean, log_scale = (self.encoder(x) * (0.2 if self.training else 0.1))[rows].chunk(2, -1)
        noise = torch.randn_like(mean)
        z = mean + log_scale.exp() * noise
        log_q = (-0.5 * noise.square() - log_scale).sum(-1)
        return torch.distributions.Bernoulli(logits=self.decoder(z), validate_args=False).log_prob(x[rows]).sum(-1) - log_q


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
    assert len(list(dohyo.fit(made, DATA, objective("iwae"), config(0)))) == 2


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
    members = [Member(m, OnData(DATA), config(seed), tmp_path / str(seed)) for seed, m in enumerate(models)]
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
        members = [Member(m, OnData(DATA), config(seed, **(changes if seed else {}))) for seed, m in enumerate(models)]
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
    members = [Member(m, OnData(ByHand(**fields)), config(seed)) for seed, m in enumerate(models)]
    list(train_together(members, wanted))
    for seed in range(2):
        made = model(seed)
        list(dohyo.fit(made, ByHand(**fields), wanted, config(seed)))
        assert_same(([], models[seed]), ([], made))
    members = [Member(m, OnData(Numpy(**fields)), config(seed)) for seed, m in enumerate(models)]
    with pytest.raises(Unbatchable, match="other ways"):
        list(train_together(members, wanted))


def test_replicas_that_were_killed_apart_catch_up(tmp_path: Path) -> None:
    """Their checkpoints are those of runs alone: one of three epochs, one of two, one of none."""
    wanted = objective("sumo")
    for seed, epochs in ((0, 3), (1, 2)):
        list(dohyo.fit(model(seed), DATA, wanted, config(seed, epochs=epochs), tmp_path / str(seed)))
    models = [model(seed) for seed in range(3)]
    members = [Member(made, OnData(DATA), config(seed, epochs=4), tmp_path / str(seed)) for seed, made in enumerate(models)]
    seen = [(place, record["epoch"]) for place, record in train_together(members, wanted)]
    assert seen == [(2, 1), (2, 2), (1, 3), (2, 3), (0, 4), (1, 4), (2, 4)]
    for seed in range(3):
        made = model(seed)
        list(dohyo.fit(made, DATA, wanted, config(seed, epochs=4)))
        best = load_checkpoint(tmp_path / str(seed))["best"]
        for key, value in made.state_dict().items():
            assert torch.allclose(best[key], value, atol=1e-5, rtol=0)
            assert best[key].untyped_storage().nbytes() == value.untyped_storage().nbytes()  # nobody else's numbers
        for own in load_checkpoint(tmp_path / str(seed))["optimiser"]["state"].values():
            assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in own.values())


def test_a_replica_that_stops_early_leaves_the_others() -> None:
    models, wanted = [model(seed) for seed in range(3)], objective("iwae")
    members = [Member(m, OnData(DATA), config(seed, epochs=3 if seed != 1 else 1)) for seed, m in enumerate(models)]
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
    ("cls", "why"), [(InPlace, "cannot|other"), (Counting, "buffers"), (Shared, "two places"), (Branching, "cannot be mapped")]
)
def test_models_that_cannot_be_mapped(cls: type[nn.Module], why: str) -> None:
    models = [model(seed, cls) for seed in range(2)]
    with pytest.raises(Unbatchable, match=why):
        check_batchable(models, DATA.valid[:2], torch.tensor([0, 0, 1, 1]), {})
    with pytest.raises(Unbatchable, match=why):
        list(train_together([Member(m, OnData(DATA), config(seed)) for seed, m in enumerate(models)], objective("sumo")))
    list(dohyo.fit(models[0], DATA, objective("iwae"), config(0, "auto", epochs=1)))  # alone it trains as ever
    with pytest.raises(Unbatchable, match=why):
        list(dohyo.fit(models[0], DATA, objective("iwae"), config(0, "captured", epochs=1)))


@pytest.mark.filterwarnings("ignore")  # torch's, of its own code
@pytest.mark.parametrize("cls", [VAE, TwoLayerVAE])
def test_one_program_for_every_number_of_log_weights(cls: type[nn.Module]) -> None:
    """Or none, where the model fixes it, as torch.cat does mapped over replicas: these then go together uncompiled."""
    models, x = [model(seed, cls) for seed in range(2)], DATA.valid[:2]
    check_batchable(models, x, torch.tensor([0, 0, 1, 1]), {}, traced)
    if cls is VAE:
        counters.clear()
        replicas = Replicas(models, [torch.Generator() for _ in models], traced, varying=True)
        for n in (2, 3, 7):
            replicas.bind(torch.cat([x, x]))(torch.arange(4).repeat_interleave(n))
        assert counters["stats"]["unique_graphs"] == 1
        return
    with pytest.raises(Unbatchable, match="cannot be mapped"):
        together([0, 1], objective("sumo"), cls, program="captured")
    records, _ = together([0, 1], objective("sumo"), cls, program="auto", epochs=1)
    assert records[0][0]["program"] == "plain"


def test_a_parameter_that_is_listed_twice() -> None:
    class Twice(VAE):
        def decoder_parameters(self) -> Any:
            return [*super().decoder_parameters(), self.decoder[0].weight]

    with pytest.raises(ValueError, match="twice"):
        alone(0, objective("iwae"), Twice)


def test_a_captured_step_that_fails_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("expected size 2==2, stride 7200==18000\nand more")

    monkeypatch.setattr(programs.Program, "_step", broken)
    with pytest.raises(ValueError, match=r"7200==18000\); train with --program plain"):
        together([0], objective("iwae"), program="captured", epochs=1)
    with pytest.raises(AssertionError):
        together([0, 1], objective("iwae"), epochs=1)


def test_a_k_for_each_datum_cannot_be_batched() -> None:
    with pytest.raises(Unbatchable, match="k_draw datum"):
        together([0, 1], objective("sumo", k_draw="datum"))


def test_noise_from_a_generator_is_the_global_noise() -> None:
    p = torch.rand(50)
    torch.manual_seed(5)
    wanted = torch.bernoulli(p), torch.randn(3), torch.distributions.Normal(0.0, 1.0).sample((4,))
    with DrawnBy(torch.Generator().manual_seed(5)):
        found = torch.bernoulli(p), torch.randn(3), torch.distributions.Normal(0.0, 1.0).sample((4,))
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_the_captured_step_on_a_cpu(tmp_path: Path) -> None:
    """Compiled, with two replicas and a random number of log-weights, and gone on with by the plain program.

    One batch size and one bucket, to compile little.
    """
    wanted = maximum_likelihood(dohyo.SUMO(2, dohyo.Finite((0.5, 0.5))))
    records: dict[int, list[dict[str, Any]]] = {3: [], 4: []}
    for program, epochs in (("captured", 4), ("plain", 8)):
        models = {seed: model(seed) for seed in records}
        options = {"batch_size": len(DATA.train), "epochs": epochs, "program": program}
        members = [Member(m, OnData(DATA), config(seed, **options), tmp_path / str(seed)) for seed, m in models.items()]
        for place, record in train_together(members, wanted):
            records[3 + place].append(record)
    assert [record["program"] for record in records[3]] == 4 * ["captured"] + 4 * ["plain"]
    for seed, made in models.items():
        assert_same((records[seed], made), alone(seed, wanted, batch_size=len(DATA.train), epochs=8))


def test_draws_in_one_piece_of_memory() -> None:
    """As a recorded step reads what was drawn for it: one copy moves tensors of several types."""
    drawn = [torch.rand(3, 5), torch.arange(7), torch.rand(2, 3) < 0.5, torch.rand(4, 1, 2, dtype=torch.float64)]
    like = [part.to("meta") for part in drawn]
    memory, copy = torch.zeros(2, sum(map(graphs._room, like)), dtype=torch.uint8)
    for place, part in zip(graphs._views(memory, like), drawn, strict=True):
        assert (place.data_ptr() - memory.data_ptr()) % 256 == 0
        place.copy_(part)
    copy.copy_(memory)
    for found, part in zip(graphs._views(copy, like), drawn, strict=True):
        assert torch.equal(found, part)
        assert found.is_contiguous()


def test_noise_that_was_drawn_beforehand_serves_one_call() -> None:
    x, rows = DATA.valid[:4], torch.arange(4).repeat_interleave(3)
    replicas = Replicas([model(0), model(1)], [torch.Generator().manual_seed(seed) for seed in (5, 6)])
    calls = [replicas.bind(x)(rows) for _ in range(2)]
    for seed, noise in zip((5, 6), replicas.noises, strict=True):
        noise.manual_seed(seed)
    replicas.drawn = replicas.draw(x, rows, {})
    for wanted in calls:
        assert torch.equal(replicas.bind(x)(rows), wanted)


def test_data_reach_the_step_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous, whatever the user's function makes: a recorded step reads them so, and other strides would be compiled anew."""

    class Sideways(type(DATA)):  # type: ignore[misc]
        def train_batch(self, index: Tensor) -> Tensor:
            return super().train_batch(index).T.contiguous().T

    class Seen(Exception):  # noqa: N818
        pass

    def seen(program: programs.Program, drawn: list[Tensor], plan: object) -> None:
        assert drawn[0].shape == (300, 64)
        raise Seen(drawn[0].is_contiguous())

    monkeypatch.setattr(programs.Program, "_step", seen)
    turned = Sideways(**{field.name: getattr(DATA, field.name) for field in dataclasses.fields(DATA)})
    with pytest.raises(Seen, match="True"):
        list(dohyo.fit(model(0), turned, objective("iwae"), config(0, "captured")))


def test_batches_of_one_s_own_train_alone() -> None:
    class Half(OnData):
        def batches(self, config: Any, progress: Any, order: torch.Generator) -> Any:
            yield from torch.randperm(len(self.data.train), generator=order)[:600].split(300)

    members = [Member(model(seed), Half(DATA), config(seed)) for seed in range(2)]
    with pytest.raises(Unbatchable, match="Half makes batches of its own"):
        list(train_together(members, objective("iwae")))
    assert [record["step"] for _, record in train_together(members[:1], objective("iwae"))] == [2, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "encoder"),
    [("iwae", "same"), ("iwae", "dreg"), ("sumo", "variance"), ("symmetric-sumo", None), ("multilevel-rr", None)],
)
def test_every_objective_captured_on_a_cpu(name: str, encoder: str | None) -> None:
    wanted = objective(name, encoder)
    records, models = together([3], wanted, program="captured")
    assert_same((records[0], models[0]), alone(3, wanted))


@pytest.mark.slow
@needs_gpu
@pytest.mark.parametrize(
    ("name", "encoder", "baseline"),
    [("iwae", "same", "zero"), ("sumo", "dreg", "zero"), ("sumo", "variance", "zero"), ("sumo", "variance", "running"),
     ("multilevel-rr", "dreg", "zero")],
)  # fmt: skip
def test_the_captured_step_on_a_gpu(name: str, encoder: str, baseline: str) -> None:
    """Recorded and replayed: most of these steps come from a graph."""
    wanted = maximum_likelihood(ESTIMATORS[name].at_cost(6), encoder, baseline=baseline)
    options = {"device": "cuda", "batch_size": 50, "epochs": 3}
    records, models = together([3, 4], wanted, program="captured", **options)
    for place, seed in enumerate((3, 4)):
        assert_same((records[place], models[place]), alone(seed, wanted, **options), tolerance=1e-4)
    with pytest.raises(AssertionError):
        assert_same((records[0], models[0]), alone(4, wanted, **options), tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_two_stochastic_layers_captured(device: str) -> None:
    wanted, options = objective("iwae", "dreg"), {"device": device, "epochs": 3}
    records, models = together([3, 4], wanted, TwoLayerVAE, program="captured", **options)
    for place, seed in enumerate((3, 4)):
        assert_same((records[place], models[place]), alone(seed, wanted, TwoLayerVAE, **options), tolerance=1e-4)


@pytest.mark.slow
@needs_gpu
def test_a_captured_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    wanted, options = objective("sumo"), {"device": "cuda", "batch_size": 50}
    for epochs in (2, 4):
        made = model(3)
        list(dohyo.fit(made, DATA, wanted, config(3, "captured", epochs=epochs, **options), tmp_path / "run"))
    whole = model(3)
    list(dohyo.fit(whole, DATA, wanted, config(3, "captured", epochs=4, **options)))
    for a, b in zip(made.state_dict().values(), whole.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-4, rtol=0)
