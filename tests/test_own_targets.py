"""Targets that a user wrote: how they are found, what is asked of them, and what a check finds."""

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dohyo.lab.targets import Banana, Custom, Funnel, check, target
from test_targets import seeded

USERS = """
import torch
from dohyo.lab.targets import Target

def density(x):
    return -x.square().sum(-1) / 2

def known(x):
    return -x.square().sum(-1) / 2

known.dimension = 3
known.log_normaliser = 2.7568
known.sample = lambda n, generator: torch.randn(n, 3, generator=generator)
known.quantities = lambda x: {"radius": x.norm(dim=-1)}
known.reference = lambda: {"radius": (1.596, 0.673)}
known.window = ((-3, 3), (-3, 3))

class Object:
    dimension = 2
    def __call__(self, x):
        return -x.abs().sum(-1)
    def quantities(self, x):
        return {"sum": x.sum(-1)}

built = Object()

class Mine(Target):
    name, dimension = "mine", 1
    def __call__(self, x):
        return -x[:, 0].cosh()

class Undecided(Target):
    def __call__(self, x):
        return -x[:, 0].cosh()

class Abstract(Target):
    dimension = 1

class Demanding:
    def __init__(self, secret):
        pass

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "users_pkg").mkdir()
    (tmp_path / "users_pkg" / "targets.py").write_text(USERS)
    (tmp_path / "users_broken.py").write_text("def broken(:\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("users_")]:
        del sys.modules[name]


def test_a_users_function(folder: Path) -> None:
    plain = target("users_pkg.targets:density", dimension=4)
    assert (plain.name, plain.dimension) == ("users_pkg.targets:density", 4)
    assert plain.log_normaliser is plain.window is plain.sample(3) is plain.reference() is None
    assert list(plain.quantities(torch.zeros(2, 4))) == ["x1", "x2", "x3", "x4"]
    check(plain, torch.randn(5, 4))
    x = torch.randn(5, 3, generator=seeded())
    for of in (target("users_pkg.targets:known"), target("users_pkg.targets:known", dimension=3)):
        check(of, x)
        torch.testing.assert_close(of(x), -x.square().sum(-1) / 2)
        assert (of.dimension, of.log_normaliser, of.window) == (3, 2.7568, ((-3.0, 3.0), (-3.0, 3.0)))
        assert torch.equal(of.sample(7, seeded()), torch.randn(7, 3, generator=seeded()).double())
        torch.testing.assert_close(of.quantities(x)["radius"], x.norm(dim=-1))
        assert of.reference() == {"radius": (1.596, 0.673)}


def test_a_users_object_or_class(folder: Path) -> None:
    for name in ("users_pkg.targets:built", "users_pkg.targets:Object"):
        of = target(name)
        check(of, torch.randn(5, 2))
        assert of.dimension == 2
        assert list(of.quantities(torch.zeros(1, 2))) == ["sum"]
    assert target("users_pkg.targets:Mine").name == "mine"
    assert target("dohyo.lab.targets:Banana") == Banana()


def test_a_python_callable() -> None:
    normal = torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))
    of = target(normal.log_prob, dimension=2)
    assert of.name == "log_prob"
    check(of, torch.randn(5, 2))
    assert of.sample(3) is None


@pytest.mark.parametrize(
    ("name", "dimension", "message"),
    [
        ("funel", None, "unknown target 'funel': did you mean 'funnel'.*your own is package.module:function"),
        ("eight-schools", 8, "eight-schools: --dimension 8 and its own dimension, 10, differ; leave out --dimension"),
        ("users_pkg.targets:density", None, "users_pkg.targets:density: how many dimensions.*give --dimension N"),
        ("users_pkg.targets:density", 0, "its dimension is 0; it must be a whole number of at least 1"),
        ("users_pkg.targets:density", 2.0, "its dimension is 2.0; it must be a whole number"),
        ("users_pkg.targets:known", 2, "--dimension 2 and its own dimension, 3, differ"),
        ("users_pkg.targets:Mine", 2, "--dimension 2 and its own dimension, 1, differ"),
        ("users_pkg.targets:Undecided", None, "its dimension is None; it must be a whole number"),
        ("users_pkg.targets:Abstract", None, "cannot be built without arguments .*__call__"),
        ("users_pkg.targets:Demanding", None, "cannot be built without arguments .*secret.*name a function"),
        ("users_pkg.targets:denisty", 2, "did you mean 'density'"),
        ("users_pkg.targets:number", 2, "is a int; it must be a function"),
        ("users_nowhere:density", 2, "no module 'users_nowhere'"),
        ("users_broken:density", 2, "SyntaxError"),
        ("users_pkg/targets.py:density", 2, "write package.module:function"),
        (3, 2, "int is not callable; use one of funnel, "),
        (None, None, "NoneType is not callable"),
    ],
)
def test_a_target_that_is_none(folder: Path, name: str, dimension: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        target(name, dimension)
    assert "\n" not in str(caught.value)


def with_attributes(**attributes: object) -> Callable[[Tensor], Tensor]:
    def mine(x: Tensor) -> Tensor:
        return -x.square().sum(-1)

    vars(mine).update(attributes)
    return mine


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"dimension": 2.5}, "its dimension is 2.5; it must be a whole number"),
        ({"dimension": True}, "its dimension is True"),
        ({"log_normaliser": "one"}, "its log_normaliser is 'one'; it must be a finite number, or None"),
        ({"log_normaliser": math.inf}, "its log_normaliser is inf"),
        ({"log_normaliser": torch.zeros(2)}, "its log_normaliser is tensor"),
        ({"window": (0, 1)}, r"its window is \(0, 1\); it must be \(\(left, right\), \(bottom, top\)\), or None"),
    ],
)
def test_bad_attributes(attributes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^mine: {message}"):
        target(with_attributes(**attributes), None if "dimension" in attributes else 2)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"sample": lambda n, generator: torch.zeros(n)}, r"sample\(2\) gave a float32 tensor \(2,\); .* a tensor \(2, 2\)"),
        ({"sample": lambda n, generator: 1 / 0}, r"its sample\(n, generator\) raised ZeroDivisionError: division by zero"),
        ({"sample": 3}, r"its sample\(n, generator\) raised TypeError: 'int' object is not callable"),
        ({"sample": lambda n: torch.zeros(n, 2)}, r"its sample\(n, generator\) raised TypeError: .* takes 1 positional argument"),
        ({"quantities": lambda: 0}, r"its quantities\(x\) raised TypeError: .* takes 0 positional arguments"),
        ({"quantities": lambda x: x}, r"quantities gave a float32 tensor \(6, 2\); it must be a dict of tensors \(6,\)"),
        ({"quantities": lambda x: {"a": x}}, r"the quantity 'a' is a float32 tensor \(6, 2\); it must be a tensor \(6,\)"),
        ({"quantities": lambda x: {"a": 1.0}}, r"the quantity 'a' is a float; it must be a tensor \(6,\)"),
        ({"quantities": lambda x: x.fold()}, r"its quantities\(x\) raised AttributeError"),
        ({"quantities": lambda x: int("a")}, r"its quantities\(x\) raised ValueError: invalid literal"),
        ({"reference": lambda: {"a": 1.0}}, r"reference must give a dict from names to \(mean, standard deviation\)"),
    ],
)
def test_attributes_that_fail_when_used(attributes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^mine: {message}"):
        check(target(with_attributes(**attributes), 2), torch.zeros(6, 2))


def test_a_check_leaves_the_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    check(target(with_attributes(sample=lambda n, generator: torch.randn(n, 2)), 2), torch.zeros(6, 2))
    assert torch.equal(torch.get_rng_state(), state)
    x = torch.zeros(6, 2, requires_grad=True)
    with torch.no_grad():  # a caller's mode does not matter, nor is its tensor touched
        check(Funnel(), x)
    assert x.grad is None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x[:, 7], r"raised IndexError: .* at x \(6, 2\)"),
        (lambda x: x.mul_(2).sum(-1), "raised RuntimeError: a leaf Variable"),
        (lambda x: 1.0, r"gave a float; it must be a tensor \(6,\)"),
        (lambda x: None, "gave None; it must be a tensor"),
        (lambda x: x.detach().sum(-1).numpy(), "gave a ndarray; it must be a tensor"),
        (lambda x: -x.square(), r"gave a float32 tensor \(6, 2\); it must be a tensor \(6,\), .* sum over x's last axis only"),
        (lambda x: -x.square().sum(), r"gave a float32 tensor \(\); it must be a tensor \(6,\)"),
        (lambda x: -x.square().sum(-1, keepdim=True), r"gave a float32 tensor \(6, 1\)"),
        (lambda x: x.sum(-1).long(), "gave a int64 tensor .* floating-point"),
        (lambda x: x.sum(-1) + 0j, "gave a complex64 tensor .* floating-point"),
        (lambda x: x.sum(-1).to("meta"), "gave a tensor on meta for x on cpu"),
        (lambda x: x[:, 0].log(), r"is NaN at 2 of 6 points, such as x = \(-1, 0\)"),
        (lambda x: -x[:, 1].log(), r"is \+inf at 6 of 6 points"),
        (lambda x: x[:, 1].log(), r"is -inf at 6 of 6 points, such as x = \(-1, 0\)"),
        (lambda x: x.detach().sum(-1), r"has no gradient; .* no \.detach\(\)"),
        (lambda x: x.round().long().double().sum(-1), "has no gradient"),
        (lambda x: torch.nn.Parameter(torch.zeros(6)) + 1, "has no gradient"),
        (lambda x: torch.where(x[:, 1] > 0, x[:, 1].log(), x[:, 0]), "has a gradient that is NaN or infinite at 6 of 6"),
        (lambda x: -x[:, 1].sqrt(), "has a gradient that is NaN or infinite at 6 of 6"),
    ],
)
def test_what_a_check_finds(function: Callable[[Tensor], Tensor], message: str) -> None:
    x = torch.tensor([[-1.0, 0], [-0.5, 0], [0.5, 0], [1, 0], [2, 0], [3, 0]])
    with pytest.raises(ValueError, match=f"^mine {message}") as caught:
        check(Custom(function, 2, "mine"), x)
    assert "\n" not in str(caught.value)


def test_densities_of_zero_at_some_points() -> None:
    half = Custom(lambda x: torch.where(x[:, 0] > 0, -x[:, 0], -math.inf), 1)
    check(half, torch.tensor([[-1.0], [1.0]]))
    with pytest.raises(ValueError, match="-inf at 2 of 2 points"):
        check(half, torch.tensor([[-1.0], [-2.0]]))


@pytest.mark.parametrize("x", [torch.zeros(2), torch.zeros(3, 4), torch.zeros(0, 2), torch.zeros(3, 2, dtype=torch.long)])
def test_a_check_needs_numbers(x: Tensor) -> None:
    with pytest.raises(ValueError, match=r"funnel needs floating-point numbers \(n, 2\)"):
        check(Funnel(), x)
