"""What is released: a wheel and a source distribution, built, installed into fresh environments and used there."""

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import dohyo

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]

# Everything that torch, numpy and scipy ask for here, and what they ask for in turn.
NEEDS = """
import re
from importlib.metadata import distributions, requires

def name_of(text):
    return re.split(r"[^\\w.-]", text)[0].lower().replace("_", "-")

installed = {name_of(each.metadata["Name"]) for each in distributions()}
needed, new = set(), {"torch", "numpy", "scipy"}
while new:
    needed |= new
    new = {name_of(text) for name in needed for text in requires(name) or () if "extra ==" not in text} & installed - needed
print(*sorted(installed - needed))
"""
STEP = """
import sys

import torch

import dohyo
from dohyo.models import VAE

torch.manual_seed(0)
model, x = VAE(data=64, hidden=32, latent=4), torch.rand(20, 64).round()
estimator = dohyo.MultilevelRR.at_cost(15)
print(dohyo.evaluate(model, x, estimator).kind)
dohyo.objectives.MaximumLikelihood(estimator)(model, x).loss.backward()
print(all(parameter.grad.abs().sum() > 0 for parameter in model.parameters()))
print([name for name in sys.modules if name.startswith("dohyo.lab")])
"""


def run(*line: str | Path, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # Without the paths of whoever runs the tests: what is imported must be what was installed.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [str(part) for part in line], cwd=folder, env=clean | {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")},
        capture_output=True, text=True, check=False, timeout=1800,
    )  # fmt: skip


def said(*line: str | Path, folder: Path) -> str:
    found = run(*line, folder=folder)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def fresh(folder: Path, what: str) -> Path:
    """The programs of a new environment with nothing but this in it."""
    venv.create(folder / "venv", with_pip=True)
    said(folder / "venv/bin/python", "-m", "pip", "install", "--quiet", "--no-compile", what, folder=folder)
    return folder / "venv/bin"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("dist")
    said(sys.executable, "-m", "build", "--outdir", folder, ROOT, folder=folder)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


def test_what_is_in_them(built: tuple[Path, Path]) -> None:
    wheel, source = built
    files = [path for path in (ROOT / "src/dohyo").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    wanted = {path.relative_to(ROOT / "src").as_posix() for path in files}
    assert {"dohyo/py.typed", "dohyo/lab/data/digits.npz", "dohyo/lab/report/templates/page.html"} <= wanted
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    assert wanted <= in_wheel
    assert {name.split("/")[0] for name in in_wheel} == {"dohyo", "dohyo_command.py", f"dohyo-{dohyo.__version__}.dist-info"}
    with tarfile.open(source) as archive:
        in_source = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in wanted} | {"pyproject.toml", "README.md", "LICENSE"} <= in_source
    assert not [name for name in in_source if name.startswith("tests")]  # they need the repository around them


def test_the_wheel_alone_is_the_library(built: tuple[Path, Path], tmp_path: Path) -> None:
    programs = fresh(tmp_path, str(built[0]))
    assert said(programs / "python", "-c", NEEDS, folder=tmp_path).split() == ["dohyo", "pip"]
    assert said(programs / "python", "-c", STEP, folder=tmp_path).splitlines() == ["unbiased", "True", "[]"]
    found = run(programs / "dohyo", "train", folder=tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    assert re.fullmatch(r"dohyo: error: the command needs .*jsonargparse.*: pip install 'dohyo\[cli\]'\n", found.stderr)


def test_the_source_with_its_extra_is_the_command(built: tuple[Path, Path], tmp_path: Path) -> None:
    programs = fresh(tmp_path, f"{built[1]}[cli]")
    assert said(programs / "dohyo", "--version", folder=tmp_path).split()[-1] == dohyo.__version__
    small = ["--epochs", "1", "--hidden", "8", "--latent", "2", "--test-terms", "5", "--valid-terms", "2", "--device", "cpu"]
    said(programs / "dohyo", "train", *small, "--out", "run", "--json", folder=tmp_path)
    said(programs / "dohyo", "sample", "run", "--count", "4", "--out", "samples.png", folder=tmp_path)
    said(programs / "dohyo", "report", "run", "--out", "report.html", folder=tmp_path)
    assert {path.name for path in tmp_path.glob("*.*")} >= {"samples.png", "report.html"}
