"""What pyproject.toml asks for is what the code imports, and the command says what is missing."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dohyo
from dohyo.__main__ import main

SOURCE = Path(dohyo.__file__).parent
PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = {"lightning-fabric": "lightning_fabric", "pillow": "PIL", "pyyaml": "yaml"}  # where the name is another


def modules(requirements: list[str]) -> set[str]:
    names = [re.split(r"[^\w-]", requirement)[0] for requirement in requirements]
    return {MODULES.get(name, name) for name in names}


def imported(paths: list[Path]) -> set[str]:
    """The packages that these files import, anywhere in them, but for Python's own and dohyo."""
    found: set[str] = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.module is not None, f"{path.name}: a relative import"
                found.add(node.module.split(".")[0])
    return found - sys.stdlib_module_names - {"dohyo"}


LIBRARY, CLI = modules(PROJECT["dependencies"]), modules(PROJECT["optional-dependencies"]["cli"])
LAB_FILES = sorted((SOURCE / "lab").rglob("*.py"))
LIBRARY_FILES = [path for path in SOURCE.rglob("*.py") if not {"lab", "integrations"} & set(path.relative_to(SOURCE).parts)]


def test_the_library_needs_three_packages() -> None:
    assert sorted(LIBRARY) == ["numpy", "scipy", "torch"]
    assert len(LIBRARY_FILES) > 20
    assert imported(LIBRARY_FILES) <= LIBRARY


def test_the_laboratory_needs_what_its_extra_brings_and_no_less() -> None:
    assert len(LAB_FILES) > 60
    # For Parquet, for --scheduler, and what PyTorch brings for CUDA GPUs.
    assert imported(LAB_FILES) <= LIBRARY | CLI | {"pyarrow", "distributed", "triton"}
    assert imported(LAB_FILES) >= CLI


def test_one_version() -> None:
    root = Path(__file__).parents[1]
    assert f"\nversion: {dohyo.__version__}\n" in (root / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## [{dohyo.__version__}]" in (root / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("missing", sorted(CLI))
def test_the_command_says_what_to_install(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(sys, "argv", ["dohyo", "train"])
    assert main() == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error == f"dohyo: error: the command needs {missing}; install with: pip install 'dohyo[cli]'\n"


@pytest.mark.parametrize("own", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}], ids=str)
def test_the_command_lets_waiting_threads_sleep(own: dict[str, str]) -> None:
    """Unless told otherwise; it says so before torch is loaded, which reads it then."""
    script = """
import os, sys, dohyo_command
loaded, sys.argv = "torch" in sys.modules, ["dohyo", "--version"]
try:
    dohyo_command.main()
finally:
    print(loaded, os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules)
"""
    outside = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run([sys.executable, "-c", script], env=outside | own, capture_output=True, text=True, timeout=100)
    wanted = str(own.get("GOMP_SPINCOUNT")) if own else "10000"
    assert done.stdout.split() == ["dohyo", dohyo.__version__, "False", wanted, "True"]
    assert PROJECT["scripts"] == {"dohyo": "dohyo_command:main"}
