"""Models by name: this package's, and a user's own class."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dohyo.models import MODELS, VAE, TwoLayerVAE, build

USERS = """
import torch
from torch import nn
from dohyo.models import LatentVariableModel

class Good(nn.Module):
    def __init__(self, data, width=3):
        super().__init__()
        self.layer, self.width = nn.Linear(data, width), width
    def log_weights(self, x, rows):
        return self.layer(x[rows]).sum(-1)

class Anything(Good):
    def __init__(self, **options):
        super().__init__(options["data"])
        self.options = options

class Plain(nn.Module):
    def log_weights(self, x, rows):
        return torch.zeros(len(rows))

class Demanding(Good):
    def __init__(self, secret):
        super().__init__(2)

class NoWeights(nn.Module):
    pass

class Half(LatentVariableModel):
    def encode(self, x):
        return x

class NoModule:
    pass

def function():
    pass

def made(data, shape):
    return Good(data, len(shape))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "users_pkg").mkdir()
    (tmp_path / "users_pkg" / "models.py").write_text(USERS)
    (tmp_path / "users_broken.py").write_text("def broken(:\n")
    (tmp_path / "users_raises.py").write_text("raise RuntimeError('on\\nimport')\n")
    (tmp_path / "users_needs.py").write_text("import a_package_nobody_has\n")
    (tmp_path / "tabulate.py").write_text(USERS)  # a name that an installed package may have, too
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(("users_", "tabulate"))]:
        del sys.modules[name]


def test_a_users_class(folder: Path) -> None:
    path = list(sys.path)
    model = build("users_pkg.models:Good", data=5, hidden=200, latent=3)
    assert model.log_weights(torch.rand(2, 5), torch.tensor([0, 0, 1])).shape == (3,)
    assert model.width == 3
    assert build("users_pkg.models:Good", data=5, width=7).width == 7
    assert build("users_pkg.models:Anything", data=5, hidden=2).options == {"data": 5, "hidden": 2}
    assert isinstance(build("users_pkg.models:Plain", data=5, hidden=2), nn.Module)
    assert isinstance(build("dohyo.models:VAE", data=5, unknown=2), VAE)
    assert build("users_pkg.models:made", data=5, shape=(1, 5), hidden=2).width == 2  # a function
    assert build("tabulate:Good", data=2).log_weights.__globals__["__file__"].startswith(str(folder))
    assert sys.path == path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vae3", "did you mean 'vae'.*package.module:Class"),
        ("zzz", "unknown model 'zzz': the names are vae, vae2"),
        ("users_nowhere:Model", "no module 'users_nowhere' in .* or among the installed packages"),
        ("users_pkg.nowhere:Model", "no module 'users_pkg.nowhere'"),
        ("users_pkg.models:Goood", "did you mean 'Good'"),
        ("users_pkg.models:mde", "did you mean 'made'"),  # a function
        ("users_pkg.models:NoModule", "the class NoModule.*torch.nn.Module"),
        ("users_pkg.models:function", "returned a NoneType; it must be a torch.nn.Module with log_weights"),
        ("users_pkg.models:NoWeights", "log_weights.*LatentVariableModel"),
        ("users_pkg.models:Half", "lacks likelihood, posterior, prior"),
        ("users_pkg.models:Demanding", "missing a required argument: 'secret'"),
        ("users_broken:Model", "SyntaxError"),
        ("users_raises:Model", "RuntimeError: on import"),
        ("users_needs:Model", "needs 'a_package_nobody_has'"),
        ("users_pkg/models.py:Good", "write package.module:Class"),
        ("users_pkg.models:", "write package.module:Class"),
        (":Good", "write package.module:Class"),
    ],
)
def test_a_class_that_is_none(folder: Path, name: str, message: str) -> None:
    path = list(sys.path)
    with pytest.raises(ValueError, match=message) as caught:
        build(name, data=5)
    assert "\n" not in str(caught.value)
    assert sys.path == path


def test_a_models_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="vae has no argument 'hiden': did you mean 'hidden'"):
        build("vae", hiden=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"likelihood": "guassian"}, "did you mean 'gaussian'"),
        ({"hidden": 0}, "hidden is 0"),
        ({"latent": -1}, "latent is -1"),
        ({"data": 0}, "data is 0"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    for name in MODELS:
        with pytest.raises(ValueError, match=message):
            build(name, **arguments)
    with pytest.raises(ValueError, match="latent1 is 0"):
        TwoLayerVAE(latent1=0)
